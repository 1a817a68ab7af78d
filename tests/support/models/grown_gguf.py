"""A GGUF model with more layers than it was trained with: its output is unchanged, and each token costs more.

The added layers are copies whose projections into the residual stream are zero, so they compute everything and add
nothing. A small trained model then has the speed of a large one, and is the perfect draft of its grown self.
"""

import re
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np

from tests.live.vllm_server import cache_dir, sole_builder

OUTPUT_PROJECTIONS: Final = ("attn_output", "ffn_down", "ffn_down_exps")
FEED_FORWARD_KEYS: Final = ("feed_forward_length", "expert_feed_forward_length")
LAYER: Final = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")


def grown_gguf(source: Path, layers: int, feed_forward: int | None = None) -> Path:
    """Return the model of `source` with `layers` layers, and experts `feed_forward` wide; written if it does not exist
    yet. Experts must be bfloat16."""
    path = cache_dir() / f"{source.stem}-{layers}x{feed_forward or 0}.gguf"
    with sole_builder(cache_dir() / "grown-gguf.lock"):
        if not path.is_file():
            partial = path.with_suffix(".partial")
            _write_grown(source, partial, layers, feed_forward)
            partial.rename(path)
    return path


def _write_grown(source: Path, path: Path, layers: int, feed_forward: int | None) -> None:
    reader: Any = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    sizes = {f"{architecture}.block_count": layers}
    if feed_forward is not None:
        sizes |= {f"{architecture}.{key}": feed_forward for key in FEED_FORWARD_KEYS}
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            value = sizes.get(name, field.contents())
            writer.add_key_value(name, value, field.types[0], field.types[-1] if len(field.types) > 1 else None)
    by_layer: dict[int, list[Any]] = {}
    for tensor in reader.tensors:
        if match := LAYER.fullmatch(tensor.name):
            by_layer.setdefault(int(match[1]), []).append(tensor)
        else:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    for layer in range(layers):
        for tensor in by_layer[layer % len(by_layer)]:
            _add_layer_tensor(writer, tensor, layer, len(by_layer), feed_forward)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_layer_tensor(writer: Any, tensor: Any, layer: int, trained_layers: int, feed_forward: int | None) -> None:
    match = LAYER.fullmatch(tensor.name)
    assert match is not None
    data = np.array(tensor.data)
    if feed_forward is not None:
        data = _widen(data, match[2], match[3], feed_forward)
    if layer >= trained_layers and match[2] in OUTPUT_PROJECTIONS:
        # zero in every quantization here: the scales are part of the zeroed bytes
        data = np.zeros_like(data)
    writer.add_tensor(f"blk.{layer}.{match[2]}.{match[3]}", data, raw_dtype=tensor.tensor_type)


def _widen(data: np.ndarray, name: str, kind: str, feed_forward: int) -> np.ndarray:
    """Return an expert tensor with zeros up to the new width; others unchanged. Weights are bytes of bfloat16."""
    if name in ("ffn_gate_exps", "ffn_up_exps"):
        return np.pad(data, [(0, 0), (0, feed_forward - data.shape[1]), *[(0, 0)] * (data.ndim - 2)])
    if name == "ffn_down_exps" and kind == "weight":
        return np.pad(data, [(0, 0), (0, 0), (0, 2 * feed_forward - data.shape[2])])
    return data
