"""The header of a GGUF file: which kind of model it is, and the numbers that say how much memory its context takes.

Only the fields before the tokenizer are read, which writers put last. Source: ggml's docs/gguf.md.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

_MAGIC: Final = b"GGUF"
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_FIELDS: Final = 4096
_MAX_TEXT_BYTES: Final = 1024 * 1024
_MAX_ITEMS: Final = 65_536
_KV_ITEM_BYTES: Final = 2
_EMBEDDING_ARCHITECTURES: Final = frozenset(
    (
        *("bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3"),
        *("modern-bert", "eurobert", "gemma-embedding"),
    )
)
_VECTOR_POOLING_TYPES: Final = frozenset((1, 2, 3))
"""Mean, first and last token: by these a model of any architecture makes one vector of a text."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """`context_tokens` is the length that the model was trained for; `kv_bytes_per_token` is an upper bound, since a
    layer with a sliding window counts as if it had none; `vector_dimensions` is the length of its vectors, which an
    `is_embedding` model returns. All three are 0 where the file does not say. `decision_type` is the kind of a model
    for decisions, empty for any other one."""

    architecture: str
    context_tokens: int
    kv_bytes_per_token: int
    vector_dimensions: int = 0
    is_embedding: bool = False
    decision_type: str = ""


def read_header(path: Path) -> GgufHeader | None:
    """Return the header of the file, or None if it is not one that can be understood: the engine says more."""
    try:
        with path.open("rb") as source:
            fields = _read_fields(source)
        return _fields_to_header(fields)
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return None


def _fields_to_header(fields: dict[str, Any]) -> GgufHeader:
    architecture = str(fields["general.architecture"])

    def number(name: str) -> int:
        return int(fields.get(f"{architecture}.{name}", 0))

    layers, heads = number("block_count"), max(number("attention.head_count"), 1)
    key_length = number("attention.key_length") or number("embedding_length") // heads
    value_length = number("attention.value_length") or key_length
    kv_heads = fields.get(f"{architecture}.attention.head_count_kv", heads)
    total_kv_heads = sum(map(int, kv_heads)) if isinstance(kv_heads, list) else int(kv_heads) * layers  # type: ignore[arg-type]  # items of a file
    kv_bytes = total_kv_heads * (key_length + value_length) * _KV_ITEM_BYTES
    dimensions = number("embedding_length_out") or number("embedding_length")
    decision_type = str(fields.get(f"{architecture}.decision.type", ""))
    makes_vectors = architecture in _EMBEDDING_ARCHITECTURES or number("pooling_type") in _VECTOR_POOLING_TYPES
    is_embedding = makes_vectors and not decision_type
    return GgufHeader(architecture, number("context_length"), kv_bytes, dimensions, is_embedding, decision_type)


def _read_fields(source: IO[bytes]) -> dict[str, Any]:
    if source.read(4) != _MAGIC:
        raise ValueError("not a GGUF file")
    version, _, count = struct.unpack("<IQQ", source.read(20))
    if version not in (2, 3):
        raise ValueError(f"version {version}")
    fields: dict[str, Any] = {}
    for _ in range(min(count, _MAX_FIELDS)):
        name = _read_text(source)
        if name.startswith("tokenizer."):
            break
        fields[name] = _read_value(source, _unpack(source, "I"))
    return fields


def _read_value(source: IO[bytes], kind: int) -> Any:
    if kind == _STRING:
        return _read_text(source)
    if kind == _ARRAY:
        item_kind, count = _unpack(source, "I"), _unpack(source, "Q")
        if count > _MAX_ITEMS or item_kind == _ARRAY:
            raise ValueError("an array that is too large")
        return [_read_value(source, item_kind) for _ in range(count)]
    return _unpack(source, _SCALARS[kind])


def _read_text(source: IO[bytes]) -> str:
    length = _unpack(source, "Q")
    if length > _MAX_TEXT_BYTES:
        raise ValueError("a text that is too long")
    return source.read(length).decode("utf-8", "replace")


def _unpack(source: IO[bytes], code: str) -> Any:
    return struct.unpack(f"<{code}", source.read(struct.calcsize(f"<{code}")))[0]
