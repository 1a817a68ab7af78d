"""StepLauncher: launches steps on the device, with one memory for all of their shapes and graphs of those of singles
alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from providers.inference.gpt_oss.triton_backend.batch import StepShape, StepShapes, TritonBatch, input_ranges
from providers.inference.gpt_oss.triton_backend.kernels.buffers import StepBuffers, Tables, make_step, tensor_to_list
from providers.inference.gpt_oss.triton_backend.kernels.step import Kernels, launch_step
from providers.inference.gpt_oss.triton_backend.kernels.weights import Weights

WARM_UP_RUNS: Final = 2


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """Tokens on their way to the host."""

    ids: Tensor
    done_event: torch.cuda.Event | None

    def wait(self) -> list[int]:
        """Return the tokens; blocks until the step that samples them has ended."""
        if self.done_event is not None:
            self.done_event.synchronize()
        return tensor_to_list(self.ids)


class StepLauncher:
    """Launches batches, one after the other, on the current stream. No method waits for the device."""

    def __init__(self, weights: Weights, tables: Tables, shapes: StepShapes, kernels: Kernels) -> None:
        largest = shapes.largest
        self._weights = weights
        self._kernels = kernels
        self._device = tables.keys.device
        self._buffers = make_step(weights.spec, tables, largest.rows, largest.samples, largest.singles)
        self._inputs = torch.zeros(sum(input_ranges(largest)[-1]), dtype=torch.int32, device=self._device)
        self._graphs: dict[tuple[StepShape, bool], torch.cuda.CUDAGraph] = {}
        self._steps: dict[StepShape, StepBuffers] = {}

    def warm_up(self, shapes: Sequence[StepShape]) -> None:
        """Compile every kernel for these shapes, and capture the graphs of those without spans."""
        for shape in shapes:
            self._write_inputs(TritonBatch(shape))
            for _ in range(WARM_UP_RUNS):
                self._launch_layers(shape)
                self._kernels.sample(self._weights.ends, self._step_buffers(shape))
                self._kernels.unembed(self._weights.ends, self._logits_buffers(shape))
            if shape.singles == shape.rows:
                self._capture(shape)
        torch.cuda.synchronize(self._device)

    def clear_graphs(self) -> None:
        """Launch every kernel of a step by itself from now on, to test that graphs change nothing."""
        self._graphs.clear()

    def launch(self, batch: TritonBatch) -> PendingTokens:
        """Compute the rows, and sample the tokens of `sample_rows`."""
        self._write_inputs(batch)
        shape, samples = batch.shape, len(batch.sample_rows)
        if (graph := self._graphs.get((shape, bool(samples)))) is not None:
            graph.replay()
        else:
            self._launch_layers(shape)
            if samples:
                self._kernels.sample(self._weights.ends, self._step_buffers(shape))
        return self._fetch_tokens(self._step_buffers(shape).sampled_tokens[:samples])

    def logits(self, batch: TritonBatch) -> Tensor:
        """Return the logits of `logit_rows` in the batch that was launched last. The caller may overwrite them."""
        step = self._logits_buffers(batch.shape)
        self._kernels.unembed(self._weights.ends, step)
        return step.logits[: len(batch.logit_rows)]

    def _capture(self, shape: StepShape) -> None:
        for samples in (True, False):
            graph = torch.cuda.CUDAGraph()
            # Another thread may allocate meanwhile, such as one that loads another model.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._launch_layers(shape)
                if samples:
                    self._kernels.sample(self._weights.ends, self._step_buffers(shape))
            self._graphs[shape, samples] = graph

    def _launch_layers(self, shape: StepShape) -> None:
        launch_step(self._weights, self._step_buffers(shape), self._kernels)

    def _write_inputs(self, batch: TritonBatch) -> None:
        packed = torch.frombuffer(batch.pack_inputs(), dtype=torch.int32)
        if self._device.type == "cuda":
            packed = packed.pin_memory()
        self._inputs[: len(packed)].copy_(packed, non_blocking=True)

    def _fetch_tokens(self, ids: Tensor) -> PendingTokens:
        if self._device.type != "cuda":
            return PendingTokens(ids.clone(), None)
        host_ids = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
        host_ids.copy_(ids, non_blocking=True)
        done_event = torch.cuda.Event()
        done_event.record()
        return PendingTokens(host_ids, done_event)

    def _step_buffers(self, shape: StepShape) -> StepBuffers:
        """Return the cached views: two dozen views take a tenth of a millisecond, which is a tenth of a small step."""
        if shape not in self._steps:
            self._steps[shape] = self._slice_buffers(shape)
        return self._steps[shape]

    def _slice_buffers(self, shape: StepShape) -> StepBuffers:
        """Return the memory's first rows, with the inputs at their places in the packed inputs."""
        memory, rows, chosen = self._buffers, shape.rows, self._buffers.chosen_experts.shape[1]
        inputs = self._input_views(shape)
        return replace(
            memory,
            singles=shape.singles,
            **dict(zip(("slots", "positions", "tokens", "sample_rows"), inputs, strict=False)),
            tiles=inputs[5].view(-1, 4),
            hidden=memory.hidden[:rows],
            normed_hidden=memory.normed_hidden[:rows],
            queries=memory.queries[:rows],
            attention_output=memory.attention_output[:rows],
            chosen_experts=memory.chosen_experts[:rows],
            shares=memory.shares[:rows],
            inner=memory.inner[:rows],
            order=memory.order[: rows * chosen],
            logits=memory.logits[: shape.samples],
            sampled_tokens=memory.sampled_tokens[: shape.samples],
        )

    def _logits_buffers(self, shape: StepShape) -> StepBuffers:
        return replace(self._step_buffers(shape), sample_rows=self._input_views(shape)[4])

    def _input_views(self, shape: StepShape) -> list[Tensor]:
        return [self._inputs[at : at + size] for at, size in input_ranges(shape)]
