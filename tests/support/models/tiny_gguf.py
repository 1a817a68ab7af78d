"""The tiny gpt-oss as one GGUF file, as llama.cpp loads it: names, layouts and metadata of its own converter.

`tiny_gpt_oss_gguf()` is written once, from the folder of tiny_gpt_oss.py, and stored next to that folder. Attention,
norms and routers are float32, the embeddings bfloat16, the experts `EXPERTS`: bfloat16, since MXFP4 would be a
quantization that the tiny model was not trained for (real ones come in it; llama.cpp reads both).
"""

import hashlib
import json
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType] - typed in part

from tests.live.vllm_server import cache_dir, sole_builder
from tests.support.models.tiny_gpt_oss import tiny_gpt_oss_folder

EXPERTS: Final = torch.bfloat16
LAYER_NAMES: Final = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.router": "ffn_gate_inp",
}
"""Names of a layer's tensors: Hugging Face's, or their beginnings, and GGUF's."""


def tiny_gpt_oss_gguf() -> Path:
    """Return the file, written if it does not exist yet. Raises RuntimeError."""
    folder = tiny_gpt_oss_folder()
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    path = folder / f"model-{recipe}.gguf"
    with sole_builder(cache_dir() / "tiny-gguf.lock"):
        if not path.is_file():
            partial = path.with_suffix(".partial")
            write_gpt_oss(folder, partial)
            partial.rename(path)
    return path


def write_gpt_oss(folder: Path, path: Path) -> None:
    """Write the checkpoint in `folder` as a GGUF file of architecture gpt-oss."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "gpt-oss")
    _write_shape(writer, config)
    _write_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()), config["vocab_size"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        for own_name, part in _convert(name, tensor):
            _add_tensor(writer, own_name, part)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rope = config["rope_parameters"]
    writer.add_name("tiny gpt-oss")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _write_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], size: int) -> None:
    """Write the vocabulary: GPT-2's letters for bytes, merges, and the control tokens by name."""
    tokens = [""] * size
    kinds = [gguf.TokenType.NORMAL] * size
    for text, token in tokenizer["model"]["vocab"].items():
        tokens[token] = text
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-4o")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(199998)
    writer.add_eos_token_id(200002)
    writer.add_pad_token_id(199999)
    writer.add_add_bos_token(False)


def _convert(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return GGUF's name and layout of a tensor; gate and up, which alternate in Hugging Face's, are two."""
    fixed = {"model.embed_tokens.weight": "token_embd.weight", "lm_head.weight": "output.weight"}
    if name in fixed:
        return [(fixed[name], tensor)]
    if name == "model.norm.weight":
        return [("output_norm.weight", tensor.float())]
    _, _, layer, rest = name.split(".", 3)
    if rest.startswith("mlp.experts."):
        return [
            (f"blk.{layer}.{own}", part) for own, part in _convert_experts(rest.removeprefix("mlp.experts."), tensor)
        ]
    for theirs, own in LAYER_NAMES.items():
        if rest.startswith(theirs):
            return [(f"blk.{layer}.{own}{rest.removeprefix(theirs)}", tensor.float())]
    raise ValueError(f"no GGUF name for {name}")


def _convert_experts(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    kind = "bias" if name.endswith("_bias") else "weight"
    # biases are [expert, output]; weights [expert, input, output], which GGUF has the other way round
    tensor = tensor.float() if kind == "bias" else tensor.transpose(1, 2).to(EXPERTS)
    if name.startswith("down_proj"):
        return [(f"ffn_down_exps.{kind}", tensor)]
    return [(f"ffn_gate_exps.{kind}", tensor[:, ::2]), (f"ffn_up_exps.{kind}", tensor[:, 1::2])]


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor) -> None:
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        data: Any = tensor.view(torch.uint16).numpy()
        writer.add_tensor(name, data.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    else:
        writer.add_tensor(name, tensor.float().numpy())
