"""Finds chunks by likeness and by words, and makes one ranking of both."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Final

from apis.embeddings import EmbeddingRequest
from apis.errors import InvalidRequest
from apis.inference import Inference
from apis.vector_index import Found, Search, VectorIndex
from apis.vector_stores import SearchStores
from apis.wire.tools import ComparisonFilter, FileFilter, HybridWeights
from providers.vector_stores.fusion import fuse
from providers.vector_stores.records import Store

Hit = tuple[str, Found]
"""The store's id, and a chunk of it."""

_Key = tuple[str, str, int]
_WORD: Final = re.compile(r"[^\W_]+")
_TELLING: Final = 4
_ENDING: Final = 3
_WEIGHTS: Final = HybridWeights(embedding_weight=1.0, text_weight=0.5)
"""Words find what is called by its name, vectors what is put in other words: tests/bench/test_retrieval.py measures."""
_MAX_COMPARISONS: Final = 256
_MAX_DEPTH: Final = 16
_DEEPER: Final = 4
"""How many times the results asked for are ranked each way: fusion lifts what is far down in both."""


async def find(
    index: VectorIndex, inference: Inference, tenant: str, stores: Mapping[str, Store], request: SearchStores
) -> list[tuple[Hit, float]]:
    """The hits of all stores, best first, with their scores. Raises InvalidRequest for filters that are too much."""
    _check_filters(request.filters)
    ranking = request.ranking_options
    alone = ranking is not None and ranking.ranker == "none"
    weights = (ranking and ranking.hybrid_search) or _WEIGHTS
    depth = max(50, _DEEPER * request.limit)
    by_vector = by_words = list[list[Hit]]()
    if alone or weights.embedding_weight > 0:
        by_vector = await _by_vector(index, inference, tenant, stores, request, depth)
    if not alone and weights.text_weight > 0:
        by_words = await _by_words(index, tenant, stores, request, depth)
    if alone:
        scores = _likeness(by_vector)
    else:
        scores = fuse(
            [(weights.embedding_weight, [(_key(hit), 1.0) for hit in hits]) for hits in by_vector]
            + [
                (weights.text_weight, [(_key(hit), _share(query, hit[1].text)) for hit in hits])
                for query, hits in zip(request.queries, by_words, strict=False)
            ]
        )
    hits = {_key(hit): hit for ranked in (*by_words, *by_vector) for hit in ranked}
    threshold = (ranking.score_threshold if ranking else None) or 0.0
    found = [(hits[key], score) for key, score in scores.items() if score >= threshold]
    return found[: request.limit]


def _likeness(rankings: Sequence[Sequence[Hit]]) -> Mapping[_Key, float]:
    """The best cosine of each hit, best first."""
    scores: dict[_Key, float] = {}
    for hit in sorted((hit for hits in rankings for hit in hits), key=lambda hit: -hit[1].score):
        scores.setdefault(_key(hit), max(0.0, min(1.0, hit[1].score)))
    return scores


async def _by_vector(
    index: VectorIndex,
    inference: Inference,
    tenant: str,
    stores: Mapping[str, Store],
    request: SearchStores,
    depth: int,
) -> list[list[Hit]]:
    """A ranking for each query, over all stores; each store's own model says what the query means there."""
    models = {(store.model, store.dimensions) for store in stores.values()}
    vectors: dict[tuple[str, int | None], Sequence[Sequence[float]]] = {}
    for model, dimensions in sorted(models, key=str):
        embedding = EmbeddingRequest(model=model, input=list(request.queries), dimensions=dimensions)
        vectors[model, dimensions] = (await inference.embed(embedding)).vectors
    rankings: list[list[Hit]] = []
    for position in range(len(request.queries)):
        found = await asyncio.gather(
            *[
                index.search_vector(
                    Search(f"{tenant}/{store_id}", depth, request.filters),
                    vectors[store.model, store.dimensions][position],
                )
                for store_id, store in stores.items()
            ]
        )
        rankings.append(_merged(stores, found))
    return rankings


async def _by_words(
    index: VectorIndex, tenant: str, stores: Mapping[str, Store], request: SearchStores, depth: int
) -> list[list[Hit]]:
    rankings: list[list[Hit]] = []
    for query in request.queries:
        text = query.replace("\0", " ")
        searches = [Search(f"{tenant}/{store_id}", depth, request.filters) for store_id in stores]
        found = await asyncio.gather(*[index.search_keywords(search, text) for search in searches])
        rankings.append(_merged(stores, found))
    return rankings


def _merged(stores: Mapping[str, Store], found: Sequence[list[Found]]) -> list[Hit]:
    hits = [(store_id, each) for store_id, some in zip(stores, found, strict=True) for each in some]
    return sorted(hits, key=lambda hit: -hit[1].score)


def _share(query: str, text: str) -> float:
    """The share of the query's longer words that the text has, whatever their endings: what the words of a question
    that is put in other words have in common with a text, they may have by chance."""
    asked = [word for word in dict.fromkeys(_WORD.findall(query.lower())) if len(word) >= _TELLING]
    there = text.lower()
    return sum(word[: max(_TELLING, len(word) - _ENDING)] in there for word in asked) / len(asked) if asked else 1.0


def _key(hit: Hit) -> _Key:
    return hit[0], hit[1].file, hit[1].number


def _check_filters(filters: FileFilter | None) -> None:
    """Bounds what a database is made to compare, and keeps from it what some cannot hold: NUL, and huge numbers."""
    layer = [] if filters is None else [filters]
    comparisons = depth = 0
    while layer:
        depth += 1
        inner: list[FileFilter] = []
        for each in layer:
            if not isinstance(each, ComparisonFilter):
                inner += each.filters
                continue
            values = each.value if isinstance(each.value, list) else [each.value]
            comparisons += max(1, len(values))
            if any("\0" in text for text in (each.key, *values) if isinstance(text, str)):
                raise InvalidRequest("A filter holds a NUL character.", param="filters", code="invalid_value")
            if any(isinstance(number, int) and abs(number) > 2**53 for number in values):
                raise InvalidRequest("A filter holds a number beyond 2^53.", param="filters", code="invalid_value")
        layer = inner
    if depth > _MAX_DEPTH or comparisons > _MAX_COMPARISONS:
        raise InvalidRequest(
            f"Filters may compare {_MAX_COMPARISONS} values, {_MAX_DEPTH} levels deep.",
            param="filters",
            code="invalid_value",
        )
