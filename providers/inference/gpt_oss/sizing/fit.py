"""Decides by arithmetic if a machine can run a model usefully: its memory, and the tokens per second. No torch."""

from dataclasses import dataclass
from typing import Final

from providers.inference.gpt_oss.checkpoint.spec import MXFP4_GROUP, ModelSpec

MIN_TOKENS_PER_S: Final = 2.0
MIN_CONTEXT_TOKENS: Final = 4096

_GIB: Final = 2**30
_PACKED_BYTES: Final = 0.5 + 1 / MXFP4_GROUP


@dataclass(frozen=True, slots=True)
class Machine:
    """A device's free memory, how fast a product with one vector reads weights, and how fast MXFP4 is unpacked."""

    device: str
    memory_bytes: int
    read_bytes_per_s: float
    unpack_weights_per_s: float


@dataclass(frozen=True, slots=True)
class Precision:
    """`item_bytes` of a number that is not packed; `experts_packed` says that the experts are MXFP4."""

    item_bytes: int
    experts_packed: bool


@dataclass(frozen=True, slots=True)
class FitReport:
    """`refusal` has the problem and its remedy; None means that the model fits. Speed is of a single sequence."""

    needed_bytes: int
    tokens_per_s: float
    refusal: str | None


def weight_bytes(spec: ModelSpec, precision: Precision) -> int:
    """Return the bytes of all weights in memory."""
    expert = _expert_bytes(spec, precision) * spec.experts * len(spec.layers)
    embedding = 0 if spec.tied_embeddings else spec.vocabulary * spec.hidden
    return round(expert + (spec.dense_parameters + embedding) * precision.item_bytes)


def token_read_bytes(spec: ModelSpec, precision: Precision) -> int:
    """Return the bytes of weights that every token of a single sequence reads."""
    expert = _expert_bytes(spec, precision) * spec.experts_per_token * len(spec.layers)
    return round(expert + spec.dense_parameters * precision.item_bytes)


def assess_fit(
    spec: ModelSpec, precision: Precision, machine: Machine, min_tokens_per_s: float = MIN_TOKENS_PER_S
) -> FitReport:
    """Compare the model's memory with a short context, and its highest speed, with the machine and the limit."""
    context = min(MIN_CONTEXT_TOKENS, spec.context_tokens)
    needed_bytes = weight_bytes(spec, precision) + context * spec.kv_bytes(precision.item_bytes)
    seconds = token_read_bytes(spec, precision) / machine.read_bytes_per_s
    if precision.experts_packed:
        seconds += len(spec.layers) * spec.experts_per_token * spec.expert_weights / machine.unpack_weights_per_s
    speed = 1 / seconds
    instead = (
        "Serve a GGUF of it with the provider `llama_cpp`, or point the provider `vllm` at a server with a GPU. "
        "To run it here all the same, set `run_anyway: true`."
    )
    refusal = None
    if needed_bytes > machine.memory_bytes:
        refusal = (
            f"This model needs about {needed_bytes / _GIB:.1f} GiB and {machine.device} has "
            f"{machine.memory_bytes / _GIB:.1f} GiB free. {instead}"
        )
    elif speed < min_tokens_per_s:
        refusal = f"This model would make at most {speed:.2g} tokens/s on {machine.device} with torch. {instead}"
    return FitReport(needed_bytes, speed, refusal)


def _expert_bytes(spec: ModelSpec, precision: Precision) -> float:
    weights = spec.expert_weights * (_PACKED_BYTES if precision.experts_packed else precision.item_bytes)
    return weights + spec.expert_biases * precision.item_bytes
