"""The smallest projector for images: one that shows SmolLM2 an image as the embeddings of a word for its colour.

A LLaVA projector of one patch embedding, which takes the mean of each colour of a patch, and two matrices: the first
separates the colours, the second has the text model's own embeddings of " red", " green" and " blue". So a model that
knows nothing about images says what it sees, and the pixels' whole way through llama.cpp can be tested.
"""

import hashlib
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np

from tests.live.vllm_server import cache_dir, sole_builder

WORDS: Final = (" red", " green", " blue")
WIDTH: Final = 4
PATCH: Final = 14
IMAGE: Final = 28
STEEPNESS: Final = 20.0


def tiny_projector(text_model: Path) -> Path:
    """Return the projector for the text model, written if it does not exist yet."""
    recipe = hashlib.sha256(Path(__file__).read_bytes() + text_model.name.encode()).hexdigest()[:16]
    path = cache_dir() / f"projector-{recipe}.gguf"
    with sole_builder(cache_dir() / "tiny-projector.lock"):
        if not path.is_file():
            partial = path.with_suffix(".partial")
            write_projector(text_model, partial)
            partial.rename(path)
    return path


def write_projector(text_model: Path, path: Path) -> None:
    """Write the projector for the text model."""
    embeddings = _word_embeddings(text_model)
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "mlp")
    writer.add_bool("clip.use_gelu", True)
    sizes = {"image_size": IMAGE, "patch_size": PATCH, "embedding_length": WIDTH, "feed_forward_length": WIDTH}
    sizes |= {"block_count": 1, "projection_dim": embeddings.shape[1], "attention.head_count": 1}
    for name, size in sizes.items():
        writer.add_uint32(f"clip.vision.{name}", size)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    writer.add_array("clip.vision.image_mean", [0.0, 0.0, 0.0])
    writer.add_array("clip.vision.image_std", [1.0, 1.0, 1.0])
    for name, tensor in _tensors(embeddings).items():
        writer.add_tensor(name, np.ascontiguousarray(tensor, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _word_embeddings(text_model: Path) -> Any:
    reader = gguf.GGUFReader(text_model)
    field: Any = reader.fields["tokenizer.ggml.tokens"]
    tokens = [bytes(field.parts[at]).decode() for at in field.data]
    (table,) = (tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    rows = [tokens.index(word.replace(" ", "\u0120")) for word in WORDS]
    return gguf.quants.dequantize(table.data[rows], table.tensor_type)


def _tensors(embeddings: Any) -> dict[str, Any]:
    colours = len(WORDS)
    patch = np.zeros((WIDTH, colours, PATCH, PATCH))
    separate = np.zeros((WIDTH, WIDTH))
    for colour in range(colours):
        patch[colour, colour] = 1 / PATCH**2
        separate[colour, colour] = STEEPNESS
    speak = np.zeros((embeddings.shape[1], WIDTH))
    speak[:, :colours] = embeddings.T / (STEEPNESS / 2)
    # the one layer of the encoder is loaded and not used: LLaVA's features are those before the last layer
    layer = {f"v.blk.0.{name}.weight": np.zeros((WIDTH, WIDTH)) for name in ("attn_q", "attn_k", "attn_v", "attn_out")}
    layer |= {f"v.blk.0.{name}.weight": np.zeros((WIDTH, WIDTH)) for name in ("ffn_up", "ffn_down")}
    layer |= {f"v.blk.0.{name}.{kind}": np.ones(WIDTH) for name in ("ln1", "ln2") for kind in ("weight", "bias")}
    return {
        **layer,
        "v.patch_embd.weight": patch,
        "v.position_embd.weight": np.zeros(((IMAGE // PATCH) ** 2, WIDTH)),
        "mm.0.weight": separate,
        "mm.0.bias": np.full(WIDTH, -STEEPNESS / 2),
        "mm.2.weight": speak,
        "mm.2.bias": np.zeros(embeddings.shape[1]),
    }
