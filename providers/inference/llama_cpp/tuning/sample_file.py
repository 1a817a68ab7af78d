"""A short stand-in for a GGUF model, for measurements: its first layers, whose large tensors are zeros.

The zeros are holes of the file, so it takes no time to write and no room on the disk, and yet each computation costs
what it costs in the model: the shapes and the quantizations are the model's, and values do not change the time. Run by
the child process that measures; nothing of this project is imported here. Source: ggml's docs/gguf.md.
"""

import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

MAX_LAYER_BYTES: Final = 192 * 2**20
"""Bytes of the layers together: more than the caches of a processor hold, so that the layers are read from memory."""
MAX_COPIED_BYTES: Final = 2**20
"""Smaller tensors are copied: norms, biases and rope factors must not be zero."""
_SIZES: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_UINT32, _STRING, _ARRAY = 4, 8, 9
_LAYER: Final = re.compile(rb"blk\.(\d+)\.")
_DEFAULT_ALIGNMENT: Final = 32


@dataclass(frozen=True, slots=True)
class _Tensor:
    head: bytes
    """Name, shape and type as the file has them; the offset follows."""
    layer: int | None
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class _Layout:
    """Positions in a GGUF file: `fields` is the bytes of its key-value pairs, in which `layers_at` is the position of
    the number of layers."""

    version: int
    field_count: int
    fields: bytearray
    layers_at: int
    alignment: int
    tensors: list[_Tensor]
    data_at: int


def write_sample(model: Path, sample: Path) -> int:
    """Write the stand-in of `model` and return its number of layers. Raises ValueError, KeyError or struct.error for a
    file that has no layers of one size."""
    with model.open("rb") as source, sample.open("wb") as target:
        layout = _read_layout(source, model.stat().st_size)
        sizes: dict[int, int] = {}
        for tensor in layout.tensors:
            if tensor.layer is not None:
                sizes[tensor.layer] = sizes.get(tensor.layer, 0) + tensor.size_bytes
        layers = max(1, min(len(sizes), MAX_LAYER_BYTES // max(sizes.values())))
        struct.pack_into("<I", layout.fields, layout.layers_at, layers)
        chosen = [tensor for tensor in layout.tensors if tensor.layer is None or tensor.layer < layers]
        _write(source, target, layout, chosen)
    return layers


def _write(source: IO[bytes], target: IO[bytes], layout: _Layout, tensors: list[_Tensor]) -> None:
    target.write(b"GGUF" + struct.pack("<IQQ", layout.version, len(tensors), layout.field_count) + layout.fields)
    offsets, end = list[int](), 0
    for tensor in tensors:
        offsets.append(end)
        target.write(tensor.head + struct.pack("<Q", end))
        end = _align(end + tensor.size_bytes, layout.alignment)
    data_at = _align(target.tell(), layout.alignment)
    target.truncate(data_at + end)
    for tensor, offset in zip(tensors, offsets, strict=True):
        if tensor.size_bytes <= MAX_COPIED_BYTES:
            source.seek(layout.data_at + tensor.offset)
            target.seek(data_at + offset)
            target.write(source.read(tensor.size_bytes))


def _read_layout(source: IO[bytes], file_bytes: int) -> _Layout:
    if source.read(4) != b"GGUF":
        raise ValueError("not a GGUF file")
    version, tensor_count, field_count = struct.unpack("<IQQ", source.read(20))
    fields_at, layers_at, alignment = source.tell(), 0, _DEFAULT_ALIGNMENT
    for _ in range(field_count):
        name = _read_text(source)
        kind = _unpack(source, "I")
        if name.endswith(b".block_count") and kind == _UINT32:
            layers_at = source.tell() - fields_at
        if name == b"general.alignment":
            alignment = _unpack(source, "I")
        else:
            _skip_value(source, kind)
    fields_end = source.tell()
    infos = [_read_tensor(source) for _ in range(tensor_count)]
    data_at = _align(source.tell(), alignment)
    source.seek(fields_at)
    fields = bytearray(source.read(fields_end - fields_at))
    if not layers_at:
        raise ValueError("no number of layers")
    # A tensor's bytes are those up to the next one: the sizes of quantizations need not be known.
    ends = [*sorted(offset for _, _, offset in infos)[1:], file_bytes - data_at]
    sizes = dict(zip(sorted(offset for _, _, offset in infos), ends, strict=True))
    tensors = [_Tensor(head, layer, offset, sizes[offset] - offset) for head, layer, offset in infos]
    return _Layout(version, field_count, fields, layers_at, alignment, tensors, data_at)


def _read_tensor(source: IO[bytes]) -> tuple[bytes, int | None, int]:
    """Read the description of a tensor; return it as bytes without the offset, the layer, and the offset."""
    name = _read_text(source)
    dimensions = source.read(4)
    shape_and_type = source.read(struct.unpack("<I", dimensions)[0] * 8 + 4)
    match = _LAYER.match(name)
    head = struct.pack("<Q", len(name)) + name + dimensions + shape_and_type
    return head, int(match[1]) if match else None, _unpack(source, "Q")


def _skip_value(source: IO[bytes], kind: int) -> None:
    if kind == _STRING:
        _read_text(source)
    elif kind == _ARRAY:
        item_kind, count = _unpack(source, "I"), _unpack(source, "Q")
        if item_kind == _STRING:
            for _ in range(count):
                _read_text(source)
        else:
            source.seek(_SIZES[item_kind] * count, 1)
    else:
        source.seek(_SIZES[kind], 1)


def _read_text(source: IO[bytes]) -> bytes:
    return source.read(_unpack(source, "Q"))


def _unpack(source: IO[bytes], code: str) -> int:
    return struct.unpack(f"<{code}", source.read(struct.calcsize(f"<{code}")))[0]


def _align(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
