"""A model of random weights with SmolLM2's vocabulary and template: its prompts and answers take a tenth of the time.

For tests whose promise does not depend on what a model knows.
"""

import hashlib
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np

from tests.live.vllm_server import cache_dir, sole_builder

SHAPE: Final = {
    "block_count": 1,
    "context_length": 8192,
    "embedding_length": 64,
    "feed_forward_length": 64,
    "attention.head_count": 2,
    "attention.head_count_kv": 1,
    "rope.dimension_count": 32,
}
"""Sizes of the model; all else of the metadata is SmolLM2's."""


def small_gguf(text_model: Path) -> Path:
    """Return the file with the vocabulary of `text_model`, written if it does not exist yet."""
    recipe = hashlib.sha256(Path(__file__).read_bytes() + text_model.name.encode()).hexdigest()[:16]
    path = cache_dir() / f"small-{recipe}.gguf"
    with sole_builder(cache_dir() / "small-gguf.lock"):
        if not path.is_file():
            partial = path.with_suffix(".partial")
            write_small_gguf(text_model, partial)
            partial.rename(path)
    return path


def write_small_gguf(text_model: Path, path: Path) -> None:
    """Write the model with the vocabulary of `text_model`."""
    reader = gguf.GGUFReader(text_model)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    for name, field in reader.fields.items():
        if name.startswith("tokenizer."):
            kind, *parts = field.types
            writer.add_key_value(name, field.contents(), kind, parts[0] if parts else None)
    for name, size in SHAPE.items():
        writer.add_uint32(f"{architecture}.{name}", size)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32(f"{architecture}.rope.freq_base", 100_000.0)
    for name, tensor in _tensors(len(reader.fields["tokenizer.ggml.tokens"].data)):
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(tokens: int) -> list[tuple[str, Any]]:
    random = np.random.default_rng(0)
    width, inner = SHAPE["embedding_length"], SHAPE["feed_forward_length"]
    keys = width // SHAPE["attention.head_count"] * SHAPE["attention.head_count_kv"]
    matrices = {
        "token_embd": (tokens, width),
        "blk.0.attn_q": (width, width),
        "blk.0.attn_k": (keys, width),
        "blk.0.attn_v": (keys, width),
        "blk.0.attn_output": (width, width),
        "blk.0.ffn_gate": (inner, width),
        "blk.0.ffn_up": (inner, width),
        "blk.0.ffn_down": (width, inner),
    }
    norms = ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")
    numbers = {name: random.standard_normal(shape, np.float32) * shape[1] ** -0.5 for name, shape in matrices.items()}
    numbers |= {name: np.ones(width, np.float32) for name in norms}
    return [(f"{name}.weight", each) for name, each in numbers.items()]
