"""The small BERT itself, held against transformers' own, and its windows."""

import math
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import torch as safetensors

from providers.inference.minilm.child import MAX_TOKENS, Embedder, TextTooLong, gelu, split_batches
from tests.support.models.tiny_bert import CONFIG, write_tiny_bert

TEXTS = ["The cat.", "a kitten on the stock market", "", "Ünknown ☃ words", "cats " * 100]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def embedder(folder: Path) -> Embedder:
    return Embedder(folder)


def ids(embedder: Embedder, text: str) -> list[int]:
    tokenizer: Any = embedder._tokenizer  # pyright: ignore[reportPrivateUsage] - the same tokens for the reference
    encoded = tokenizer.encode(text)
    return [*encoded.ids, *(one for more in encoded.overflowing for one in more.ids)]


@pytest.mark.long  # transformers takes seconds to import; llama.cpp makes the same vectors in test_llama_cpp_kinds.py
def test_vectors_are_those_of_transformers_mean_pooled_and_normalised(folder: Path, embedder: Embedder) -> None:
    modeling: Any = import_module("transformers.models.bert.modeling_bert")  # seconds: only where it is needed
    reference: Any = modeling.BertModel(modeling.BertConfig(**CONFIG), add_pooling_layer=False).eval()
    files: Any = safetensors
    loaded: dict[str, Any] = files.load_file(folder / "model.safetensors")
    loaded.pop("embeddings.position_ids")
    reference.load_state_dict(loaded)
    _, vectors = embedder.embed(TEXTS)
    for text, vector in zip(TEXTS, vectors, strict=True):
        with torch.no_grad():
            hidden = reference(torch.tensor([ids(embedder, text)])).last_hidden_state[0].mean(0)
        expected = (hidden / hidden.norm()).numpy()
        assert float(np.abs(expected - vector).max()) < 1e-5


def test_the_gelu_is_exact_to_float32() -> None:
    x = np.linspace(-8, 8, 2001, dtype=np.float32)
    exact = [value * (1 + math.erf(value / math.sqrt(2))) / 2 for value in x.tolist()]
    assert float(np.abs(gelu(x) - np.array(exact)).max()) < 1e-6


def test_no_text_is_cut_off(embedder: Embedder) -> None:
    (tokens, *_), vectors = embedder.embed(["cat " * 300 + "market", "cat " * 301])
    assert tokens == 301 + 2 * 2  # each window has its own two special tokens
    assert float(np.abs(vectors[0] - vectors[1]).max()) > 1e-6


def test_a_long_texts_vector_is_the_mean_of_its_windows_tokens(embedder: Embedder) -> None:
    windows = ["cat " * 254, "cat " * 46]
    _, (whole,) = embedder.embed(["cat " * 300])
    _, parts = embedder.embed(windows)
    # unit vectors have lost the lengths of their sums: what is left is that all three lie in one plane
    algebra: Any = np.linalg
    weights: list[float] = algebra.lstsq(parts.T, whole, rcond=None)[0].tolist()
    assert min(weights) > 0
    assert float(np.abs(parts.T @ np.array(weights) - whole).max()) < 1e-5


def test_too_long_a_text_is_named(embedder: Embedder) -> None:
    with pytest.raises(TextTooLong) as caught:
        embedder.embed(["cat", "cat " * MAX_TOKENS])
    assert (caught.value.position, caught.value.tokens > MAX_TOKENS) == (1, True)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([5], [(0, 1)]),
        ([256, 1], [(0, 1), (1, 2)]),
        ([128] * 5, [(0, 2), (2, 4), (4, 5)]),
        ([2000, 2], [(0, 1), (1, 2)]),
    ],
)
def test_steps_cover_everything_once(lengths: list[int], expected: list[tuple[int, int]]) -> None:
    assert split_batches([[0] * length for length in lengths]) == expected
