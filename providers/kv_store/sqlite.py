"""SQLite: a KVStore in one file, for one machine. Waiting writes are committed together."""

import asyncio
import sqlite3
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import aiosqlite
from pydantic import Field

from apis.errors import ConfigError, StackError, StoreUnavailable
from apis.fair_share import FairShare
from apis.provider import UserPathText
from apis.storage.database_file import DatabaseFile
from apis.storage.kv_store import MEASURE_ROWS, Entry, KVStore, Op
from providers.kv_store.batcher import Batcher, Deliver
from providers.kv_store.checks import build_quota, encode_key, encode_ops, scan_range
from providers.kv_store.clock import StoreClock
from providers.kv_store.sqlite_checkpoints import WalCheckpoints
from providers.kv_store.sqlite_file import SWEEP_ROWS, Database, SqliteWrite, sqlite_error_to_stack_error

P = ParamSpec("P")
T = TypeVar("T")
U = TypeVar("U")


class SQLite(KVStore):
    """A store that the processes of one machine can share (WAL); its file must not be on a network file system."""

    class Config(KVStore.Config):
        """`busy_timeout_s` is the longest wait for the lock of another process; a call fails after twice that.

        `max_bytes` bounds the file without its write-ahead log: a full store refuses writes and can still be read.
        Without `survives_power_loss` no write waits until the disk has it: each takes less time, above all on a slow
        disk, and the last writes before a loss of power may be missing; the end of this process loses nothing.
        """

        path: UserPathText = Field(min_length=1)
        busy_timeout_s: float = Field(default=5.0, gt=0, le=60)
        max_bytes: int | None = Field(default=None, ge=64 * 1024)
        survives_power_loss: bool = True

    def __init__(self, config: Config) -> None:
        self.now: Callable[[], float] = StoreClock()
        self.quota = build_quota(self, config.max_tenant_bytes)
        self._config = config
        self._file = DatabaseFile(config.path)
        self._timeout_s = 2 * config.busy_timeout_s
        self._connection: aiosqlite.Connection | None = None
        self._database: Database
        self._checkpoints = WalCheckpoints(config.path)
        # one at a time: all else waits in the connection's thread for one scan at most, which may read many megabytes
        self._scans = FairShare("scans of the store", 1, by_time=True)
        self._write_batcher = Batcher(
            partial(self._begin, Database.write), timeout_s=self._timeout_s, is_large=attrgetter("is_large")
        )
        self._read_batcher = Batcher(partial(self._begin, Database.get), timeout_s=self._timeout_s)

    async def start(self) -> None:
        config = self._config
        await asyncio.to_thread(self._file.prepare)
        connection = aiosqlite.connect(
            config.path, timeout=config.busy_timeout_s, isolation_level=None, cached_statements=256
        )
        try:
            # if this fails, so would aiosqlite, whose thread would then call into a loop that may be closed
            await asyncio.to_thread(lambda: sqlite3.connect(config.path).close())
            self._connection = await connection
            self._database = Database(
                connection._conn,  # pyright: ignore[reportPrivateUsage] - see _run
                self.now,
                self._file,
                self._checkpoints,
            )
            await self._run(Database.prepare, config.max_bytes, config.busy_timeout_s)
        except (sqlite3.Error, ConfigError) as exc:
            await self.close()
            raise ConfigError(f"The SQLite file {config.path!r} cannot be used: {exc}.") from exc
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        if self.quota is not None:
            await self.quota.close()
        await self._write_batcher.drain()
        await self._read_batcher.drain()
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._timeout_s):
                    await asyncio.to_thread(self._checkpoints.close)
                    await connection.close()

    async def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        return await self._read_batcher.submit([encode_key(key) for key in keys])

    async def write(self, ops: Sequence[Op], *, durable: bool = True) -> list[int] | None:
        write = SqliteWrite(encode_ops(ops), durable and self._config.survives_power_loss)
        versions = await self._write_batcher.submit(write)
        if versions is not None:
            self.count_write(ops)
        return versions

    async def scan(
        self,
        prefix: str,
        *,
        after: str = "",
        before: str = "",
        limit: int = 1000,
        reverse: bool = False,
        max_bytes: int | None = None,
    ) -> list[tuple[str, Entry]]:
        low, high = scan_range(prefix, after, before, limit)

        async def scan_in_turn() -> list[tuple[str, Entry]]:
            with await self._scans.acquire(prefix.partition("/")[0]):
                return await self._run(Database.scan, (low, high), limit, reverse=reverse, max_bytes=max_bytes)

        return await self._call(scan_in_turn())

    async def measure(self, prefix: str, *, after: str = "") -> tuple[int, str]:
        low, high = scan_range(prefix, after, "", MEASURE_ROWS)
        return await self._call(self._run(Database.measure, low, high))

    async def sweep(self) -> int:
        swept = 0
        while (count := await self._call(self._run(Database.sweep))) == SWEEP_ROWS:
            swept += count
        return swept + count

    def _begin(
        self,
        work: Callable[[Database, Sequence[T]], Sequence[U | StackError]],
        requests: Sequence[T],
        deliver: Deliver[U],
    ) -> None:
        if self._connection is None:
            deliver([StoreUnavailable("The store is closed.")] * len(requests))
            return
        batch = _ThreadBatch(asyncio.get_running_loop(), len(requests), deliver)
        # in public, aiosqlite would wake the loop once more, for a future that has one callback
        queue: Any = self._connection._tx  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType, reportUnknownVariableType] - see above
        queue.put_nowait((batch, partial(work, self._database, requests)))

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await work
        except sqlite3.Error as exc:
            raise sqlite_error_to_stack_error(exc) from exc
        except TimeoutError as exc:
            raise StoreUnavailable(f"The store did not answer within {self._timeout_s:g} seconds.") from exc

    async def _run(self, work: Callable[Concatenate[Database, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        if self._connection is None:
            raise StoreUnavailable("The store is closed.")
        # aiosqlite runs only single statements in public, and a thread hop for each would cost ~80 us of CPU.
        execute = self._connection._execute  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType, reportUnknownMemberType] - see above
        return await execute(work, self._database, *args, **kwargs)


class _ThreadBatch(Generic[U]):
    """A batch in the thread of the connection: as much of a future as aiosqlite uses. It calls `get_loop` in the
    thread, and the rest in the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, size: int, deliver: Deliver[U]) -> None:
        self._loop = loop
        self._size = size
        self._deliver = deliver

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def done(self) -> bool:
        return False

    def set_result(self, results: Sequence[U | StackError]) -> None:
        self._deliver(results)

    def set_exception(self, exc: BaseException) -> None:
        is_known = isinstance(exc, StoreUnavailable)
        self._deliver([exc if is_known else StoreUnavailable("The store failed.")] * self._size)
        if not is_known:
            raise exc  # a bug: the loop logs it
