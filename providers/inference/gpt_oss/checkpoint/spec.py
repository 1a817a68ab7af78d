"""ModelSpec: a model's shape, read from a checkpoint's config.json in either of its two dialects. No torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from apis.errors import ConfigError

LayerKind = Literal["sliding_attention", "full_attention"]
ConfigDialect = Literal["openai", "transformers"]

MXFP4_GROUP: Final = 32


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary positions stretched by YaRN: `factor` times `original_context_tokens`. A factor of 1 leaves them plain."""

    theta: float
    factor: float
    original_context_tokens: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    concentration: float | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Every size and constant that the weights do not contain. `layers` has one kind of attention for each layer."""

    layers: tuple[LayerKind, ...]
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    experts_per_token: int
    vocabulary: int
    window: int
    norm_eps: float
    swiglu_limit: float
    swiglu_alpha: float
    context_tokens: int
    rotary: Rotary
    tied_embeddings: bool = False

    @property
    def qkv(self) -> int:
        """Rows of the stacked projection: queries, then keys, then values."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def expert_weights(self) -> int:
        """Weights of one expert's two matrices."""
        return 3 * self.hidden * self.intermediate

    @property
    def expert_biases(self) -> int:
        return 2 * self.intermediate + self.hidden

    @property
    def dense_parameters(self) -> int:
        """Parameters that every token reads: attention, norms and routers of all layers, the final norm and the
        unembedding."""
        attention = self.qkv * (self.hidden + 1) + self.hidden * (self.heads * self.head_dim + 1) + self.heads
        router = self.experts * (self.hidden + 1)
        return len(self.layers) * (attention + router + 2 * self.hidden) + self.hidden + self.vocabulary * self.hidden

    def kv_bytes(self, item_bytes: int) -> int:
        """Return the bytes of one token's keys and values in all layers."""
        return len(self.layers) * 2 * self.kv_heads * self.head_dim * item_bytes


class _OpenaiConfig(BaseModel):
    """The keys of `original/config.json`."""

    model_config = ConfigDict(extra="ignore")

    num_hidden_layers: int = Field(ge=1)
    num_experts: int = Field(ge=1)
    experts_per_token: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    swiglu_limit: float = 7.0
    head_dim: int = Field(ge=2)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    sliding_window: int = Field(ge=1)
    initial_context_length: int = Field(ge=1)
    rope_theta: float = Field(gt=1)
    rope_scaling_factor: float = Field(ge=1)
    rope_ntk_alpha: float = Field(gt=0)
    rope_ntk_beta: float = Field(gt=0)

    def spec(self) -> ModelSpec:
        return ModelSpec(
            layers=_alternate_layer_kinds(self.num_hidden_layers),
            hidden=self.hidden_size,
            intermediate=self.intermediate_size,
            heads=self.num_attention_heads,
            kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            experts=self.num_experts,
            experts_per_token=self.experts_per_token,
            vocabulary=self.vocab_size,
            window=self.sliding_window,
            norm_eps=1e-5,
            swiglu_limit=self.swiglu_limit,
            swiglu_alpha=1.702,
            context_tokens=int(self.initial_context_length * self.rope_scaling_factor),
            rotary=Rotary(
                theta=self.rope_theta,
                factor=self.rope_scaling_factor,
                original_context_tokens=self.initial_context_length,
                beta_fast=self.rope_ntk_beta,
                beta_slow=self.rope_ntk_alpha,
                truncate=False,
            ),
        )


class _RopeParameters(BaseModel):
    model_config = ConfigDict(extra="ignore")

    rope_type: Literal["yarn", "default"] = "yarn"
    rope_theta: float | None = None
    factor: float = 1.0
    original_max_position_embeddings: int = Field(default=4096, ge=1)
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool = True
    attention_factor: float | None = None


class _Quantization(BaseModel):
    quant_method: Literal["mxfp4"]


