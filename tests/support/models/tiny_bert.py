"""A BERT small enough to be made in a test: random weights, a vocabulary of letters and a few words."""

import string
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import numpy as safetensors
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "cat", "kitten", "stock", "market", "the", "a", "on", "##s", ".")
VOCABULARY = (
    *WORDS,
    *string.ascii_lowercase[1:],
    *(f"##{letter}" for letter in string.ascii_lowercase if letter != "s"),
)
LAYERS, WIDTH, INNER, PLACES = 2, 64, 128, 512
LAYER = {
    "attention.self.query": (WIDTH, WIDTH),
    "attention.self.key": (WIDTH, WIDTH),
    "attention.self.value": (WIDTH, WIDTH),
    "attention.output.dense": (WIDTH, WIDTH),
    "attention.output.LayerNorm": (WIDTH,),
    "intermediate.dense": (INNER, WIDTH),
    "output.dense": (WIDTH, INNER),
    "output.LayerNorm": (WIDTH,),
}
CONFIG: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": WIDTH // 32,
    "intermediate_size": INNER,
    "max_position_embeddings": PLACES,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
}
"""The sizes of the model as a config of transformers."""


def write_tiny_bert(folder: Path) -> Path:
    """Write model.safetensors and tokenizer.json into `folder`, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(7)
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (len(VOCABULARY), WIDTH),
        "embeddings.position_embeddings.weight": (PLACES, WIDTH),
        "embeddings.token_type_embeddings.weight": (2, WIDTH),
        "embeddings.LayerNorm.weight": (WIDTH,),
        "embeddings.LayerNorm.bias": (WIDTH,),
    }
    for number in range(LAYERS):
        for name, shape in LAYER.items():
            shapes[f"encoder.layer.{number}.{name}.weight"] = shape
            shapes[f"encoder.layer.{number}.{name}.bias"] = shape[:1]
    tensors: dict[str, Any] = {name: random.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    tensors["embeddings.position_ids"] = np.arange(PLACES).reshape(1, -1)  # old checkpoints have them; no weights
    files: Any = safetensors
    files.save_file(tensors, folder / "model.safetensors")
    _tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def _tokenizer() -> Any:
    # the package's own types are stubs without fields
    kinds: Any = models
    splitters: Any = pre_tokenizers
    tokenizer: Any = Tokenizer(
        kinds.WordPiece(vocab={word: at for at, word in enumerate(VOCABULARY)}, unk_token="[UNK]")
    )
    cleaners: Any = normalizers
    tokenizer.normalizer = cleaners.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = splitters.BertPreTokenizer()
    endings: Any = processors
    tokenizer.post_processor = endings.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    # as the packaged model has it, and as it is not to be used
    tokenizer.enable_truncation(max_length=128)
    tokenizer.enable_padding(length=128)
    return tokenizer
