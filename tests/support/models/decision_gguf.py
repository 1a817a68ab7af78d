"""A model for decisions, of llama.cpp's kind `openjev`: a chat model with two more fields in its file."""

from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np

from tests.live.vllm_server import cache_dir, sole_builder

KIND: Final = "openjev"
TEMPLATE: Final = "{{ state }}\n\n{{ instructions }}\nAnswer:"


def decision_gguf(source: Path) -> Path:
    """Return the file, written if it does not exist yet."""
    path = cache_dir() / f"{source.stem}-{KIND}.gguf"
    with sole_builder(cache_dir() / "decision-gguf.lock"):
        if not path.is_file():
            partial = path.with_suffix(".partial")
            _write(source, partial)
            partial.rename(path)
    return path


def _write(source: Path, path: Path) -> None:
    reader: Any = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_string(f"{architecture}.decision.type", KIND)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            writer.add_key_value(
                name, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None
            )
    writer.add_string("tokenizer.chat_template.systemone", TEMPLATE)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