class _TransformersConfig(BaseModel):
    """transformers' GptOssConfig: version 4 has `rope_scaling` and `rope_theta`, version 5 `rope_parameters`."""

    model_config = ConfigDict(extra="ignore")

    model_type: Literal["gpt_oss"]
    num_hidden_layers: int = Field(ge=1)
    num_local_experts: int = Field(ge=1)
    num_experts_per_tok: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    head_dim: int = Field(64, ge=2)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    sliding_window: int = Field(128, ge=1)
    layer_types: tuple[LayerKind, ...] | None = None
    max_position_embeddings: int = Field(131072, ge=1)
    rms_norm_eps: float = 1e-5
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702
    rope_theta: float | None = None
    rope_scaling: _RopeParameters | None = None
    rope_parameters: _RopeParameters | None = None
    tie_word_embeddings: bool = False
    attention_bias: Literal[True] = True
    hidden_act: Literal["silu"] = "silu"
    quantization_config: _Quantization | None = None

    def rotary(self) -> Rotary:
        rope = self.rope_parameters or self.rope_scaling
        theta = (rope.rope_theta if rope else None) or self.rope_theta or 150000.0
        if rope is None:
            rope = _RopeParameters(factor=32.0, original_max_position_embeddings=4096, truncate=False)
        plain = rope.rope_type == "default"
        return Rotary(
            theta=theta,
            factor=1.0 if plain else rope.factor,
            original_context_tokens=rope.original_max_position_embeddings,
            beta_fast=rope.beta_fast or 32.0,
            beta_slow=rope.beta_slow or 1.0,
            truncate=rope.truncate,
            concentration=1.0 if plain else rope.attention_factor,
        )

    def spec(self) -> ModelSpec:
        return ModelSpec(
            layers=self.layer_types or _alternate_layer_kinds(self.num_hidden_layers),
            hidden=self.hidden_size,
            intermediate=self.intermediate_size,
            heads=self.num_attention_heads,
            kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            experts=self.num_local_experts,
            experts_per_token=self.num_experts_per_tok,
            vocabulary=self.vocab_size,
            window=self.sliding_window,
            norm_eps=self.rms_norm_eps,
            swiglu_limit=self.swiglu_limit,
            swiglu_alpha=self.swiglu_alpha,
            context_tokens=self.max_position_embeddings,
            rotary=self.rotary(),
            tied_embeddings=self.tie_word_embeddings,
        )


def read_spec(folder: Path) -> tuple[ModelSpec, ConfigDialect]:
    """Return the shape in `folder/config.json`, and the dialect of that file.

    Raises ConfigError, naming the file and the key, where it is missing, damaged or of a model that is not gpt-oss.
    """
    file = folder / "config.json"
    try:
        document: Any = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{file}: there is no such file. {_missing_config_hint(folder)}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as JSON: {error}. Download it again.") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{file}: must hold a JSON object.")
    values = cast("dict[str, Any]", document)
    is_openai = "num_experts" in values and "rope_scaling_factor" in values and "model_type" not in values
    try:
        config = _OpenaiConfig.model_validate(values) if is_openai else _TransformersConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{file}: {key}: {first['msg']}. This engine serves gpt-oss models only.") from error
    return _validate_spec(config.spec(), file, config.num_hidden_layers), "openai" if is_openai else "transformers"


def _validate_spec(spec: ModelSpec, file: Path, layers: int) -> ModelSpec:
    violations = {
        "layer_types must have num_hidden_layers entries": len(spec.layers) != layers,
        "num_attention_heads must be a multiple of num_key_value_heads": spec.heads % spec.kv_heads != 0,
        "head_dim must be even": spec.head_dim % 2 != 0,
        "experts per token must not be more than there are experts": spec.experts_per_token > spec.experts,
    }
    for law, broken in violations.items():
        if broken:
            raise ConfigError(f"{file}: {law}.")
    return spec


def _alternate_layer_kinds(count: int) -> tuple[LayerKind, ...]:
    return tuple("sliding_attention" if index % 2 == 0 else "full_attention" for index in range(count))


def _missing_config_hint(folder: Path) -> str:
    if not folder.is_dir():
        return "The folder of the checkpoint does not exist either: give the path of a downloaded gpt-oss checkpoint."
    nested = sorted(config.parent for config in folder.glob("*/config.json"))
    if nested:
        return f"There is one in {nested[0]}: give that path instead."
    return "Give the folder that holds config.json and the .safetensors files."
