"""ModelCheckpoint: a checkpoint whose headers are checked when it is opened, read layer by layer as canonical tensors,
memory-mapped."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from apis.errors import ConfigError
from providers.inference.gpt_oss.checkpoint.files import StoredTensor, read_tensor_headers
from providers.inference.gpt_oss.checkpoint.layout import Layout, check_tensors, detect_layout, end_names, layer_names
from providers.inference.gpt_oss.checkpoint.mxfp4 import SCALE_NAN
from providers.inference.gpt_oss.checkpoint.spec import ModelSpec, read_spec


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """One matrix of every expert in MXFP4: blocks [E, out, in/32, 16], scales [E, out, in/32], bias [E, out]."""

    blocks: Tensor
    scales: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class DenseExperts:
    """One matrix of every expert as numbers, transposed: weight [E, in, out], bias [E, out]."""

    weight: Tensor
    bias: Tensor


Experts = PackedExperts | DenseExperts


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """One layer. The rows of `gate_up` alternate: gate, linear, gate, linear."""

    attention_norm: Tensor
    qkv_weight: Tensor
    qkv_bias: Tensor
    out_weight: Tensor
    out_bias: Tensor
    sinks: Tensor
    mlp_norm: Tensor
    router_weight: Tensor
    router_bias: Tensor
    gate_up: Experts
    down: Experts


@dataclass(frozen=True, slots=True)
class EndTensors:
    """The tensors before and after the layers. `unembedding` is the embedding itself where the two are tied."""

    embedding: Tensor
    norm: Tensor
    unembedding: Tensor


@dataclass(frozen=True, slots=True)
class Progress:
    """Layers and bytes loaded so far, and their totals."""

    layers: int
    layers_total: int
    bytes: int
    bytes_total: int


@dataclass(frozen=True, slots=True)
class ModelCheckpoint:
    """A checkpoint that is complete by its headers. Tensors are views of the mapped files: pages come from disk when
    touched."""

    folder: Path
    spec: ModelSpec
    layout: Layout
    stored_tensors: dict[str, StoredTensor]

    @property
    def experts_packed(self) -> bool:
        return self.layout != "dense"

    def read_ends(self) -> EndTensors:
        names = end_names(self.layout)
        embedding = self._read_tensor(names["embedding"])
        unembedding = embedding if self.spec.tied_embeddings else self._read_tensor(names["unembedding"])
        return EndTensors(embedding, self._read_tensor(names["norm"]), unembedding)

    def read_layers(self, progress: Callable[[Progress], None] | None = None) -> Iterator[LayerTensors]:
        """Yield each layer in turn; `progress` is called when the caller asks for the next one.

        Raises ConfigError naming the tensor and its file where a file cannot be read, or its numbers are not finite.
        """
        total = sum(tensor.nbytes for tensor in self.stored_tensors.values())
        done = 0
        for layer in range(len(self.spec.layers)):
            names = layer_names(self.layout, layer)
            parts = {part: self._read_stacked(stacked) for part, stacked in names.items()}
            yield _build_layer(parts)
            done += sum(self.stored_tensors[name].nbytes for stacked in names.values() for name in stacked)
            if progress is not None:
                progress(Progress(layer + 1, len(self.spec.layers), done, total))

    def _read_stacked(self, names: tuple[str, ...]) -> Tensor:
        tensors = [self._read_tensor(name) for name in names]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def _read_tensor(self, name: str) -> Tensor:
        file = self.stored_tensors[name].file
        try:
            with cast("Any", safe_open(file, framework="pt")) as opened:
                tensor: Tensor = opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file}: tensor {name} cannot be read: {error}. Download the file again.") from error
        if _is_damaged(name, tensor):
            raise ConfigError(f"{file}: tensor {name} holds numbers that are not finite. Download the file again.")
        return tensor


def open_checkpoint(path: str | Path) -> ModelCheckpoint:
    """Open a folder of any of the known layouts, having checked every tensor's name, shape, type and place.

    Raises ConfigError naming the file, the tensor and the remedy.
    """
    folder = Path(path).expanduser()
    spec, _ = read_spec(folder)
    stored = read_tensor_headers(folder)
    layout = detect_layout(folder, stored)
    check_tensors(spec, layout, stored, folder)
    return ModelCheckpoint(folder, spec, layout, stored)


def _is_damaged(name: str, tensor: Tensor) -> bool:
    if tensor.dtype == torch.uint8:
        return name.endswith("scales") and bool((tensor == SCALE_NAN).any())
    least, most = torch.aminmax(tensor)
    return not bool(torch.isfinite(least) & torch.isfinite(most))


def _build_layer(parts: dict[str, Tensor]) -> LayerTensors:
    def experts(name: str) -> Experts:
        bias = parts.pop(f"{name}_bias")
        if f"{name}_weight" in parts:
            return DenseExperts(parts.pop(f"{name}_weight"), bias)
        return PackedExperts(parts.pop(f"{name}_blocks"), parts.pop(f"{name}_scales"), bias)

    gate_up, down = experts("gate_up"), experts("down")
    return LayerTensors(**parts, gate_up=gate_up, down=down)
