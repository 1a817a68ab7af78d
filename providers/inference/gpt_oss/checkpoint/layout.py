"""The names and shapes of a gpt-oss model's tensors in each layout of published checkpoints. No torch.

`openai`: the release's own `original` folder. `transformers`: the same on the model hub, experts in MXFP4. `dense`:
saved by transformers after fine-tuning, experts unpacked and transposed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

from apis.errors import ConfigError
from providers.inference.gpt_oss.checkpoint.files import FLOAT_BYTES, StoredTensor
from providers.inference.gpt_oss.checkpoint.spec import MXFP4_GROUP, ModelSpec

Layout = Literal["openai", "transformers", "dense"]
TensorNames = Mapping[str, tuple[str, ...]]

_TRANSFORMERS_ATTENTION: Final = {
    "attention_norm": ("input_layernorm.weight",),
    "qkv_weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "qkv_bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "out_weight": ("self_attn.o_proj.weight",),
    "out_bias": ("self_attn.o_proj.bias",),
    "sinks": ("self_attn.sinks",),
    "mlp_norm": ("post_attention_layernorm.weight",),
    "router_weight": ("mlp.router.weight",),
    "router_bias": ("mlp.router.bias",),
    "gate_up_bias": ("mlp.experts.gate_up_proj_bias",),
    "down_bias": ("mlp.experts.down_proj_bias",),
}
_LAYER_NAMES: Final[Mapping[Layout, TensorNames]] = MappingProxyType(
    {
        "openai": {
            "attention_norm": ("attn.norm.scale",),
            "qkv_weight": ("attn.qkv.weight",),
            "qkv_bias": ("attn.qkv.bias",),
            "out_weight": ("attn.out.weight",),
            "out_bias": ("attn.out.bias",),
            "sinks": ("attn.sinks",),
            "mlp_norm": ("mlp.norm.scale",),
            "router_weight": ("mlp.gate.weight",),
            "router_bias": ("mlp.gate.bias",),
            "gate_up_blocks": ("mlp.mlp1_weight.blocks",),
            "gate_up_scales": ("mlp.mlp1_weight.scales",),
            "gate_up_bias": ("mlp.mlp1_bias",),
            "down_blocks": ("mlp.mlp2_weight.blocks",),
            "down_scales": ("mlp.mlp2_weight.scales",),
            "down_bias": ("mlp.mlp2_bias",),
        },
        "transformers": _TRANSFORMERS_ATTENTION
        | {
            "gate_up_blocks": ("mlp.experts.gate_up_proj_blocks",),
            "gate_up_scales": ("mlp.experts.gate_up_proj_scales",),
            "down_blocks": ("mlp.experts.down_proj_blocks",),
            "down_scales": ("mlp.experts.down_proj_scales",),
        },
        "dense": _TRANSFORMERS_ATTENTION
        | {"gate_up_weight": ("mlp.experts.gate_up_proj",), "down_weight": ("mlp.experts.down_proj",)},
    }
)
_OPENAI_END_NAMES: Final = {"embedding": "embedding.weight", "unembedding": "unembedding.weight", "norm": "norm.scale"}
_TRANSFORMERS_END_NAMES: Final = {
    "embedding": "model.embed_tokens.weight",
    "unembedding": "lm_head.weight",
    "norm": "model.norm.weight",
}


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """A tensor that a checkpoint must have. `is_packed` ones are bytes, the others any floating type."""

    name: str
    shape: tuple[int, ...]
    is_packed: bool


def layer_names(layout: Layout, layer: int) -> dict[str, tuple[str, ...]]:
    """Return for each part of a layer the tensors that, stacked in this order, are it."""
    prefix = f"block.{layer}." if layout == "openai" else f"model.layers.{layer}."
    return {part: tuple(prefix + name for name in names) for part, names in _LAYER_NAMES[layout].items()}


def end_names(layout: Layout) -> dict[str, str]:
    """Return the tensors that belong to no layer: embedding, unembedding, norm."""
    return _OPENAI_END_NAMES if layout == "openai" else _TRANSFORMERS_END_NAMES


def expected_tensors(spec: ModelSpec, layout: Layout) -> list[ExpectedTensor]:
    """Return every tensor of a checkpoint, in the order of its layers."""
    ends = {"embedding": (spec.vocabulary, spec.hidden), "norm": (spec.hidden,)}
    if not spec.tied_embeddings:
        ends["unembedding"] = (spec.vocabulary, spec.hidden)
    names = end_names(layout)
    tensors = [ExpectedTensor(names[part], shape, is_packed=False) for part, shape in ends.items()]
    shapes = _layer_shapes(spec)
    for layer in range(len(spec.layers)):
        for part, stacked in layer_names(layout, layer).items():
            packed = part.endswith(("_blocks", "_scales"))
            rows = _stacked_rows(spec) if len(stacked) > 1 else shapes[part][:1]
            for name, count in zip(stacked, rows, strict=True):
                tensors.append(ExpectedTensor(name, (count, *shapes[part][1:]), packed))
    return tensors


def detect_layout(folder: Path, names: Iterable[str]) -> Layout:
    """Return the layout that the names belong to. Raises ConfigError for none of them."""
    tensor_names = set(names)
    for layout, parts in _LAYER_NAMES.items():
        marker = parts["gate_up_weight" if layout == "dense" else "gate_up_blocks"][0]
        if any(name.endswith(marker) for name in tensor_names):
            return layout
    examples = ", ".join(sorted(tensor_names)[:3])
    raise ConfigError(
        f"{folder}: its tensors ({examples}, ...) are not named as a gpt-oss checkpoint's experts are. Adapters must "
        "be merged first, and other quantisations than MXFP4 undone: save it with transformers as bfloat16."
    )


def check_tensors(spec: ModelSpec, layout: Layout, stored_tensors: Mapping[str, StoredTensor], folder: Path) -> None:
    """Raise ConfigError naming the first tensor that is missing, unexpected, or of a wrong shape or type."""
    if layout != "dense" and (spec.hidden % MXFP4_GROUP or spec.intermediate % MXFP4_GROUP):
        raise ConfigError(f"{folder / 'config.json'}: MXFP4 needs sizes that are multiples of {MXFP4_GROUP}.")
    expected = {tensor.name: tensor for tensor in expected_tensors(spec, layout)}
    for name, expected_tensor in expected.items():
        stored = stored_tensors.get(name)
        if stored is None:
            raise ConfigError(
                f"{folder}: tensor {name} is missing. The download is not whole, or its config not its own."
            )
        if stored.shape != expected_tensor.shape:
            raise ConfigError(
                f"{stored.file}: tensor {name} has the shape {list(stored.shape)}, but {folder / 'config.json'} makes "
                f"it {list(expected_tensor.shape)}. File and config are not of the same model."
            )
        if stored.dtype not in (("U8",) if expected_tensor.is_packed else FLOAT_BYTES):
            types = "U8" if expected_tensor.is_packed else ", ".join(FLOAT_BYTES)
            raise ConfigError(f"{stored.file}: tensor {name} is of type {stored.dtype}; it must be {types}.")
    for name in sorted(stored_tensors.keys() - expected.keys()):
        raise ConfigError(
            f"{stored_tensors[name].file}: tensor {name} does not belong to the model that "
            f"{folder / 'config.json'} describes."
        )


def _stacked_rows(spec: ModelSpec) -> tuple[int, int, int]:
    keys = spec.kv_heads * spec.head_dim
    return spec.heads * spec.head_dim, keys, keys


def _layer_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    hidden, inner, experts = spec.hidden, spec.intermediate, spec.experts
    return {
        "attention_norm": (hidden,),
        "qkv_weight": (spec.qkv, hidden),
        "qkv_bias": (spec.qkv,),
        "out_weight": (hidden, spec.heads * spec.head_dim),
        "out_bias": (hidden,),
        "sinks": (spec.heads,),
        "mlp_norm": (hidden,),
        "router_weight": (experts, hidden),
        "router_bias": (experts,),
        "gate_up_blocks": (experts, 2 * inner, hidden // MXFP4_GROUP, MXFP4_GROUP // 2),
        "gate_up_scales": (experts, 2 * inner, hidden // MXFP4_GROUP),
        "gate_up_weight": (experts, hidden, 2 * inner),
        "gate_up_bias": (experts, 2 * inner),
        "down_blocks": (experts, hidden, inner // MXFP4_GROUP, MXFP4_GROUP // 2),
        "down_scales": (experts, hidden, inner // MXFP4_GROUP),
        "down_weight": (experts, inner, hidden),
        "down_bias": (experts, hidden),
    }
