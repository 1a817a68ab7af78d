"""Writes random checkpoints: of any shape, in each of the real layouts, in one file or in shards."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType] - typed in part
from torch import Tensor

from providers.inference.gpt_oss.checkpoint.files import INDEX_FILE
from providers.inference.gpt_oss.checkpoint.layout import Layout, expected_tensors, layer_names
from providers.inference.gpt_oss.checkpoint.mxfp4 import unpack
from providers.inference.gpt_oss.checkpoint.spec import ModelSpec, Rotary

TINY: Final = ModelSpec(
    layers=("sliding_attention", "full_attention", "sliding_attention", "full_attention"),
    hidden=64,
    intermediate=96,
    heads=8,
    kv_heads=2,
    head_dim=16,
    experts=8,
    experts_per_token=4,
    vocabulary=256,
    window=16,
    norm_eps=1e-5,
    swiglu_limit=7.0,
    swiglu_alpha=1.702,
    context_tokens=131072,
    rotary=Rotary(150000.0, 32.0, 4096, 32.0, 1.0, truncate=False),
)
"""A model of the right form that is quick to run. Its sizes are all different, so that no two can be confused."""


@dataclass(frozen=True, slots=True)
class SaveFormat:
    """The form of a written checkpoint: its layout, how many files, and the type of the tensors that are not packed."""

    layout: Layout = "openai"
    shards: int = 1
    dtype: torch.dtype = torch.bfloat16


def write_checkpoint(
    folder: Path, spec: ModelSpec = TINY, save_format: SaveFormat = SaveFormat(), seed: int = 0
) -> None:
    """Write config.json and the tensors. One seed makes the same model in every layout, within `save_format.dtype`.

    The sizes are such that numbers keep their magnitude through the layers, as in a trained model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = dict(_convert_layout(random_tensors(spec, seed), spec, save_format))
    write_tensors(folder, tensors, save_format.shards)
    config = (
        openai_config(spec)
        if save_format.layout == "openai"
        else transformers_config(spec, experts_packed=save_format.layout != "dense")
    )
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def random_tensors(spec: ModelSpec, seed: int) -> dict[str, Tensor]:
    """Return a model in OpenAI's layout, floats in float32 with bfloat16's precision."""
    generator = torch.Generator().manual_seed(seed)
    return {
        tensor.name: _random_tensor(tensor.name, tensor.shape, generator) for tensor in expected_tensors(spec, "openai")
    }


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], shards: int = 1) -> None:
    """Write the tensors into one file, or into several and their index."""
    if shards == 1:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name].contiguous() for name in names[shard::shards]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index), encoding="utf-8")


def openai_config(spec: ModelSpec) -> dict[str, Any]:
    """Return `original/config.json` in the release's form."""
    return {
        "num_hidden_layers": len(spec.layers),
        "num_experts": spec.experts,
        "experts_per_token": spec.experts_per_token,
        "vocab_size": spec.vocabulary,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "swiglu_limit": spec.swiglu_limit,
        "head_dim": spec.head_dim,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "sliding_window": spec.window,
        "initial_context_length": spec.rotary.original_context_tokens,
        "rope_theta": spec.rotary.theta,
        "rope_scaling_factor": spec.rotary.factor,
        "rope_ntk_alpha": spec.rotary.beta_slow,
        "rope_ntk_beta": spec.rotary.beta_fast,
    }


def transformers_config(spec: ModelSpec, *, experts_packed: bool) -> dict[str, Any]:
    """Return config.json in the model hub's form."""
    config = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "hidden_act": "silu",
        "num_hidden_layers": len(spec.layers),
        "num_local_experts": spec.experts,
        "num_experts_per_tok": spec.experts_per_token,
        "vocab_size": spec.vocabulary,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "swiglu_limit": spec.swiglu_limit,
        "head_dim": spec.head_dim,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "sliding_window": spec.window,
        "layer_types": list(spec.layers),
        "max_position_embeddings": spec.context_tokens,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied_embeddings,
        "rope_theta": spec.rotary.theta,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": spec.rotary.factor,
            "beta_fast": spec.rotary.beta_fast,
            "beta_slow": spec.rotary.beta_slow,
            "original_max_position_embeddings": spec.rotary.original_context_tokens,
            "truncate": spec.rotary.truncate,
        },
    }
    if experts_packed:
        config["quantization_config"] = {"quant_method": "mxfp4"}
    return config


def _random_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if name.endswith("blocks"):
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    if name.endswith("scales"):
        # E2M1's own spread is 3.2; the result is weights of about 1/sqrt(inputs), as in linear layers.
        centre = 127 - round(torch.log2(torch.tensor(3.2 * (shape[-1] * 32) ** 0.5)).item())
        return torch.randint(centre - 1, centre + 2, shape, dtype=torch.uint8, generator=generator)
    values = torch.randn(shape, generator=generator)
    if name.endswith("norm.scale"):
        values = 1 + values / 10
    elif name.endswith("weight") and not name.startswith("embedding"):
        values *= shape[-1] ** -0.5
    elif "bias" in name:
        values /= 10
    return values.bfloat16().float()


def _convert_layout(
    tensors: Mapping[str, Tensor], spec: ModelSpec, save_format: SaveFormat
) -> Iterator[tuple[str, Tensor]]:
    def stored(tensor: Tensor) -> Tensor:
        return tensor if tensor.dtype == torch.uint8 else tensor.to(save_format.dtype)

    if save_format.layout == "openai":
        for name, tensor in tensors.items():
            yield name, stored(tensor)
        return
    rows = [spec.heads * spec.head_dim] + 2 * [spec.kv_heads * spec.head_dim]
    ends = {"embedding.weight": "model.embed_tokens.weight", "norm.scale": "model.norm.weight"}
    for ours, theirs in (ends if spec.tied_embeddings else ends | {"unembedding.weight": "lm_head.weight"}).items():
        yield theirs, stored(tensors[ours])
    for layer in range(len(spec.layers)):
        openai = {part: tensors[names[0]] for part, names in layer_names("openai", layer).items()}
        for part, names in layer_names(save_format.layout, layer).items():
            whole = _unpack_experts(openai, part) if part in ("gate_up_weight", "down_weight") else openai[part]
            pieces = torch.split(whole, rows) if len(names) > 1 else (whole,)
            for name, piece in zip(names, pieces, strict=True):
                yield name, stored(piece)


def _unpack_experts(parts: Mapping[str, Tensor], part: str) -> Tensor:
    matrix = part.removesuffix("_weight")
    return unpack(parts[f"{matrix}_blocks"], parts[f"{matrix}_scales"], torch.float32).transpose(1, 2)


def tiny_spec_with(**changes: Any) -> ModelSpec:
    """Return TINY with these fields changed."""
    return replace(TINY, **changes)
