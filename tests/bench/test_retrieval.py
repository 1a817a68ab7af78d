"""Prints how well passages are found by vector, by keyword and by both, with a real model. `pytest -s -m bench`."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from apis.inference import Inference
from apis.provider import Provider
from apis.vector_index import VectorIndex
from providers.inference.minilm import MODEL, MiniLM
from providers.vector_index.pgvector import PgVector
from providers.vector_index.sqlite_vec import SQLiteVec
from tests.hashing import Hashing
from tests.pgvector_server import programs
from tests.postgres_server import PostgresServer
from tests.retrieval import qualities

pytestmark = [pytest.mark.bench, pytest.mark.timeout(600)]


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    with PostgresServer(programs()) as server:
        yield server


@pytest.fixture(params=["sqlite_vec", "pgvector"])
async def index(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[VectorIndex]:
    index: VectorIndex = SQLiteVec(SQLiteVec.Config(path=str(tmp_path / "vectors.db")))
    if request.param == "pgvector":
        index = PgVector(PgVector.Config(url=SecretStr(request.getfixturevalue("server").url)))
    await index.start()
    yield index
    await index.close()


@pytest.fixture
async def minilm() -> AsyncIterator[Inference]:
    provider = MiniLM(MiniLM.Config.model_validate({}))
    await provider.start()
    yield provider
    await provider.close()


async def test_retrieval_quality(index: VectorIndex, minilm: Inference) -> None:
    print()
    for name, inference, model in (("minilm", minilm, MODEL), ("hashing", Hashing(Provider.Config()), "hashing")):
        await index.delete("t/corpus")
        for way, quality in (await qualities(index, inference, model)).items():
            print(f"{type(index).__name__:<10} {name:<8} {way:<8} {quality}")
            assert name != "minilm" or way == "keyword" or quality.recall_at_10 >= 0.92
