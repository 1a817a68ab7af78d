"""Search in vector stores: rankings by vectors and by keywords, fused into one by reciprocal rank fusion
(Cormack, Clarke, Büttcher 2009), scaled to 0..1."""

import asyncio
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Final, TypeVar

from apis.embeddings import EmbeddingRequest
from apis.errors import InvalidRequest
from apis.inference import Inference
from apis.vector_index import ScoredChunk, Search, VectorIndex
from apis.vector_stores import SearchStores
from apis.wire.tools import ComparisonFilter, FileFilter, HybridWeights
from providers.vector_stores.records import StoreRecord

StoreHit = tuple[str, ScoredChunk]
"""The id of a store, and one of its chunks."""

_HitKey = tuple[str, str, int]
_WORD: Final = re.compile(r"[^\W_]+")
_MIN_WORD_CHARS: Final = 4
_MAX_ENDING_CHARS: Final = 3
_DEFAULT_WEIGHTS: Final = HybridWeights(embedding_weight=1.0, text_weight=0.5)
"""Keywords match exact names, vectors paraphrases: tests/bench/test_retrieval.py measures the weights."""
_RANK_CONSTANT: Final = 60
"""Dampens the weight of the first ranks against the next ones: 60, as in the paper."""
KeyT = TypeVar("KeyT", bound=Hashable)
ScoredRanking = Sequence[tuple[KeyT, float]]
"""Keys, best first, each with its relevance from 0, chance, to 1."""
_MAX_COMPARISONS: Final = 256
_MAX_DEPTH: Final = 16
_DEPTH_FACTOR: Final = 4
"""Ranking depth as a multiple of the requested results: fusion can lift hits that are far down in both rankings."""


async def search_stores(
    index: VectorIndex, inference: Inference, tenant: str, stores: Mapping[str, StoreRecord], request: SearchStores
) -> list[tuple[StoreHit, float]]:
    """Return the hits of all stores, best first, with their scores. Raises InvalidRequest for too complex filters."""
    _check_filters(request.filters)
    ranking = request.ranking_options
    vectors_only = ranking is not None and ranking.ranker == "none"
    weights = (ranking and ranking.hybrid_search) or _DEFAULT_WEIGHTS
    depth = max(50, _DEPTH_FACTOR * request.limit)
    by_vector = by_words = list[list[StoreHit]]()
    if vectors_only or weights.embedding_weight > 0:
        by_vector = await _rank_by_vector(index, inference, tenant, stores, request, depth)
    if not vectors_only and weights.text_weight > 0:
        by_words = await _rank_by_keywords(index, tenant, stores, request, depth)
    if vectors_only:
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
    return [(hits[key], score) for key, score in scores.items() if score >= threshold][: request.limit]


def _best_cosines(rankings: Sequence[Sequence[StoreHit]]) -> Mapping[_HitKey, float]:
    """Return the best cosine of each hit, best first."""
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
    """Return a ranking for each query over all stores; each store's own model embeds the query."""
    models = {(store.model, store.dimensions) for store in stores.values()}
    vectors: dict[tuple[str, int | None], Sequence[Sequence[float]]] = {}
    for model, dimensions in sorted(models, key=str):
        embedding = EmbeddingRequest(model=model, input=list(request.queries), dimensions=dimensions)
        vectors[model, dimensions] = (await inference.embed(embedding, tenant=tenant)).vectors
    rankings: list[list[StoreHit]] = []
    for position in range(len(request.queries)):
        hits_by_store = await asyncio.gather(
            *[
                index.search_vector(
                    Search(f"{tenant}/{store_id}", depth, request.filters),
                    vectors[store.model, store.dimensions][position],
                )
                for store_id, store in stores.items()
            ]
        )
        rankings.append(_merge_by_score(stores, hits_by_store))
    return rankings


async def _rank_by_keywords(
    index: VectorIndex, tenant: str, stores: Mapping[str, StoreRecord], request: SearchStores, depth: int
) -> list[list[StoreHit]]:
    rankings: list[list[StoreHit]] = []
    for query in request.queries:
        text = query.replace("\0", " ")
        searches = [Search(f"{tenant}/{store_id}", depth, request.filters) for store_id in stores]
        hits_by_store = await asyncio.gather(*[index.search_keywords(search, text) for search in searches])
        rankings.append(_merge_by_score(stores, hits_by_store))
    return rankings


def _merge_by_score(stores: Mapping[str, StoreRecord], hits_by_store: Sequence[list[ScoredChunk]]) -> list[StoreHit]:
    hits = [(store_id, hit) for store_id, hits in zip(stores, hits_by_store, strict=True) for hit in hits]
    return sorted(hits, key=lambda hit: -hit[1].score)


def _query_word_share(query: str, text: str) -> float:
    """Return the share of the query's longer words whose stems are in the text: it discounts chance matches of a
    question that paraphrases the text."""
    words = [word for word in dict.fromkeys(_WORD.findall(query.lower())) if len(word) >= _MIN_WORD_CHARS]
    lower_text = text.lower()
    return (
        sum(word[: max(_MIN_WORD_CHARS, len(word) - _MAX_ENDING_CHARS)] in lower_text for word in words) / len(words)
        if words
        else 1.0
    )


def _hit_key(hit: StoreHit) -> _HitKey:
    return hit[0], hit[1].file, hit[1].number


def _check_filters(filters: FileFilter | None) -> None:
    """Raise InvalidRequest for filters with too many comparisons, or with values that some database cannot hold."""
    layer = [] if filters is None else [filters]
    comparisons = depth = 0
    while layer:
        depth += 1
        inner: list[FileFilter] = []
        for node in layer:
            if not isinstance(node, ComparisonFilter):
                inner += node.filters
                continue
            values = node.value if isinstance(node.value, list) else [node.value]
            comparisons += max(1, len(values))
            if any("\0" in text for text in (node.key, *values) if isinstance(text, str)):
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


def fuse_rankings(rankings: Sequence[tuple[float, ScoredRanking[KeyT]]]) -> Mapping[KeyT, float]:
    """Return the score of each key in these weighted rankings, best first: a key that is first in all of them has 1."""
    scores: dict[KeyT, float] = {}
    max_score = sum(weight for weight, _ in rankings) / (_RANK_CONSTANT + 1)
    for weight, ranking in rankings:
        for rank, (key, relevance) in enumerate(ranking, start=1):
            scores[key] = scores.get(key, 0.0) + weight * relevance / (_RANK_CONSTANT + rank)
    ranked = sorted(scores.items(), key=lambda row: -row[1])
    return {key: min(1.0, score / max_score) if max_score else 0.0 for key, score in ranked}
