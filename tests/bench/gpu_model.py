"""gpt-oss with random weights, made where they are used: true shapes, magnitudes of a trained model, two ways of
routing."""

from dataclasses import dataclass, replace
from typing import Final, Literal

import torch
from torch import Tensor

from providers.inference.gpt_oss.checkpoint.checkpoint import PackedExperts
from providers.inference.gpt_oss.checkpoint.spec import ModelSpec
from providers.inference.gpt_oss.torch_backend.attention import rotary_table
from providers.inference.gpt_oss.triton_backend.kernels.buffers import MAX_CERTIFIED_ROWS
from providers.inference.gpt_oss.triton_backend.kernels.layout import TiledExperts, tile_experts
from providers.inference.gpt_oss.triton_backend.kernels.narrow import quantize_unembedding
from providers.inference.gpt_oss.triton_backend.kernels.weights import EndWeights, Layer, Weights
from tests.support.models.random_checkpoints import TINY, tiny_spec_with

Routing = Literal["uniform", "zipf"]

TRUE: Final = tiny_spec_with(
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
LENGTHS_SPREAD: Final = 0.5
"""The standard deviation of the logarithm of the unembedding's row lengths."""

ZIPF_SLOPE: Final = 0.6
"""The slope of the router's bias over the logarithm of an expert's rank: its logits' own spread is about 1."""


def make_weights(
    spec: ModelSpec, device: torch.device, dtype: torch.dtype, routing: Routing, *, certified: bool = False
) -> Weights:
    """Layer by layer, so that no more is held than the model itself and a layer. One seed, one model. `certified`: with
    the unembedding's int8 copy."""
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType] - typed in part
    cosines, sines = rotary_table(spec.rotary, spec.head_dim, spec.context_tokens)
    rotary = torch.stack((cosines, sines)).to(device)
    layers = tuple(_layer(spec, index, (rotary, dtype), routing) for index in range(len(spec.layers)))
    ends = [torch.randn(spec.vocabulary, spec.hidden, device=device, dtype=dtype) for _ in range(2)]
    norm = 1 + torch.randn(spec.hidden, device=device) / 10
    # As if trained: some tokens are far likelier than others, so that few of them can be the best.
    lengths = torch.randn(spec.vocabulary, 1, device=device).mul(LENGTHS_SPREAD).exp().to(dtype)
    unembedding = ends[1].mul_(spec.hidden**-0.5).mul_(lengths)
    return Weights(
        spec,
        layers,
        EndWeights(spec, ends[0], norm, unembedding, quantize_unembedding(unembedding) if certified else None),
    )


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
    return tile_experts(PackedExperts(blocks, scales, bias))


