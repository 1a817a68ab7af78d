"""Finds chunks by likeness and by words, and makes one ranking of both."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Final

from apis.embeddings import EmbeddingRequest
from apis.errors import InvalidRequest
from apis.inference import Inference
from apis.vector_index import ScoredChunk, Search, VectorIndex
from apis.vector_stores import SearchStores
from apis.wire.tools import ComparisonFilter, FileFilter, HybridWeights
from providers.vector_stores.fusion import fuse_rankings
from providers.vector_stores.records import StoreRecord

StoreHit = tuple[str, ScoredChunk]
"""The store's id, and a chunk of it."""

_HitKey = tuple[str, str, int]
_WORD: Final = re.compile(r"[^\W_]+")
_MIN_WORD_CHARS: Final = 4
_MAX_ENDING_CHARS: Final = 3
_DEFAULT_WEIGHTS: Final = HybridWeights(embedding_weight=1.0, text_weight=0.5)
"""Words find what is called by its name, vectors what is put in other words: tests/bench/test_retrieval.py measures."""
_MAX_COMPARISONS: Final = 256
_MAX_DEPTH: Final = 16
_DEPTH_FACTOR: Final = 4
"""How many times the results asked for are ranked each way: fusion lifts what is far down in both."""


async def search_stores(
    index: VectorIndex, inference: Inference, tenant: str, stores: Mapping[str, StoreRecord], request: SearchStores
) -> list[tuple[StoreHit, float]]:
    """The hits of all stores, best first, with their scores. Raises InvalidRequest for filters that are too much."""
    _check_filters(request.filters)
    ranking = request.ranking_options
    alone = ranking is not None and ranking.ranker == "none"
    weights = (ranking and ranking.hybrid_search) or _DEFAULT_WEIGHTS
    depth = max(50, _DEPTH_FACTOR * request.limit)
    by_vector = by_words = list[list[StoreHit]]()
    if alone or weights.embedding_weight > 0:
        by_vector = await _rank_by_vector(index, inference, tenant, stores, request, depth)
    if not alone and weights.text_weight > 0:
        by_words = await _rank_by_keywords(index, tenant, stores, request, depth)
    if alone:
        scores = _best_cosines(by_vector)
    else:
        scores = fuse_rankings(
            [(weights.embedding_weight, [(_hit_key(hit), 1.0) for hit in hits]) for hits in by_vector]
            + [
                (weights.text_weight, [(_hit_key(hit), _query_word_share(query, hit[1].text)) for hit in hits])
                for query, hits in zip(request.queries, by_words, strict=False)
            ]
        )
    hits = {_hit_key(hit): hit for ranked in (*by_words, *by_vector) for hit in ranked}
    threshold = (ranking.score_threshold if ranking else None) or 0.0
    found = [(hits[key], score) for key, score in scores.items() if score >= threshold]
    return found[: request.limit]


def _best_cosines(rankings: Sequence[Sequence[StoreHit]]) -> Mapping[_HitKey, float]:
    """The best cosine of each hit, best first."""
    scores: dict[_HitKey, float] = {}
    for hit in sorted((hit for hits in rankings for hit in hits), key=lambda hit: -hit[1].score):
        scores.setdefault(_hit_key(hit), max(0.0, min(1.0, hit[1].score)))
    return scores


async def _rank_by_vector(
    index: VectorIndex,
    inference: Inference,
    tenant: str,
    stores: Mapping[str, StoreRecord],
    request: SearchStores,
    depth: int,
) -> list[list[StoreHit]]:
    """A ranking for each query, over all stores; each store's own model says what the query means there."""
    models = {(store.model, store.dimensions) for store in stores.values()}
    vectors: dict[tuple[str, int | None], Sequence[Sequence[float]]] = {}
    for model, dimensions in sorted(models, key=str):
        embedding = EmbeddingRequest(model=model, input=list(request.queries), dimensions=dimensions)
        vectors[model, dimensions] = (await inference.embed(embedding)).vectors
    rankings: list[list[StoreHit]] = []
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
        rankings.append(_merge_by_score(stores, found))
    return rankings


async def _rank_by_keywords(
    index: VectorIndex, tenant: str, stores: Mapping[str, StoreRecord], request: SearchStores, depth: int
) -> list[list[StoreHit]]:
    rankings: list[list[StoreHit]] = []
    for query in request.queries:
        text = query.replace("\0", " ")
        searches = [Search(f"{tenant}/{store_id}", depth, request.filters) for store_id in stores]
        found = await asyncio.gather(*[index.search_keywords(search, text) for search in searches])
        rankings.append(_merge_by_score(stores, found))
    return rankings


def _merge_by_score(stores: Mapping[str, StoreRecord], hits_by_store: Sequence[list[ScoredChunk]]) -> list[StoreHit]:
    hits = [(store_id, each) for store_id, some in zip(stores, hits_by_store, strict=True) for each in some]
    return sorted(hits, key=lambda hit: -hit[1].score)


def _query_word_share(query: str, text: str) -> float:
    """The share of the query's longer words that the text has, whatever their endings: what the words of a question
    that is put in other words have in common with a text, they may have by chance."""
    asked = [word for word in dict.fromkeys(_WORD.findall(query.lower())) if len(word) >= _MIN_WORD_CHARS]
    there = text.lower()
    return (
        sum(word[: max(_MIN_WORD_CHARS, len(word) - _MAX_ENDING_CHARS)] in there for word in asked) / len(asked)
        if asked
        else 1.0
    )


def _hit_key(hit: StoreHit) -> _HitKey:
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
