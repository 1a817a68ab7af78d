"""The VectorIndex promises, kept by each of the indexes."""

import asyncio
import itertools
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import apsw
import pytest
from pydantic import SecretStr

from apis.documents.vector_index import Search, VectorIndex
from apis.errors import ConfigError, StoreUnavailable
from providers.vector_index.pgvector import PgVector
from providers.vector_index.sqlite_vec import SQLiteVec
from tests.conformance.vector_index import Opening, VectorIndexPromises, chunk
from tests.support.servers.pgvector_server import programs
from tests.support.servers.postgres_server import PASSWORD, PostgresServer

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
        sqlite3.connect(tmp_path / "other.db").execute("CREATE TABLE chunks (id)").connection.close()
        with pytest.raises(ConfigError, match="another program"):
            await SQLiteVec(SQLiteVec.Config(path=str(tmp_path / "other.db"))).start()

    async def test_a_deleted_file_is_unavailable_to_writes_and_reads(self, opening: Opening, tmp_path: Path) -> None:
        """Writes after the file was deleted would be lost."""
        index = await opening()
        await index.upsert("s", [chunk("f", 0)])
        (tmp_path / "vectors.db").unlink()
        with pytest.raises(StoreUnavailable, match="deleted or replaced"):
            await index.upsert("s", [chunk("f", 1)])

    async def test_only_the_owner_can_read_a_new_file(self, opening: Opening, tmp_path: Path) -> None:
        """The texts of all files are in it."""
        await (await opening()).upsert("s", [chunk("f", 0)])
        modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
        assert modes == {"vectors.db": 0o600, "vectors.db-wal": 0o600, "vectors.db-shm": 0o600}

    async def test_a_file_that_others_hold_is_unavailable_in_time_and_can_be_read(self, tmp_path: Path) -> None:
        path = tmp_path / "vectors.db"
        index = SQLiteVec(SQLiteVec.Config(path=str(path), timeout_s=1))
        await index.start()
        await index.upsert("s", [chunk("a", 0, "word")])
        # Python's sqlite3 is another SQLite, and two in one process share no locks.
        other: Any = apsw.Connection(str(path))
        other.execute("BEGIN IMMEDIATE")
        began = time.monotonic()
        with pytest.raises(StoreUnavailable):
            await index.upsert("s", [chunk("b", 0, "word")])
        assert time.monotonic() - began < 3
        assert len(await index.search_keywords(Search("s", 9), "word")) == 1
        other.execute("ROLLBACK")
        other.close()
        await index.upsert("s", [chunk("c", 0, "word")])
        assert len(await index.search_keywords(Search("s", 9), "word")) >= 2
        await index.close()

    async def test_an_index_whose_statement_does_not_end_is_closed_all_the_same(self, tmp_path: Path) -> None:
        """Neither the start of the next process nor the other connection waits for it."""
        index = SQLiteVec(SQLiteVec.Config(path=str(tmp_path / "vectors.db"), timeout_s=0.2))
        await index.start()
        gate = threading.Event()
        with pytest.raises(StoreUnavailable):
            await index._reader.call(lambda _: gate.wait(30))  # pyright: ignore[reportPrivateUsage] - SQLite has no such statement
        await index.close()
        with pytest.raises(StoreUnavailable, match="closed"):
            await index.upsert("s", [chunk("f", 0)])
        gate.set()


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

    async def test_the_host_that_accepts_writes_is_used(self, server: PostgresServer) -> None:
        """A read-only host and one that hangs keep the index from no other."""

        def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers.append(writer)

        writers: list[asyncio.StreamWriter] = []
        standby = PostgresServer(programs(), default_transaction_read_only="on")
        await asyncio.to_thread(standby.__enter__)
        try:
            async with await asyncio.start_server(hang, "127.0.0.1", 0) as listener:
                hanging = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
                url = server.url.replace(server.host, f"{standby.host},{hanging},{server.host}")
                config = PgVector.Config(url=SecretStr(url), namespace=f"test{next(numbers)}", timeout_s=10)
                index = PgVector(config)
                await index.start()
                await index.upsert("s", [chunk("a", 0, "word")])
                assert len(await index.search_keywords(Search("s", 9), "word")) == 1
                await index.close()
                for writer in writers:
                    writer.close()
        finally:
            await asyncio.to_thread(standby.__exit__)

    async def test_a_server_that_hangs_is_unavailable_in_time_and_then_as_before(self, server: PostgresServer) -> None:
        config = PgVector.Config(url=SecretStr(server.url), namespace=f"test{next(numbers)}", timeout_s=0.5)
        index = PgVector(config)
        await index.start()
        await index.upsert("s", [chunk("a", 0, "word")])
        server.pause()
        try:
            began = time.monotonic()
            calls = [index.search_keywords(Search("s", 9), "word") for _ in range(8)]
            answers = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(answer) for answer in answers} == {StoreUnavailable}
            assert time.monotonic() - began < 5
        finally:
            server.resume()
        async with asyncio.timeout(10):
            while True:
                with suppress(StoreUnavailable):
                    assert len(await index.search_keywords(Search("s", 9), "word")) == 1
                    break
        await index.close()

    async def test_a_database_without_the_extension_is_a_config_error(self) -> None:
        with PostgresServer() as plain:
            with pytest.raises(ConfigError, match="pgvector") as caught:
                await PgVector(PgVector.Config(url=SecretStr(plain.url))).start()
            assert PASSWORD not in str(caught.value)

    @pytest.mark.parametrize("url", ["http://:s3cret@host", "nonsense", "postgresql://:s3cret@host:port/db"])
    async def test_a_bad_url_is_a_config_error(self, url: str) -> None:
        with pytest.raises(ConfigError, match="postgresql://") as caught:
            await PgVector(PgVector.Config(url=SecretStr(url))).start()
        assert "s3cret" not in str(caught.value)
