"""Prints how well passages are found by vector, by keyword and by both, with a real model, and how fast among many.

`pytest -s -m bench`
"""

import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median

import numpy as np
import psutil
import pytest
from pydantic import SecretStr

from apis.documents.vector_index import Chunk, Search, VectorIndex
from apis.inference import Inference
from apis.provider import Provider
from providers.inference.minilm.provider import MODEL, MiniLM
from providers.vector_index.pgvector import PgVector
from providers.vector_index.sqlite_vec import SQLiteVec
from tests.support.models.hashing import Hashing
from tests.support.models.retrieval import qualities
from tests.support.servers.pgvector_server import programs
from tests.support.servers.postgres_server import PostgresServer

pytestmark = [pytest.mark.bench, pytest.mark.timeout(600)]

CHUNKS = 20_000
DIMENSIONS = 384
BATCH = 100
WORDS = 300
"""In each chunk; the n-th of a vocabulary is as frequent as 1 / n, nearly."""
ROUNDS = 20


Opening = Callable[[], Awaitable[VectorIndex]]


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    with PostgresServer(programs()) as server:
        yield server


@pytest.fixture(params=["sqlite_vec", "pgvector"])
async def opening(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Opening]:
    """Opens clients of one index."""
    async with AsyncExitStack() as opened:

        async def opening() -> VectorIndex:
            index: VectorIndex
            match request.param:
                case "sqlite_vec":
                    index = SQLiteVec(SQLiteVec.Config(path=str(tmp_path / "vectors.db")))
                case _:
                    index = PgVector(PgVector.Config(url=SecretStr(request.getfixturevalue("server").url)))
            await index.start()
            opened.push_async_callback(index.close)
            return index

        yield opening


@pytest.fixture
async def index(opening: Opening) -> VectorIndex:
    return await opening()


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


async def test_time_and_memory(opening: Opening) -> None:
    """Medians. Memory is what the searching process grows by; a server has its own."""
    dice, numbers = random.Random(1), np.random.default_rng(1)
    letters = "abcdefghijklmnopqrstuvwxyz"
    vocabulary = ["".join(dice.choices(letters, k=dice.randint(3, 9))) for _ in range(30_000)]
    odds = [1 / (n + 10) for n in range(len(vocabulary))]
    vectors = numbers.standard_normal((CHUNKS, DIMENSIONS), dtype=np.float32)
    one, upserts = await opening(), list[float]()
    for start in range(0, CHUNKS, BATCH):
        texts = [" ".join(dice.choices(vocabulary, odds, k=WORDS)) for _ in range(BATCH)]
        few_texts = [
            Chunk(f"f{start}", number, text, {"at": start}, vectors[start + number].tolist())
            for number, text in enumerate(texts)
        ]
        upserts.append(await _took_s(one.upsert("s", few_texts)))
    process, other = psutil.Process(), await opening()
    before = process.memory_info().rss
    cold = await _took_s(other.search_vector(Search("s", 50), vectors[0].tolist()))
    grown = process.memory_info().rss - before
    by_vector = [await _took_s(other.search_vector(Search("s", 50), vectors[n].tolist())) for n in range(ROUNDS)]
    queries = [" ".join(vocabulary[(41 * n + 7 * k) % 3000] for k in range(6)) for n in range(ROUNDS)]
    by_words = [await _took_s(other.search_keywords(Search("s", 50), text)) for text in queries]
    changed: list[float] = []
    for n in range(5):
        await one.upsert("s", [Chunk("new", n, "word", {}, vectors[n].tolist())])
        changed.append(await _took_s(other.search_vector(Search("s", 50), vectors[n].tolist())))
    print(
        f"\n{type(one).__name__}: upsert of {BATCH} {_ms(upserts)}; search by vector cold {_ms([cold])} "
        f"(memory +{grown / 2**20:.0f} MiB), warm {_ms(by_vector)}, after a change {_ms(changed)}; "
        f"by six words {_ms(by_words)}"
    )


async def _took_s(call: Awaitable[object]) -> float:
    began = time.perf_counter()
    await call
    return time.perf_counter() - began


def _ms(times_s: list[float]) -> str:
    return f"{median(times_s) * 1000:.1f} ms"
