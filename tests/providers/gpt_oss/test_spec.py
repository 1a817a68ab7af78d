"""config.json in both dialects, and what is wrong with one."""

import json
from pathlib import Path
from typing import Any

import pytest

from apis.errors import ConfigError
from providers.inference.gpt_oss.checkpoint.spec import ModelSpec, Rotary, read_spec
from tests.support.models.random_checkpoints import TINY, openai_config, tiny_spec_with, transformers_config

GPT_OSS_20B = ModelSpec(
    layers=("sliding_attention", "full_attention") * 12,
    hidden=2880,
    intermediate=2880,
    heads=64,
    kv_heads=8,
    head_dim=64,
    experts=32,
    experts_per_token=4,
    vocabulary=201088,
    window=128,
    norm_eps=1e-5,
    swiglu_limit=7.0,
    swiglu_alpha=1.702,
    context_tokens=131072,
    rotary=Rotary(150000.0, 32.0, 4096, 32.0, 1.0, truncate=False),
)


def written(folder: Path, config: Any) -> Path:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


def test_both_dialects_describe_the_same_model(tmp_path: Path) -> None:
    assert read_spec(written(tmp_path, openai_config(GPT_OSS_20B))) == (GPT_OSS_20B, "openai")
    assert read_spec(written(tmp_path, transformers_config(GPT_OSS_20B, experts_packed=True))) == (
        GPT_OSS_20B,
        "transformers",
    )


def test_the_newer_transformers_config_is_read_too(tmp_path: Path) -> None:
    config = transformers_config(TINY, experts_packed=False)
    rope = config.pop("rope_scaling") | {"rope_theta": config.pop("rope_theta")}
    assert read_spec(written(tmp_path, config | {"rope_parameters": rope}))[0] == TINY


def test_the_counts_of_the_20b_are_the_published_ones() -> None:
    experts = len(GPT_OSS_20B.layers) * (GPT_OSS_20B.expert_weights + GPT_OSS_20B.expert_biases)
    embedding = GPT_OSS_20B.vocabulary * GPT_OSS_20B.hidden
    assert GPT_OSS_20B.dense_parameters + embedding + 32 * experts == pytest.approx(20.915e9, rel=1e-4)
    assert GPT_OSS_20B.dense_parameters + 4 * experts == pytest.approx(3.608e9, rel=1e-3)
    assert GPT_OSS_20B.kv_bytes(2) == 49152


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "llama"}, "model_type"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": False}, "attention_bias"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config.quant_method"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"num_experts_per_tok": 9}, "experts"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.rope_type"),
    ],
)
def test_a_config_of_another_model_is_refused_by_key(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as raised:
        read_spec(written(tmp_path, transformers_config(TINY, experts_packed=True) | change))
    assert str(tmp_path / "config.json") in str(raised.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00"])
def test_a_damaged_config_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_spec(written(tmp_path, text))


def test_a_checkpoint_one_folder_deeper_is_pointed_at(tmp_path: Path) -> None:
    (tmp_path / "original").mkdir()
    written(tmp_path / "original", openai_config(tiny_spec_with()))
    with pytest.raises(ConfigError, match=r"There is one in .*original"):
        read_spec(tmp_path)
    with pytest.raises(ConfigError, match="does not exist either"):
        read_spec(tmp_path / "nowhere")
