"""Steps on the device: one memory for all of their shapes, and graphs of those that are of singles alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from providers.inference.gpt_oss.triton_backend.batch import Batch, Shape, Shapes, places
from providers.inference.gpt_oss.triton_backend.kernels.buffers import Step, Tables, listed, make_step
from providers.inference.gpt_oss.triton_backend.kernels.step import Kernels, launch_step
from providers.inference.gpt_oss.triton_backend.kernels.weights import Weights

WARM_UPS: Final = 2


@dataclass(frozen=True, slots=True)
class Pending:
    """Tokens on their way to the host."""

    ids: Tensor
    done: torch.cuda.Event | None

    def wait(self) -> list[int]:
        """Blocks until the step that makes them has ended."""
        if self.done is not None:
            self.done.synchronize()
        return listed(self.ids)


class Steps:
    """Launches batches, one behind the other, on the current stream. Nothing here waits for the device."""

    def __init__(self, weights: Weights, tables: Tables, shapes: Shapes, kernels: Kernels) -> None:
        largest = shapes.largest
        self._weights = weights
        self._kernels = kernels
        self._device = tables.keys.device
        self._memory = make_step(weights.spec, tables, largest.rows, largest.samples, largest.singles)
        self._inputs = torch.zeros(sum(places(largest)[-1]), dtype=torch.int32, device=self._device)
        self._graphs: dict[tuple[Shape, bool], torch.cuda.CUDAGraph] = {}
        self._steps: dict[Shape, Step] = {}

    def warm_up(self, shapes: Sequence[Shape]) -> None:
        """Compile every kernel for these shapes, and capture the graphs of those without spans."""
        for shape in shapes:
            self._write(Batch(shape))
            for _ in range(WARM_UPS):
                self._layers(shape)
                self._kernels.sample(self._weights.ends, self._step(shape))
                self._kernels.unembed(self._weights.ends, self._asked(shape))
            if shape.singles == shape.rows:
                self._capture(shape)
        torch.cuda.synchronize(self._device)

    def forget_graphs(self) -> None:
        """Launch every kernel of a step by itself from now on, to see whether that changes anything."""
        self._graphs.clear()

    def launch(self, batch: Batch) -> Pending:
        """Compute the rows, and choose the tokens of those that `samples` name."""
        self._write(batch)
        shape, samples = batch.shape, len(batch.samples)
        if (graph := self._graphs.get((shape, bool(samples)))) is not None:
            graph.replay()
        else:
            self._layers(shape)
            if samples:
                self._kernels.sample(self._weights.ends, self._step(shape))
        return self._fetch(self._step(shape).sampled[:samples])

    def logits(self, batch: Batch) -> Tensor:
        """Of the rows that `asked` names, in the batch that was launched last. Theirs to use up who asks."""
        step = self._asked(batch.shape)
        self._kernels.unembed(self._weights.ends, step)
        return step.logits[: len(batch.asked)]

    def _capture(self, shape: Shape) -> None:
        for samples in (True, False):
            graph = torch.cuda.CUDAGraph()
            # Another thread may well allocate meanwhile, as one that loads another model does.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._layers(shape)
                if samples:
                    self._kernels.sample(self._weights.ends, self._step(shape))
            self._graphs[shape, samples] = graph

    def _layers(self, shape: Shape) -> None:
        launch_step(self._weights, self._step(shape), self._kernels)

    def _write(self, batch: Batch) -> None:
        packed = torch.frombuffer(batch.packed(), dtype=torch.int32)
        if self._device.type == "cuda":
            packed = packed.pin_memory()
        self._inputs[: len(packed)].copy_(packed, non_blocking=True)

    def _fetch(self, ids: Tensor) -> Pending:
        if self._device.type != "cuda":
            return Pending(ids.clone(), None)
        kept = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
        kept.copy_(ids, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return Pending(kept, done)

    def _step(self, shape: Shape) -> Step:
        """Made once: two dozen views take a tenth of a millisecond, which is a tenth of a small step."""
        if shape not in self._steps:
            self._steps[shape] = self._cut(shape)
        return self._steps[shape]

    def _cut(self, shape: Shape) -> Step:
        """The memory's first rows, with the inputs where `packed` has them."""
        memory, rows, chosen = self._memory, shape.rows, self._memory.chosen.shape[1]
        inputs = self._views(shape)
        return replace(
            memory,
            singles=shape.singles,
            **dict(zip(("slots", "positions", "tokens", "samples"), inputs, strict=False)),
            tiles=inputs[5].view(-1, 4),
            hidden=memory.hidden[:rows],
            normed=memory.normed[:rows],
            queries=memory.queries[:rows],
            attended=memory.attended[:rows],
            chosen=memory.chosen[:rows],
            shares=memory.shares[:rows],
            inner=memory.inner[:rows],
            order=memory.order[: rows * chosen],
            logits=memory.logits[: shape.samples],
            sampled=memory.sampled[: shape.samples],
        )

    def _asked(self, shape: Shape) -> Step:
        return replace(self._step(shape), samples=self._views(shape)[4])

    def _views(self, shape: Shape) -> list[Tensor]:
        return [self._inputs[at : at + size] for at, size in places(shape)]