@dataclass(frozen=True)
class Touched:
    """The bytes that a step must read, and its operations. It has `rows` rows after `context` cached tokens: each is a
    sequence of its own or, if it is a `prompt`, all of them are one. `experts` different ones are used in each layer,
    on average, as counted. Bytes are those of bfloat16, also where it ran in another type; values that the step itself
    writes and reads again are not counted. `certified`: its tokens are chosen by an int8 copy of the unembedding, if
    they are few enough; rows that are then read once more are not counted."""

    spec: ModelSpec
    rows: int
    context: int
    experts: float
    prompt: bool = False
    certified: bool = False

    @property
    def expert_bytes(self) -> float:
        """The bytes of all matrices of one layer's experts that are used."""
        one = self.spec.expert_weights * EXPERT_BYTES + 2 * self.spec.expert_biases
        return self.experts * one

    @property
    def cached_bytes(self) -> float:
        """Keys and values, of all layers."""
        spec = self.spec
        each = 2 * spec.kv_heads * spec.head_dim * 2
        sequences = 1 if self.prompt else self.rows
        return sequences * each * sum(min(window, self.context) for window in self._windows)

    @property
    def step_bytes(self) -> float:
        layers = len(self.spec.layers)
        saved = 2.0 * self.spec.vocabulary * self.spec.hidden - self.sampling_bytes
        return 2 * self.spec.dense_parameters - saved + layers * self.expert_bytes + self.cached_bytes

    @property
    def sampling_bytes(self) -> float:
        """The bytes of the unembedding that are read to choose tokens."""
        samples = 1 if self.prompt else self.rows
        if self.certified and samples <= MAX_CERTIFIED_ROWS:
            return self.spec.vocabulary * (self.spec.hidden + 12.0)
        return 2.0 * self.spec.vocabulary * self.spec.hidden

    @property
    def attention_operations(self) -> float:
        """The operations of attention in all layers: scores and sums of values, over the tokens that each row sees."""
        spec = self.spec
        each = 4.0 * spec.heads * spec.head_dim
        return each * sum(self._count_seen(window) for window in self._windows)

    @property
    def operations(self) -> float:
        """Multiplications and additions of a step's products; of a prompt only the last row is sampled."""
        spec = self.spec
        experts = len(spec.layers) * spec.experts_per_token * spec.expert_weights
        unembedding = spec.vocabulary * spec.hidden
        each = spec.dense_parameters - unembedding + experts
        samples = 1 if self.prompt else self.rows
        return 2.0 * (self.rows * each + samples * unembedding) + self.attention_operations

    def limit_s(self, bytes_s: float, operations_s: float) -> float:
        """The least time of a step on a device that reads and computes so much in a second."""
        return max(self.step_bytes / bytes_s, self.operations / operations_s)

    def kernel_bytes(self) -> dict[str, float]:
        """Return the bytes by the launch function's name: those of a layer, on average, or of the model's ends."""
        spec = self.spec
        third = self.expert_bytes / 3
        project = 2.0 * spec.hidden * (spec.heads * spec.head_dim + spec.experts)
        return {
            "embed": 4.0 * self.rows * spec.hidden,
            "qkv": 2.0 * spec.qkv * spec.hidden,
            "attend_decode": self.cached_bytes / len(spec.layers),
            "attend_prefill": self.cached_bytes / len(spec.layers),
            "project_out": project,
            "route": 8.0 * self.rows * spec.experts_per_token,
            "experts_up": 2 * third,
            "experts_down": third,
            "grouped_up": 2 * third,
            "grouped_down": third,
            "unembed": 2.0 * spec.vocabulary * spec.hidden,
            "sample": self.sampling_bytes,
        }

    def kernel_operations(self) -> dict[str, float]:
        """Return the operations of the launch functions that multiply, in the form of `kernel_bytes`."""
        spec = self.spec
        pairs = self.rows * spec.experts_per_token
        attention = self.attention_operations / len(spec.layers)
        return {
            "qkv": 2.0 * self.rows * spec.qkv * spec.hidden,
            "attend_decode": attention,
            "attend_prefill": attention,
            "project_out": 2.0 * self.rows * spec.hidden * (spec.heads * spec.head_dim + spec.experts),
            "experts_up": 4.0 * pairs * spec.hidden * spec.intermediate,
            "experts_down": 2.0 * pairs * spec.hidden * spec.intermediate,
            "grouped_up": 4.0 * pairs * spec.hidden * spec.intermediate,
            "grouped_down": 2.0 * pairs * spec.hidden * spec.intermediate,
        }

    @property
    def _windows(self) -> list[int]:
        whole = self.context + self.rows
        return [self.spec.window if kind == "sliding_attention" else whole for kind in self.spec.layers]

    def _count_seen(self, window: int) -> float:
        """Pairs of a row and a token that it sees, in a layer."""
        if not self.prompt:
            return self.rows * min(window, self.context + 1)
        first, last = self.context + 1, self.context + self.rows
        growing = range(first, min(last, window) + 1)
        return (growing.start + growing.stop - 1) * len(growing) / 2 + (self.rows - len(growing)) * window
