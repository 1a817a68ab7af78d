"""A vector index as a dict: what a real one must answer, computed plainly."""

import math
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from apis.vector_index import AttributeValue, Chunk, ScoredChunk, Search, VectorIndex
from apis.wire.tools import FileFilter
from providers.vector_index.filters import matches

FILTER: TypeAdapter[FileFilter] = TypeAdapter(FileFilter)
FILTERS: list[FileFilter | None] = [
    None,
    None,
    FILTER.validate_python({"type": "gte", "key": "n", "value": 2}),
    FILTER.validate_python({"type": "ne", "key": "n", "value": 1}),
]
VECTORS = [(0, 0, 0), (1, 0, 0), (2, 0, 0), (0, -1, 0), (1, 2, 2), (2, 4, 4), (3, 0, 4), (-1, 1, 0), (1, 0), (1, 1)]
WORDS = ["ship", "ships", "whale", "whales", "harbour", "pear", "pears", "apple", "red", "Red"]


@dataclass(slots=True)
class Model:
    """Stores by their names, and in each the chunks by file and number."""

    stores: dict[str, dict[tuple[str, int], Chunk]] = field(default_factory=dict[str, dict[tuple[str, int], Chunk]])

    def chunks(self, store: str) -> dict[tuple[str, int], Chunk]:
        return self.stores.setdefault(store, {})

    def set_attributes(self, store: str, file: str, attributes: Mapping[str, AttributeValue]) -> None:
        for place, chunk in self.chunks(store).items():
            if chunk.file == file:
                self.chunks(store)[place] = Chunk(file, chunk.number, chunk.text, attributes, chunk.vector)

    def delete(self, store: str, file: str | None) -> None:
        self.stores[store] = {} if file is None else {p: c for p, c in self.chunks(store).items() if p[0] != file}

    def search_vector(self, search: Search, vector: Sequence[float]) -> list[ScoredChunk]:
        same = [chunk for chunk in self.chunks(search.store).values() if len(chunk.vector) == len(vector)]
        return _best(search, [(chunk, _cosine(chunk.vector, vector)) for chunk in same])

    def search_keywords(self, search: Search, text: str) -> list[ScoredChunk]:
        """BM25, with the endings that the words here have."""
        chunks = [(chunk, Counter(_stems(chunk.text))) for chunk in self.chunks(search.store).values()]
        mean = sum(each.total() for _, each in chunks) / len(chunks) if chunks else 0
        scores: list[tuple[Chunk, float]] = []
        for chunk, stems in chunks:
            score = 0.0
            for stem in dict.fromkeys(_stems(text)):
                holders = sum(stem in other for _, other in chunks)
                rarity = math.log(1 + (len(chunks) - holders + 0.5) / (holders + 0.5))
                length = 0.25 + 0.75 * stems.total() / (mean or 1)
                score += rarity * stems[stem] * 2.2 / (stems[stem] + 1.2 * length)
            scores.append((chunk, score))
        return _best(search, [(chunk, score) for chunk, score in scores if score])


def _best(search: Search, scores: list[tuple[Chunk, float]]) -> list[ScoredChunk]:
    left = [(chunk, score) for chunk, score in scores if matches(search.filters, chunk.attributes)]
    left.sort(key=lambda each: (-round(each[1], 6), each[0].file, each[0].number))
    return [ScoredChunk(c.file, c.number, c.text, c.attributes, score) for c, score in left[: search.limit]]


def _stems(text: str) -> list[str]:
    return [word.lower().removesuffix("s") for word in re.findall(r"\w+", text)]


def _cosine(left: Sequence[float], right: Sequence[float]) -> float:
    norm = math.hypot(*left) * math.hypot(*right)
    return sum(a * b for a, b in zip(left, right, strict=True)) / norm if norm else 0.0


async def step(dice: random.Random, model: Model, index: VectorIndex) -> None:
    """Do one thing to the model and to the index; what is found must be the same."""
    store, file = dice.choice(["t/one", "t/two"]), f"file {dice.randrange(6)}/"
    attributes: dict[str, AttributeValue] = {"n": dice.randrange(4)}
    match dice.choices(["upsert", "set", "delete file", "delete store", "vector", "words"], [6, 2, 2, 0.2, 6, 6])[0]:
        case "upsert":
            chunks = [_chunk(dice, attributes) for _ in range(dice.randrange(1, 8))]
            await index.upsert(store, chunks)
            model.chunks(store).update({(chunk.file, chunk.number): chunk for chunk in chunks})
        case "set":
            await index.set_attributes(store, file, attributes)
            model.set_attributes(store, file, attributes)
        case "delete file":
            await index.delete(store, file)
            model.delete(store, file)
        case "delete store":
            await index.delete(store)
            model.delete(store, None)
        case "vector":
            search, vector = _search(dice, store), dice.choice(VECTORS)
            assert _shown(await index.search_vector(search, vector)) == _shown(model.search_vector(search, vector))
        case _:
            search, text = _search(dice, store), " ".join(dice.choices(WORDS, k=dice.randrange(1, 4)))
            assert _shown(await index.search_keywords(search, text)) == _shown(model.search_keywords(search, text))


def _chunk(dice: random.Random, attributes: Mapping[str, AttributeValue]) -> Chunk:
    text = " ".join(dice.choices(WORDS, k=dice.randrange(9)))
    return Chunk(f"file {dice.randrange(6)}/", dice.randrange(12), text, attributes, dice.choice(VECTORS))


def _search(dice: random.Random, store: str) -> Search:
    return Search(store, dice.choice([1, 3, 10, 100]), dice.choice(FILTERS))


def _shown(found: list[ScoredChunk]) -> list[tuple[Any, ...]]:
    return [(each.file, each.number, each.text, each.attributes, round(each.score, 5)) for each in found]
