"""The tiny BERT as a GGUF file, as llama.cpp loads it."""

import json
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from safetensors import numpy as safetensors

from tests.support.models.tiny_bert import CONFIG

LAYER_NAMES: Final = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
NAMES: Final = {
    "embeddings.word_embeddings.weight": "token_embd.weight",
    "embeddings.position_embeddings.weight": "position_embd.weight",
    "embeddings.token_type_embeddings.weight": "token_types.weight",
    "embeddings.LayerNorm.weight": "token_embd_norm.weight",
    "embeddings.LayerNorm.bias": "token_embd_norm.bias",
}


def write_bert_gguf(folder: Path, path: Path) -> Path:
    """Write the model of `folder` (see tiny_bert.py) and return the file's path."""
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_context_length(CONFIG["max_position_embeddings"])
    writer.add_embedding_length(CONFIG["hidden_size"])
    writer.add_feed_forward_length(CONFIG["intermediate_size"])
    writer.add_block_count(CONFIG["num_hidden_layers"])
    writer.add_head_count(CONFIG["num_attention_heads"])
    writer.add_layer_norm_eps(CONFIG["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    _write_vocabulary(writer, json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    files: Any = safetensors
    tensors: dict[str, Any] = files.load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if (own := _convert_name(name)) is not None:
            writer.add_tensor(own, np.ascontiguousarray(tensor, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_vocabulary(writer: gguf.GGUFWriter, vocabulary: dict[str, int]) -> None:
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    # llama.cpp marks the beginnings of words, where BERT marks the continuations
    special = {"[PAD]", "[UNK]", "[CLS]", "[SEP]"}
    marked = [each if each in special else each[2:] if each.startswith("##") else f"\u2581{each}" for each in tokens]
    kinds = [gguf.TokenType.CONTROL if each in special else gguf.TokenType.NORMAL for each in tokens]
    writer.add_tokenizer_model("bert")
    writer.add_token_type_count(2)
    writer.add_token_list(marked)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(vocabulary["[CLS]"])
    writer.add_sep_token_id(vocabulary["[SEP]"])
    writer.add_unk_token_id(vocabulary["[UNK]"])
    writer.add_pad_token_id(vocabulary["[PAD]"])


def _convert_name(name: str) -> str | None:
    if not name.startswith("encoder.layer."):
        return NAMES.get(name)
    _, _, number, rest = name.split(".", 3)
    part, _, kind = rest.rpartition(".")
    return f"blk.{number}.{LAYER_NAMES[part]}.{kind}"
