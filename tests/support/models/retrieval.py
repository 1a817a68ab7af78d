"""How well passages are found: a hundred of them in the public domain, and sixty questions in other words.

The passages are of the Constitution of the United States, Aesop's fables after Townsend (1867), the King James Bible
and Shakespeare. Each question asks for one of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from apis.documents.embeddings import EmbeddingRequest
from apis.documents.vector_index import Chunk, VectorIndex
from apis.documents.vector_store_requests import SearchStores
from apis.inference import Inference
from providers.vector_stores.records import StoreRecord
from providers.vector_stores.search import search_stores

CORPUS: Final = Path(__file__).with_name("corpus")
WAYS: Final[Mapping[str, dict[str, Any]]] = {
    "vector": {"ranker": "none"},
    "keyword": {"hybrid_search": {"embedding_weight": 0.0, "text_weight": 1.0}},
    "hybrid": {},
}


@dataclass(frozen=True, slots=True)
class Quality:
    """Shares of the questions whose passage was among the first so many, and the mean of 1 / its rank."""

    recall_at_1: float
    recall_at_3: float
    recall_at_10: float
    mean_reciprocal_rank: float

    def __str__(self) -> str:
        return (
            f"recall@1 {self.recall_at_1:.2f}  @3 {self.recall_at_3:.2f}  @10 {self.recall_at_10:.2f}"
            f"  MRR {self.mean_reciprocal_rank:.2f}"
        )


def lines(name: str) -> list[tuple[str, str]]:
    rows = (CORPUS / name).read_text().splitlines()
    return [(key, text) for key, _, text in (row.partition("\t") for row in rows)]


async def qualities(index: VectorIndex, inference: Inference, model: str) -> dict[str, Quality]:
    """The quality of each way to search."""
    passages, questions = lines("passages.tsv"), lines("questions.tsv")
    request = EmbeddingRequest(model=model, input=[text for _, text in passages], dimensions=None)
    vectors = (await inference.embed(request)).vectors
    chunks = [Chunk(key, 0, text, {}, vector) for (key, text), vector in zip(passages, vectors, strict=True)]
    await index.upsert("t/corpus", chunks)
    stores = {"corpus": StoreRecord(created_at=0, last_active_at=0, model=model)}
    results: dict[str, Quality] = {}
    for way, ranking in WAYS.items():
        ranks: list[int] = []
        for key, question in questions:
            search = SearchStores.model_validate({"query": question, "ranking_options": ranking})
            hits = [hit.file for (_, hit), _ in await search_stores(index, inference, "t", stores, search)]
            ranks.append(hits.index(key) + 1 if key in hits else 0)
        at_1, at_3, at_10 = (sum(0 < rank <= most for rank in ranks) / len(ranks) for most in (1, 3, 10))
        results[way] = Quality(at_1, at_3, at_10, sum(1 / rank for rank in ranks if rank) / len(ranks))
    return results
