"""SQLiteVec: a VectorIndex in one SQLite file, with cosines by sqlite-vec and keywords by FTS5."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Concatenate, Final, ParamSpec, TypeVar

import apsw
from pydantic import Field

from apis.documents.vector_index import AttributeValue, Chunk, ScoredChunk, Search, VectorIndex
from apis.errors import ConfigError, StoreUnavailable
from apis.provider import Provider, UserPathText
from providers.vector_index.sqlite_vec_file import IndexFile

P = ParamSpec("P")
T = TypeVar("T")
_log = logging.getLogger(__name__)
_CLOSE_TIMEOUT_S: Final = 5.0


class SQLiteVec(VectorIndex):
    """An index for one machine, whose processes can share the file. Searches are exact scans of the store.

    Keywords are words separated by spaces; English words match by their stems.
    """

    class Config(Provider.Config):
        """`timeout_s` bounds every call, including its wait for other calls and for the lock of the file."""

        path: UserPathText = Field(default="vectors.db", min_length=1)
        timeout_s: float = Field(default=30.0, gt=0, le=600)

    def __init__(self, config: Config) -> None:
        self._config = config
        self._identity = ""
        # two connections, each with its thread: a long search does not delay writes, nor the reverse
        self._reader = _FileThread(config, is_writer=False)
        self._writer = _FileThread(config, is_writer=True)

    async def start(self) -> None:
        try:
            await self._writer.open()
            await self._reader.open()
        except (apsw.Error, StoreUnavailable, ConfigError) as exc:
            await self.close()
            raise ConfigError(f"The SQLite file {self._config.path!r} cannot be used: {exc}.") from exc
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        await asyncio.gather(self._reader.close(), self._writer.close())

    def machine_bound_state(self) -> str | None:
        return f"vectors and words are in {self._config.path!r} on this machine alone; on several, use pgvector"

    async def identity(self) -> str:
        if not self._identity:
            self._identity = await self._writer.call(IndexFile.load_identity)
        return self._identity

    async def upsert(self, store: str, chunks: Sequence[Chunk]) -> None:
        if chunks:
            await self._writer.call(IndexFile.upsert, store, chunks)

    async def set_attributes(self, store: str, file: str, attributes: Mapping[str, AttributeValue]) -> None:
        await self._writer.call(IndexFile.set_attributes, store, file, attributes)

    async def delete(self, store: str, file: str | None = None) -> None:
        await self._writer.call(IndexFile.delete, store, file)

    async def search_vector(self, search: Search, vector: Sequence[float]) -> list[ScoredChunk]:
        return await self._reader.call(IndexFile.search_vector, search, vector)

    async def search_keywords(self, search: Search, text: str) -> list[ScoredChunk]:
        return await self._reader.call(IndexFile.search_keywords, search, text)


class _FileThread:
    """One connection and the one thread that uses it."""

    def __init__(self, config: SQLiteVec.Config, *, is_writer: bool) -> None:
        self._config = config
        self._is_writer = is_writer
        self._executor: ThreadPoolExecutor | None = None
        self._index_file: IndexFile | None = None

    async def open(self) -> None:
        self._executor = ThreadPoolExecutor(1, "vector-index")
        path, timeout_s = self._config.path, self._config.timeout_s
        self._index_file = await asyncio.get_running_loop().run_in_executor(
            self._executor, lambda: IndexFile(path, timeout_s, is_writer=self._is_writer)
        )

    async def close(self) -> None:
        thread, file = self._executor, self._index_file
        self._executor = self._index_file = None
        if thread is None:
            return
        try:
            if file is not None:
                file.interrupt()
                async with asyncio.timeout(min(_CLOSE_TIMEOUT_S, self._config.timeout_s)):
                    await asyncio.get_running_loop().run_in_executor(thread, file.close)
        except TimeoutError:
            _log.warning("a statement of the vector index does not end: its connection is closed with the process")
        finally:
            thread.shutdown(wait=False, cancel_futures=True)

    async def call(self, work: Callable[Concatenate[IndexFile, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of `work`, a transaction that is rolled back after the time-out."""
        thread, file = self._executor, self._index_file
        if thread is None or file is None:
            raise StoreUnavailable("The vector index is closed.")
        deadline = time.monotonic() + self._config.timeout_s
        try:
            async with asyncio.timeout(self._config.timeout_s):
                return await asyncio.get_running_loop().run_in_executor(
                    thread, lambda: file.run_transaction(deadline, work, *args, **kwargs)
                )
        except TimeoutError as exc:
            raise StoreUnavailable(f"The vector index did not answer in {self._config.timeout_s:g} s.") from exc
        except apsw.Error as exc:
            raise StoreUnavailable(f"The vector index cannot do that now ({type(exc).__name__}).") from exc
