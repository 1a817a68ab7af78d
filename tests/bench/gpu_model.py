"""gpt-oss with random weights, made where they are used: true shapes, magnitudes of a trained model, two ways of
routing."""

from dataclasses import dataclass, replace
from typing import Final, Literal

import torch
from torch import Tensor

from providers.inference.gpt_oss.checkpoint import PackedExperts
from providers.inference.gpt_oss.kernels.layout import TiledExperts, tile
from providers.inference.gpt_oss.kernels.weights import Ends, Layer, Weights
from providers.inference.gpt_oss.spec import ModelSpec
from providers.inference.gpt_oss.synth import TINY, resized
from providers.inference.gpt_oss.torch_attention import rotary_table

Routing = Literal["uniform", "zipf"]

TRUE: Final = resized(
    layers=("sliding_attention", "full_attention") * 12,
    hidden=2880,
    intermediate=2880,
    heads=64,
    kv_heads=8,
    head_dim=64,
    experts=32,
    vocabulary=201_088,
    window=128,
)
SPECS: Final = {
    "20b": TRUE,
    "120b": replace(TRUE, layers=TRUE.layers[:2] * 18, experts=128),
    "tiny": replace(TINY, layers=TINY.layers[:2], vocabulary=201_088),
}
EXPERT_BYTES: Final = 4.25 / 8
ZIPF_SLOPE: Final = 0.6
"""Of the router's bias against the logarithm of an expert's rank: its logits' own spread is about 1."""


def make_weights(spec: ModelSpec, device: torch.device, dtype: torch.dtype, routing: Routing) -> Weights:
    """Layer by layer, so that no more is held than the model itself and a layer. One seed, one model."""
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType] - typed in part
    cosines, sines = rotary_table(spec.rotary, spec.head_dim, spec.context_tokens)
    rotary = torch.stack((cosines, sines)).to(device)
    layers = tuple(_layer(spec, index, (rotary, dtype), routing) for index in range(len(spec.layers)))
    ends = [torch.randn(spec.vocabulary, spec.hidden, device=device, dtype=dtype) for _ in range(2)]
    norm = 1 + torch.randn(spec.hidden, device=device) / 10
    return Weights(spec, layers, Ends(spec, ends[0], norm, ends[1].mul_(spec.hidden**-0.5)))


def _layer(spec: ModelSpec, index: int, like: tuple[Tensor, torch.dtype], routing: Routing) -> Layer:
    rotary, dtype = like
    device = rotary.device

    def matrix(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype) * shape[-1] ** -0.5

    def vector(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype) / 10

    def summed(size: int, centre: float) -> Tensor:
        return centre + torch.randn(size, device=device) / 10

    bias = vector(spec.experts)
    if routing == "zipf":
        ranks = torch.randperm(spec.experts, device=device) + 1
        bias = (-ZIPF_SLOPE * ranks.log2()).to(dtype)
    return Layer(
        spec=spec,
        index=index,
        window=spec.window if spec.layers[index] == "sliding_attention" else None,
        rotary=rotary,
        attention_norm=summed(spec.hidden, 1),
        qkv_weight=matrix(spec.qkv, spec.hidden),
        qkv_bias=vector(spec.qkv),
        sinks=summed(spec.heads, 0),
        out_weight=matrix(spec.hidden, spec.heads * spec.head_dim),
        out_bias=vector(spec.hidden),
        mlp_norm=summed(spec.hidden, 1),
        router_weight=matrix(spec.experts, spec.hidden),
        router_bias=bias,
        gate_up=_experts(spec, 2 * spec.intermediate, spec.hidden, vector(spec.experts, 2 * spec.intermediate)),
        down=_experts(spec, spec.hidden, spec.intermediate, vector(spec.experts, spec.hidden)),
    )


def _experts(spec: ModelSpec, rows: int, depth: int, bias: Tensor) -> TiledExperts:
    """Random codes have a spread of 3.2; scales bring that to about 1 / sqrt(depth)."""
    centre = 127 - round(float(torch.tensor(3.2 * depth**0.5).log2()))
    shape = (spec.experts, rows, depth // 32)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, device=bias.device)
    scales = torch.randint(centre - 1, centre + 2, shape, dtype=torch.uint8, device=bias.device)
    return tile(PackedExperts(blocks, scales, bias))


@dataclass(frozen=True)
class Touched:
    """What a step of `rows` rows with `context` cached tokens each reads: `experts` different ones in each layer, on
    average, as counted. Bytes of bfloat16, whatever the type it ran in."""

    spec: ModelSpec
    rows: int
    context: int
    experts: float

    @property
    def expert_bytes(self) -> float:
        """Of one layer, all matrices."""
        one = self.spec.expert_weights * EXPERT_BYTES + 2 * self.spec.expert_biases
        return self.experts * one

    @property
    def cached_bytes(self) -> float:
        """Keys and values, of all layers."""
        spec = self.spec
        each = 2 * spec.kv_heads * spec.head_dim * 2
        windows = [spec.window if kind == "sliding_attention" else self.context for kind in spec.layers]
        return self.rows * each * sum(min(window, self.context) for window in windows)

    @property
    def step_bytes(self) -> float:
        layers = len(self.spec.layers)
        return 2 * self.spec.dense_parameters + layers * self.expert_bytes + self.cached_bytes

    @property
    def operations(self) -> float:
        """Multiplications and additions of a step's products, without attention."""
        spec = self.spec
        experts = len(spec.layers) * spec.experts_per_token * spec.expert_weights
        return 2.0 * self.rows * (spec.dense_parameters - spec.vocabulary * spec.hidden + experts)

    def kernel_bytes(self) -> dict[str, float]:
        """Of a layer, or of the model's ends, by the launch function's name."""
        spec = self.spec
        third = self.expert_bytes / 3
        project = 2.0 * spec.hidden * (spec.heads * spec.head_dim + spec.experts)
        return {
            "embed": 4.0 * self.rows * spec.hidden,
            "qkv": 2.0 * spec.qkv * spec.hidden,
            "attend_decode": 4.0 * self.rows * spec.kv_heads * spec.head_dim * self.context,
            "project_out": project,
            "experts_up": 2 * third,
            "experts_down": third,
            "grouped_up": 2 * third,
            "grouped_down": third,
            "unembed": 2.0 * spec.vocabulary * spec.hidden,
            "sample": 2.0 * spec.vocabulary * spec.hidden,
        }
