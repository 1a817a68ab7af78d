"""Child process of the MiniLM provider: a small BERT (Devlin et al. 2018, as sentence-transformers uses it).

Run as a script with the model's folder as its argument. It writes one line of JSON, `{"dimensions": N}` or `{"error":
"..."}`, then responds to lines of JSON on stdin until stdin ends:

    {"id": N, "texts": [...]}   begins a batch and makes its first step, or returns `{"too_long": [position, tokens]}`
    {"id": N}                   makes its next step

The answer to a step is `{}`, and to the last one `{"tokens": [...]}`, followed by one vector of little-endian float32
per text.
So steps of several batches can take turns. `drop` holds the ids of batches that no caller waits for. Nothing of this
project is imported here.

A text longer than the model's training length is read in windows; its vector is the normalised sum of the vectors of
all its tokens, as for a text of one window.

numpy, not llama.cpp, although the stack embeds that: with a GGUF of the same weights the vectors of equal tokens agree
(cosine 0.999997), but llama.cpp's tokenizer cuts Korean, Devanagari and words of over 100 letters differently (cosine
0.61, 0.97, 0.19 for one text each), and it took about 1.5 times as long for 9,500 tokens on one core.
"""

import json
import os
import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

FloatTensor = npt.NDArray[np.float32]

WINDOW_TOKENS = 256
"""Training length of all-MiniLM-L6-v2, including its two special tokens."""
MAX_TOKENS = 8192
BATCH_TOKENS = 256
"""Tokens per pass through the layers: more is hardly faster, and takes more memory."""
STEP_TOKENS = 256
"""Tokens times layers of one step, for which requests of other tenants wait: some hundredths of a second."""
HEAD_WIDTH = 32
EPSILON = np.float32(1e-12)


class TextTooLong(Exception):
    """The text at `position` has more than MAX_TOKENS."""

    def __init__(self, position: int, tokens: int) -> None:
        super().__init__(position, tokens)
        self.position, self.tokens = position, tokens


def read_safetensors(path: Path) -> dict[str, FloatTensor]:
    """Return the float32 tensors of a file of https://github.com/huggingface/safetensors: a JSON header, then their
    bytes."""
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    start = 8 + int(raw[:8].view("<u8")[0])
    header: dict[str, Any] = json.loads(raw[8:start].tobytes())
    tensors: dict[str, FloatTensor] = {}
    for name, about in header.items():
        if name != "__metadata__" and about["dtype"] == "F32":
            first, last = about["data_offsets"]
            # Copied, because the file does not align them, and arithmetic on unaligned data is slower.
            tensors[name] = raw[start + first : start + last].copy().view("<f4").reshape(about["shape"])
    return tensors


class Bert:
    """The model's weights and its forward pass."""

    def __init__(self, tensors: dict[str, FloatTensor]) -> None:
        self._tensors = tensors
        self._layers = 1 + max(int(name.split(".")[2]) for name in tensors if name.startswith("encoder.layer."))
        self.dimensions = int(tensors["embeddings.LayerNorm.weight"].shape[0])

    def token_vectors(self, sequences: Sequence[Sequence[int]]) -> Generator[None, None, list[FloatTensor]]:
        """Return the last layer's vectors of each sequence's tokens, and yield between two steps.

        The sequences are concatenated, not padded to one length: only attention needs their boundaries.
        """
        lengths = [len(sequence) for sequence in sequences]
        cuts = np.cumsum(lengths)[:-1]
        tensors, ids = self._tensors, np.concatenate([np.asarray(sequence) for sequence in sequences])
        places = np.concatenate([np.arange(length) for length in lengths])
        x = tensors["embeddings.word_embeddings.weight"][ids]
        x += tensors["embeddings.position_embeddings.weight"][places]
        x += tensors["embeddings.token_type_embeddings.weight"][0]
        x = self._normalise(x, "embeddings.LayerNorm")
        for number in range(self._layers):
            layer = f"encoder.layer.{number}"
            x += self._attend(x, cuts, f"{layer}.attention")
            x = self._normalise(x, f"{layer}.attention.output.LayerNorm")
            x += self._linear(gelu(self._linear(x, f"{layer}.intermediate.dense")), f"{layer}.output.dense")
            x = self._normalise(x, f"{layer}.output.LayerNorm")
            if (number + 1) % max(1, STEP_TOKENS // len(ids)) == 0 and number + 1 < self._layers:
                yield
        return np.split(x, cuts)

    def _attend(self, x: FloatTensor, cuts: npt.NDArray[np.int64], name: str) -> FloatTensor:
        query, key, value = (
            [_split_heads(part) for part in np.split(self._linear(x, f"{name}.self.{kind}"), cuts)]
            for kind in ("query", "key", "value")
        )
        mixed = [
            _softmax(q @ k.transpose(0, 2, 1) * np.float32(HEAD_WIDTH**-0.5)) @ v
            for q, k, v in zip(query, key, value, strict=True)
        ]
        joined = np.concatenate([heads.transpose(1, 0, 2).reshape(-1, x.shape[1]) for heads in mixed])
        return self._linear(joined, f"{name}.output.dense")

    def _linear(self, x: FloatTensor, name: str) -> FloatTensor:
        y: FloatTensor = x @ self._tensors[f"{name}.weight"].T
        y += self._tensors[f"{name}.bias"]
        return y

    def _normalise(self, x: FloatTensor, name: str) -> FloatTensor:
        x = x - x.mean(axis=-1, keepdims=True)
        x /= np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + EPSILON)
        return x * self._tensors[f"{name}.weight"] + self._tensors[f"{name}.bias"]


