"""Search in vector stores: likeness by vectors and matches by keywords, combined into one relevance from 0 to 1.

The relevance is a convex combination of scores (Bruch, Gai, Ingber 2022), not of ranks: the best of irrelevant chunks
is irrelevant, too.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Final

from apis.documents.embeddings import EmbeddingRequest
from apis.documents.vector_index import ScoredChunk, Search, VectorIndex
from apis.documents.vector_store_requests import SearchStores
from apis.errors import InvalidRequest
from apis.inference import Inference
from apis.telemetry import AttributeValue, SpanType, open_span, telemetry
from apis.wire.tools import ComparisonFilter, FileFilter, HybridWeights
from providers.vector_stores.records import StoreRecord

StoreHit = tuple[str, ScoredChunk]
"""The id of a store, and one of its chunks."""

_HitKey = tuple[str, str, int]
_WORD: Final = re.compile(r"[^\W_]+")
_MIN_WORD_CHARS: Final = 4
_MAX_ENDING_CHARS: Final = 3
_DEFAULT_WEIGHTS: Final = HybridWeights(embedding_weight=1.0, text_weight=0.25)
"""Keywords match exact names, vectors paraphrases: tests/bench/test_retrieval.py measures the weights."""
_VECTOR_WEIGHTS: Final = HybridWeights(embedding_weight=1, text_weight=0)
_RANK_CONSTANT: Final = 60
"""Dampens the effect of the first ranks against the next ones: 60, as in reciprocal rank fusion."""
_MAX_COMPARISONS: Final = 256
_MAX_DEPTH: Final = 16
_DEPTH_FACTOR: Final = 4
"""Ranking depth as a multiple of the requested results: a hit that is far down in both rankings can be the best."""


async def search_stores(
    index: VectorIndex, inference: Inference, tenant: str, stores: Mapping[str, StoreRecord], request: SearchStores
) -> list[tuple[StoreHit, float]]:
    """Return the hits of all stores, best first, with their scores. Raises InvalidRequest for too complex filters."""
    _check_filters(request.filters)
    source = ",".join(stores)
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": "retrieval",
        "gen_ai.data_source.id": source,
        "gen_ai.retrieval.top_k": request.limit,
    }
    with open_span(SpanType.RETRIEVAL, source, attributes) as span:
        hits = await _search_stores(index, inference, tenant, stores, request)
        if telemetry().captures_content:
            span.set(telemetry().describe_retrieval(request.queries, [(hit[1].file, score) for hit, score in hits]))
    return hits


async def _search_stores(
    index: VectorIndex, inference: Inference, tenant: str, stores: Mapping[str, StoreRecord], request: SearchStores
) -> list[tuple[StoreHit, float]]:
    ranking = request.ranking_options
    weights = (ranking and ranking.hybrid_search) or _DEFAULT_WEIGHTS
    if ranking is not None and ranking.ranker == "none":
        weights = _VECTOR_WEIGHTS
    depth = max(50, _DEPTH_FACTOR * request.limit)
    by_vector = by_words = list[list[StoreHit]]()
    if weights.embedding_weight > 0:
        by_vector = await _rank_by_vector(index, inference, tenant, stores, request, depth)
    if weights.text_weight > 0:
        by_words = await _rank_by_keywords(index, tenant, stores, request, depth)
    by_query = [
        _score_hits(query, vector_hits or (), word_hits or (), weights, depth)
        for query, vector_hits, word_hits in zip_longest(request.queries, by_vector, by_words)
    ]
    hits = {_hit_key(hit): hit for ranked in (*by_words, *by_vector) for hit in ranked}
    threshold = (ranking.score_threshold if ranking else None) or 0.0
    best = {key: max(scores.get(key, 0.0) for scores in by_query) for key in hits}
    ranked = sorted(best.items(), key=lambda row: -row[1])
    return [(hits[key], score) for key, score in ranked if score >= threshold][: request.limit]


def _score_hits(
    query: str,
    vector_hits: Sequence[StoreHit],
    word_hits: Sequence[StoreHit],
    weights: HybridWeights,
    depth: int,
) -> Mapping[_HitKey, float]:
    """Return the relevance of each hit to the query, from 0 to 1: the weighted mean of its cosine and its words' score.

    The words' score is the share of the query's words in the text, less for a lower rank. A ranking that was cut at
    `depth` says no cosine for the hits below: they have at most its last one.
    """
    total_weight = weights.embedding_weight + weights.text_weight
    if not total_weight:
        return {}
    cosines = {_hit_key(hit): max(0.0, min(1.0, hit[1].score)) for hit in vector_hits}
    default_cosine = min(cosines.values(), default=0.0) if len(vector_hits) >= depth else 0.0
    word_scores = {
        _hit_key(hit): _query_word_share(query, hit[1].text) * (_RANK_CONSTANT + 1) / (_RANK_CONSTANT + rank)
        for rank, hit in enumerate(word_hits, start=1)
    }
    return {
        key: (
            weights.embedding_weight * cosines.get(key, default_cosine)
            + weights.text_weight * word_scores.get(key, 0.0)
        )
        / total_weight
        for key in {**cosines, **word_scores}
    }


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
