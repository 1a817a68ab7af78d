"""Retrieval on a small corpus: what the ranking gives with an embedding that knows letters only."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from apis.documents.vector_index import VectorIndex
from apis.provider import Provider
from providers.vector_index.sqlite_vec import SQLiteVec
from tests.support.models.hashing import Hashing
from tests.support.models.retrieval import qualities


@pytest.fixture
async def index(tmp_path: Path) -> AsyncIterator[VectorIndex]:
    index = SQLiteVec(SQLiteVec.Config(path=str(tmp_path / "vectors.db")))
    await index.start()
    yield index
    await index.close()


async def test_hybrid_finds_at_least_what_the_weaker_way_finds(index: VectorIndex) -> None:
    quality = await qualities(index, Hashing(Provider.Config()), "hashing")
    assert quality["keyword"].recall_at_10 >= 0.48
    assert quality["vector"].recall_at_10 >= 0.35
    assert quality["hybrid"].recall_at_10 >= min(quality["keyword"].recall_at_10, quality["vector"].recall_at_10)
