"""Reads the headers of a folder's .safetensors files, and checks them against the files: which tensor lies where.

Format: https://huggingface.co/docs/safetensors (eight bytes of header length, a JSON header, then the data). No torch.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from apis.errors import ConfigError

INDEX_FILE: Final = "model.safetensors.index.json"
FLOAT_BYTES: Final = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}
_ITEM_BYTES: Final = FLOAT_BYTES | {
    "U8": 1,
    "I8": 1,
    "BOOL": 1,
    "I16": 2,
    "U16": 2,
    "I32": 4,
    "U32": 4,
    "I64": 8,
    "U64": 8,
}
_MAX_HEADER_BYTES: Final = 100_000_000
_DOWNLOAD_AGAIN: Final = "The file is damaged or not wholly downloaded: download it again."


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor, by its file's header. `dtype` in safetensors' words, such as BF16 or U8."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def read_tensor_headers(folder: Path) -> dict[str, StoredTensor]:
    """Return every tensor of the folder's shards by name.

    Raises ConfigError, naming the file and, where it is known, the tensor: for no file at all, a shard of the index
    that is missing, a file that is no safetensors or shorter or longer than its header says, a tensor in two files, a
    tensor that is not in the shard the index names.
    """
    index = _read_index(folder / INDEX_FILE)
    files = sorted({folder / shard for shard in index.values()} if index else folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder}: there are no .safetensors files. {_other_formats(folder)}")
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for stored in _read_header(file):
            if stored.name in tensors:
                raise ConfigError(
                    f"{file}: tensor {stored.name} is also in {tensors[stored.name].file}. Remove one file."
                )
            tensors[stored.name] = stored
    for name, shard in index.items():
        if name not in tensors or tensors[name].file.name != shard:
            raise ConfigError(
                f"{folder / shard}: has no tensor {name}, though {folder / INDEX_FILE} says so. {_DOWNLOAD_AGAIN}"
            )
    return tensors


def _read_index(file: Path) -> dict[str, str]:
    if not file.exists():
        return {}
    try:
        weight_map: Any = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        entries = [(str(name), str(shard)) for name, shard in weight_map.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file}: is no index of shards ({error!r}). {_DOWNLOAD_AGAIN}") from error
    for name, shard in entries:
        if Path(shard).name != shard:
            raise ConfigError(f"{file}: names the shard {shard!r} of {name}, which is not a file beside it.")
    return dict(entries)


def _read_header(file: Path) -> list[StoredTensor]:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            first = stream.read(8)
            length = int.from_bytes(first, "little")
            text = stream.read(length) if length <= min(size, _MAX_HEADER_BYTES) else b""
    except FileNotFoundError:
        raise ConfigError(f"{file}: this shard is missing, though {INDEX_FILE} names it. Download it again.") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error}.") from error
    if text[:1] != b"{":
        lfs = "is a Git LFS pointer, not the file itself: run `git lfs pull`."
        problem = lfs if first == b"version " and size < 1024 else f"is cut short. {_DOWNLOAD_AGAIN}"
        raise ConfigError(f"{file}: {problem}")
    try:
        header: Any = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{file}: its header is no JSON ({error}). {_DOWNLOAD_AGAIN}") from error
    return _parse_header(file, cast("dict[str, Any]", header), size - 8 - length)


def _parse_header(file: Path, header: Mapping[str, Any], data_bytes: int) -> list[StoredTensor]:
    tensors: list[StoredTensor] = []
    end = 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        stored, stop = _parse_entry(file, name, entry)
        if stop > data_bytes:
            raise ConfigError(
                f"{file}: tensor {name} is cut short: {stop - data_bytes} bytes are missing. {_DOWNLOAD_AGAIN}"
            )
        end = max(end, stop)
        tensors.append(stored)
    if end != data_bytes:
        raise ConfigError(f"{file}: is {data_bytes - end} bytes longer than its tensors. {_DOWNLOAD_AGAIN}")
    return tensors


def _parse_entry(file: Path, name: str, entry: Any) -> tuple[StoredTensor, int]:
    try:
        dtype = str(entry["dtype"])
        shape = tuple(int(size) for size in entry["shape"])
        start, stop = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{file}: tensor {name} has a header that makes no sense ({error!r}). {_DOWNLOAD_AGAIN}"
        ) from error
    if dtype in _ITEM_BYTES and (min(shape, default=0) < 0 or math.prod(shape) * _ITEM_BYTES[dtype] != stop - start):
        raise ConfigError(f"{file}: tensor {name}, {dtype} {list(shape)}, has {stop - start} bytes. {_DOWNLOAD_AGAIN}")
    return StoredTensor(name, file, dtype, shape, stop - start), stop


def _other_formats(folder: Path) -> str:
    if any(folder.glob("*.gguf")):
        return "GGUF files are served by the provider llama_cpp."
    if any(folder.glob("*.bin")):
        return "Only safetensors are read: convert it with transformers' save_pretrained."
    return "Give the folder of a downloaded gpt-oss checkpoint."