def _split_heads(x: FloatTensor) -> FloatTensor:
    return x.reshape(x.shape[0], -1, HEAD_WIDTH).transpose(1, 0, 2)


def _softmax(x: FloatTensor) -> FloatTensor:
    x -= x.max(axis=-1, keepdims=True)
    np.exp(x, out=x)
    x /= x.sum(axis=-1, keepdims=True)
    return x


def gelu(x: FloatTensor) -> FloatTensor:
    """Return x * P(N(0, 1) < x) by 7.1.26 of Abramowitz and Stegun (error below 1.5e-7): numpy has no error
    function."""
    z = np.abs(x)
    z *= np.float32(0.5**0.5)
    t = 1 / (1 + np.float32(0.3275911) * z)
    tail = np.full_like(t, 1.061405429)
    for factor in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        tail *= t
        tail += np.float32(factor)
    tail *= t
    tail *= np.exp(-np.square(z, out=z))
    return np.float32(0.5) * x * (1 + np.copysign(1 - tail, x))


class Embedder:
    """Converts texts to unit vectors."""

    def __init__(self, folder: Path) -> None:
        self._bert = Bert(read_safetensors(folder / "model.safetensors"))
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(WINDOW_TOKENS)  # pyright: ignore[reportUnknownMemberType] - untyped kwargs
        self.dimensions = self._bert.dimensions

    def begin(self, texts: Sequence[str]) -> "Batch":
        """Return the texts as tokens in windows. Raises TextTooLong."""
        windows: list[list[int]] = []
        owners: list[int] = []
        tokens: list[int] = []
        for position, first in enumerate(self._tokenizer.encode_batch(list(texts))):
            own = [first.ids, *(part.ids for part in first.overflowing)]
            tokens.append(sum(map(len, own)))
            if tokens[-1] > MAX_TOKENS:
                raise TextTooLong(position, tokens[-1])
            windows += own
            owners += [position] * len(own)
        sums = np.zeros((len(texts), self.dimensions), dtype=np.float32)
        return Batch(tokens, sums, self._make_passes(windows, owners, sums))

    def _make_passes(self, windows: list[list[int]], owners: list[int], sums: FloatTensor) -> Generator[None]:
        for position, (start, end) in enumerate(split_batches(windows)):
            if position:
                yield
            vectors = yield from self._bert.token_vectors(windows[start:end])
            for owner, own in zip(owners[start:end], vectors, strict=True):
                sums[owner] += own.sum(axis=0)

    def embed(self, texts: Sequence[str]) -> tuple[list[int], FloatTensor]:
        """Return the number of tokens of each text, and the vectors as rows. Raises TextTooLong."""
        batch = self.begin(texts)
        for _ in batch.steps:
            pass
        return batch.tokens, batch.vectors()


@dataclass
class Batch:
    """Texts on their way to vectors: the number of tokens and the sum of the vectors of each, and the steps that are
    left, which yield between each other."""

    tokens: list[int]
    sums: FloatTensor
    steps: Generator[None]

    def vectors(self) -> FloatTensor:
        """Return the vectors as rows, after the last step."""
        return self.sums / np.linalg.norm(self.sums, axis=1, keepdims=True)


def split_batches(windows: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return the (start, end) of runs of windows with at most BATCH_TOKENS tokens."""
    cuts: list[tuple[int, int]] = []
    start = size = 0
    for position, window in enumerate(windows):
        if size and size + len(window) > BATCH_TOKENS:
            cuts.append((start, position))
            start, size = position, 0
        size += len(window)
    return [*cuts, (start, len(windows))]


def main() -> None:
    # Native code may print; only our responses may reach the parent's pipe.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def send(message: dict[str, Any], vectors: bytes = b"") -> None:
        out.write(json.dumps(message).encode() + b"\n" + vectors)
        out.flush()

    # A hook, not an except clause: every cause that ends this process is reported to the parent.
    sys.excepthook = lambda kind, error, _: send({"error": f"{kind.__name__}: {error}"})
    embedder = Embedder(Path(sys.argv[1]))
    embedder.embed(["The first texts would wait for what is set up at its first use."])
    send({"dimensions": embedder.dimensions})
    batches: dict[int, Batch] = {}
    for line in sys.stdin.buffer:
        message = json.loads(line)
        number: int = message["id"]
        for dropped in message.get("drop", ()):
            batches.pop(dropped, None)
        if "texts" in message:
            try:
                batches[number] = embedder.begin(message["texts"])
            except TextTooLong as exc:
                send({"too_long": [exc.position, exc.tokens]})
                continue
        batch = batches[number]
        try:
            next(batch.steps)
        except StopIteration:
            del batches[number]
            send({"tokens": batch.tokens}, batch.vectors().astype("<f4").tobytes())
        else:
            send({})


if __name__ == "__main__":
    main()
