"""A model's weights in the form that the kernels read: experts in tiles, everything else as it is on disk."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from apis.errors import ConfigError
from providers.inference.gpt_oss.checkpoint.checkpoint import (
    Experts,
    LayerTensors,
    ModelCheckpoint,
    PackedExperts,
    Progress,
)
from providers.inference.gpt_oss.checkpoint.spec import ModelSpec
from providers.inference.gpt_oss.torch_backend.attention import rotary_table
from providers.inference.gpt_oss.triton_backend.kernels.layout import TiledExperts, tile_experts
from providers.inference.gpt_oss.triton_backend.kernels.narrow import Int8Unembedding, quantize_unembedding


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer, on one device. Matrices and biases are of the model's type, norms and sinks of the type to sum in.

    qkv_weight [(heads + 2 * kv_heads) * head_dim, hidden], out_weight [hidden, heads * head_dim], router_weight
    [experts, hidden], and a bias for each. `gate_up` has rows gate, linear, gate, ... `window` is None in layers that
    attend to everything. `rotary` [2, positions, head_dim / 2] are cosines and sines, of all layers the same.
    """

    spec: ModelSpec
    index: int
    window: int | None
    rotary: Tensor
    attention_norm: Tensor
    qkv_weight: Tensor
    qkv_bias: Tensor
    sinks: Tensor
    out_weight: Tensor
    out_bias: Tensor
    mlp_norm: Tensor
    router_weight: Tensor
    router_bias: Tensor
    gate_up: TiledExperts
    down: TiledExperts


@dataclass(frozen=True, slots=True)
class EndWeights:
    """Weights before and after the layers: embedding and unembedding [vocabulary, hidden], norm [hidden].
    `int8_unembedding` is the unembedding's int8 copy, or None without `certified_head`."""

    spec: ModelSpec
    embedding: Tensor
    norm: Tensor
    unembedding: Tensor
    int8_unembedding: Int8Unembedding | None = None


@dataclass(frozen=True, slots=True)
class Weights:
    """A whole model."""

    spec: ModelSpec
    layers: tuple[Layer, ...]
    ends: EndWeights


def load_weights(
    checkpoint: ModelCheckpoint,
    device: torch.device,
    dtype: torch.dtype,
    progress: Callable[[Progress], None] | None = None,
    *,
    certified_head: bool = False,
) -> Weights:
    """Load and repack layer by layer, on the device. `certified_head` quantizes the unembedding's int8 copy too.

    Raises ConfigError naming the tensor and file where one is damaged, and for experts that are not in MXFP4.
    """
    spec = checkpoint.spec
    if not checkpoint.experts_packed:
        raise ConfigError(f"{checkpoint.folder}: its experts are not in MXFP4, which is all that the kernels read.")
    cosines, sines = rotary_table(spec.rotary, spec.head_dim, spec.context_tokens)
    rotary = torch.stack((cosines, sines)).to(device)
    layers = tuple(
        _build_layer(spec, index, tensors, (rotary, dtype))
        for index, tensors in enumerate(checkpoint.read_layers(progress))
    )
    ends = checkpoint.read_ends()
    embedding = ends.embedding.to(device, dtype)
    unembedding = embedding if ends.unembedding is ends.embedding else ends.unembedding.to(device, dtype)
    narrow = quantize_unembedding(unembedding) if certified_head else None
    return Weights(
        spec, layers, EndWeights(spec, embedding, ends.norm.to(device, sum_dtype(dtype)), unembedding, narrow)
    )


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of norms, softmax and every sum; float64 is there for the references alone."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _build_layer(
    spec: ModelSpec, index: int, tensors: LayerTensors, rotary_and_dtype: tuple[Tensor, torch.dtype]
) -> Layer:
    rotary, dtype = rotary_and_dtype

    def placed(tensor: Tensor) -> Tensor:
        return tensor.to(rotary.device, dtype)

    def summed(tensor: Tensor) -> Tensor:
        return tensor.to(rotary.device, sum_dtype(dtype))

    return Layer(
        spec=spec,
        index=index,
        window=spec.window if spec.layers[index] == "sliding_attention" else None,
        rotary=rotary,
        attention_norm=summed(tensors.attention_norm),
        qkv_weight=placed(tensors.qkv_weight),
        qkv_bias=placed(tensors.qkv_bias),
        sinks=summed(tensors.sinks),
        out_weight=placed(tensors.out_weight),
        out_bias=placed(tensors.out_bias),
        mlp_norm=summed(tensors.mlp_norm),
        router_weight=placed(tensors.router_weight),
        router_bias=placed(tensors.router_bias),
        gate_up=_tile_matrix(tensors.gate_up, rotary.device, dtype),
        down=_tile_matrix(tensors.down, rotary.device, dtype),
    )


def _tile_matrix(experts: Experts, device: torch.device, dtype: torch.dtype) -> TiledExperts:
    assert isinstance(experts, PackedExperts), "the checkpoint says that it is packed"
    blocks, scales = experts.blocks.to(device), experts.scales.to(device)
    return tile_experts(PackedExperts(blocks, scales, experts.bias.to(device, dtype)))
