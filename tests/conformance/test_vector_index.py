"""The VectorIndex promises, kept by each of the indexes."""

import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from pydantic import SecretStr

from apis.errors import ConfigError
from apis.vector_index import VectorIndex
from providers.vector_index.pgvector import PgVector
from providers.vector_index.sqlite_vec import SQLiteVec
from tests.conformance.vector_index import Opening, VectorIndexPromises
from tests.pgvector_server import programs
from tests.postgres_server import PostgresServer

numbers = itertools.count()


class TestSQLiteVec(VectorIndexPromises):
    @pytest.fixture
    async def opening(self, tmp_path: Path) -> AsyncIterator[Opening]:
        async with AsyncExitStack() as opened:

            async def opening() -> VectorIndex:
                index = SQLiteVec(SQLiteVec.Config(path=str(tmp_path / "vectors.db")))
                await index.start()
                opened.push_async_callback(index.close)
                return index

            yield opening

    async def test_the_file_of_another_program_is_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "letter.txt").write_text("Dear reader, " * 1000)
        with pytest.raises(ConfigError, match=r"letter\.txt"):
            await SQLiteVec(SQLiteVec.Config(path=str(tmp_path / "letter.txt"))).start()
        assert (tmp_path / "letter.txt").read_text() == "Dear reader, " * 1000


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer(programs()) as server:
        yield server


class TestPgVector(VectorIndexPromises):
    @pytest.fixture
    async def opening(self, server: PostgresServer) -> AsyncIterator[Opening]:
        config = PgVector.Config(url=SecretStr(server.url), namespace=f"test{next(numbers)}")
        async with AsyncExitStack() as opened:

            async def opening() -> VectorIndex:
                index = PgVector(config)
                await index.start()
                opened.push_async_callback(index.close)
                return index

            yield opening
