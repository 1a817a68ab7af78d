"""Redis: a VectorIndex in plain Redis, searched in copies of its stores that each process keeps in memory."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4
from weakref import WeakValueDictionary

import orjson
from pydantic import Field, SecretStr
from redis.asyncio import BlockingConnectionPool, RedisCluster
from redis.asyncio import Redis as Client
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, AuthorizationError, RedisClusterException, RedisError, ResponseError
from redis.maint_notifications import MaintNotificationsConfig

from apis.errors import ConfigError, StoreUnavailable
from apis.provider import Provider
from apis.vector_index import AttributeValue, Chunk, ScoredChunk, Search, VectorIndex
from providers.vector_index.ranking import ByVector, ByWords, Hit, Ranking
from providers.vector_index.redis_scripts import (
    DELETE,
    GONE,
    LOOK,
    PAGE,
    PIECE,
    READ,
    SET_ATTRIBUTES,
    STAMPS,
    UPSERT,
    Keys,
    file_to_place,
    store_to_keys,
)
from providers.vector_index.segments import Piece, chunk_to_bytes, vector_to_unit
from providers.vector_index.snapshots import Copies, Copy, Page, page_to_pieces
from providers.vector_index.terms import query_to_terms

log = logging.getLogger(__name__)

_FAILURES: Final = (RedisError, RedisClusterException, OSError, TimeoutError)
_CONNECTIONS: Final = 8
_MIB: Final = 2**20
_REFRESH_S: Final = 600.0
_CLOSE_S: Final = 5.0
_CLOSED: Final = "The vector index is closed."


class Redis(VectorIndex):
    """For any number of machines: Redis 6.2 or later, or Valkey, without modules. Durable is what its own persistence
    is set to, and it must not evict (`maxmemory-policy noeviction`, its default).

    Every search looks at all chunks of its store, in a copy that the process keeps in memory, and asks Redis whether
    it is still as it was: only what changed is read. Stores that do not fit are read anew for every search. Words are
    those of languages that put spaces between them; English endings do not count.
    """

    class Config(Provider.Config):
        """`url` is redis://, rediss:// or unix://, and may hold a password; with `cluster` it is one of the nodes of a
        Redis Cluster, which keeps each store whole on one of them. All keys begin with `prefix`.

        `timeout_s` bounds every call. Copies may take `cache_mib` together in each process; while one is read, it takes
        some times as much. A larger store must be read from Redis within `timeout_s`.
        """

        url: SecretStr
        cluster: bool = False
        prefix: str = Field(default="stack_vectors:", pattern=r"^[^{}]*$")
        timeout_s: float = Field(default=30.0, gt=0, le=600)
        cache_mib: int = Field(default=512, ge=0)

    def __init__(self, config: Config) -> None:
        self._config = config
        self._client: Any = None  # redis-py's two clients, which it types in part only
        self._copies = Copies(config.cache_mib * _MIB)
        self._refreshes: set[asyncio.Task[Copy | None]] = set()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def start(self) -> None:
        try:
            self._client = _url_to_client(self._config)
        except ValueError as exc:
            raise ConfigError("The Redis url must be redis://, rediss:// or unix://, with a host and a port.") from exc
        try:
            async with asyncio.timeout(self._config.timeout_s):
                await self._client.ping()
        except (AuthenticationError, AuthorizationError, ResponseError) as exc:
            await self.close()
            raise ConfigError(f"Redis refuses the url's user, password or database: {type(exc).__name__}.") from exc
        except _FAILURES as exc:
            log.warning("Redis cannot be reached yet (%s); what needs it fails until it can.", type(exc).__name__)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        client, self._client = self._client, None
        for refresh in self._refreshes:
            refresh.cancel()
        if self._refreshes:
            await asyncio.wait(self._refreshes, timeout=_CLOSE_S)
        self._copies.clear()
        if client is not None:
            await client.aclose()

    async def upsert(self, store: str, chunks: Sequence[Chunk]) -> None:
        if not chunks:
            return
        keys = self._keys(store)
        async with self._in_time():
            cells = await asyncio.to_thread(_chunks_to_cells, chunks)
            await self._write(UPSERT, keys, *cells)

    async def set_attributes(self, store: str, file: str, attributes: Mapping[str, AttributeValue]) -> None:
        keys, place = self._keys(store), file_to_place(file)
        async with self._in_time():
            last: Any = b""
            while last is not None:
                last = await self._write(SET_ATTRIBUTES, keys, place, last, PIECE, orjson.dumps(dict(attributes)))

    async def delete(self, store: str, file: str | None = None) -> None:
        keys = self._keys(store)
        async with self._in_time():
            if file is None:
                await self._do("UNLINK", *keys.all)  # all at once, and freed by another thread of Redis
                return
            while await self._write(DELETE, keys, file_to_place(file), PIECE) == PIECE:
                pass

    async def search_vector(self, search: Search, vector: Sequence[float]) -> list[ScoredChunk]:
        unit = vector_to_unit(vector)
        return await self._search(search, lambda: ByVector(search, unit))

    async def search_keywords(self, search: Search, text: str) -> list[ScoredChunk]:
        terms = query_to_terms(text)
        return await self._search(search, lambda: ByWords(search, terms))

    async def _search(self, search: Search, ranking: Callable[[], Ranking]) -> list[ScoredChunk]:
        """First by the copy at hand: where Redis says that nothing changed since, that was all."""
        store, keys = search.store, self._keys(search.store)
        async with self._in_time():
            copy, current = self._copies.get(store), False
            while True:
                hits = await asyncio.to_thread(_rank, ranking(), copy.pieces)
                head, texts = await self._look(keys, hits)
                same = head.generation == copy.generation and (current or head.stamp == copy.stamp)
                if same and None not in texts:
                    return _found(hits, texts)
                now = await self._current(store, keys)
                if now is None:
                    return await self._stream(keys, ranking)
                copy, current = now, True

    async def _current(self, store: str, keys: Keys) -> Copy | None:
        """The store as it was at a moment of this call; None where it is too large to keep. What a search that has no
        more time began to read is read to its end, for the next one."""
        lock = self._locks.setdefault(store, asyncio.Lock())
        await lock.acquire()
        refresh = asyncio.create_task(self._refresh(store, keys))
        self._refreshes.add(refresh)

        def end(_: object) -> None:
            self._refreshes.discard(refresh)
            lock.release()
            if not refresh.cancelled():
                refresh.exception()  # seen, whether or not anybody waits

        refresh.add_done_callback(end)
        await asyncio.wait((refresh,))
        if refresh.cancelled():
            raise StoreUnavailable(_CLOSED)
        return refresh.result()

    async def _refresh(self, store: str, keys: Keys) -> Copy | None:
        async with asyncio.timeout(_REFRESH_S):
            while True:
                copy = self._copies.get(store)
                head, _ = await self._look(keys, ())
                if head.generation is None or head.size_bytes > self._copies.most_bytes:
                    self._copies.put(store, Copy())
                    return Copy() if head.generation is None else None
                if copy.generation != head.generation:
                    copy = Copy(head.generation)
                try:
                    pages = [page async for page in self._pages(keys, copy, copy.tick or head.tick)]
                except _RemadeError:
                    self._copies.put(store, Copy())
                    continue
                copy = await asyncio.to_thread(copy.changed, pages)
                self._copies.put(store, copy)
                return copy

    async def _stream(self, keys: Keys, ranking: Callable[[], Ranking]) -> list[ScoredChunk]:
        """Search page by page in the store as it was at a moment of this call. Rows made since do not show; where
        others changed, all begins again."""
        while True:
            head, _ = await self._look(keys, ())
            if head.generation is None:
                return []
            ranked, nothing = ranking(), Copy(head.generation)
            try:
                for nth in range(ranked.passes):
                    async with aclosing(self._pages(keys, nothing, head.tick, until=head.tick)) as pages:
                        async for page in pages:
                            await asyncio.to_thread(_look_at_page, ranked, page, nth)
            except _RemadeError:
                continue
            hits = ranked.best()
            after, texts = await self._look(keys, hits)
            if after.generation == head.generation and after.touched <= head.tick:
                return _found(hits, texts)

    async def _pages(
        self, keys: Keys, known: Copy, gone_seen: int, *, until: int | str = "+inf"
    ) -> AsyncGenerator[Page]:
        """What the store has that is not `known`, until nothing is missing as of the last page."""
        seen = known.tick
        while True:
            base = known.generation or b"", known.stamp or b"", known.tick
            answer = await self._run(READ, keys.all, *base, seen, until, gone_seen, PAGE)
            if answer is None:
                raise _RemadeError
            page = Page.from_answer(answer)
            yield page
            if len(page.rows) < PAGE and len(page.gone) < PAGE:
                return
            seen, gone_seen = page.seen, page.gone_seen

    async def _look(self, keys: Keys, hits: Sequence[Hit]) -> tuple["_Head", list[bytes | None]]:
        fields, texts = await self._run(LOOK, (keys.head, keys.texts), *(hit.row for hit in hits))
        generation, stamp, tick, touched, size_bytes = fields
        return _Head(generation, stamp, int(tick or 0), int(touched or 0), int(size_bytes or 0)), texts

    def _keys(self, store: str) -> Keys:
        return store_to_keys(self._config.prefix, store)

    async def _write(self, script: str, keys: Keys, *values: Any) -> Any:
        return await self._run(script, keys.all, GONE, STAMPS, uuid4().hex, *values)

    async def _run(self, script: str, keys: Sequence[str], *values: Any) -> Any:
        return await self._do("EVAL", script, len(keys), *keys, *values)

    async def _do(self, *command: Any) -> Any:
        if self._client is None:
            raise StoreUnavailable(_CLOSED)
        try:
            return await self._client.execute_command(*command)
        except _FAILURES as exc:
            # By its kind alone: Redis's sentences may quote the command.
            raise StoreUnavailable(f"The vector index cannot do that now ({type(exc).__name__}).") from exc

    @asynccontextmanager
    async def _in_time(self) -> AsyncGenerator[None]:
        try:
            async with asyncio.timeout(self._config.timeout_s):
                yield
        except TimeoutError as exc:
            raise StoreUnavailable(f"The vector index did not answer in {self._config.timeout_s:g} s.") from exc


@dataclass(frozen=True, slots=True)
class _Head:
    """Of a store; no generation where there is none."""

    generation: bytes | None
    stamp: bytes | None
    tick: int
    touched: int
    size_bytes: int


class _RemadeError(Exception):
    """The store is another one, or does not remember what went since it was last read."""


def _url_to_client(config: Redis.Config) -> Any:
    """A client that has not connected yet. Raises ValueError for what is no url."""
    url, limits = (
        config.url.get_secret_value(),
        {
            "socket_timeout": config.timeout_s,
            "socket_connect_timeout": config.timeout_s,
            "health_check_interval": 15,
            # With them on, redis-py neither replaces a connection that the server has closed or that holds an answer
            # nobody read, nor keeps to the time-outs above.
            "maint_notifications_config": MaintNotificationsConfig(enabled=False),
        },
    )
    if config.cluster:
        # Once again, by the new map, when another node has taken over.
        return RedisCluster.from_url(url, retry=Retry(NoBackoff(), 1), **limits)
    pool: Any = BlockingConnectionPool.from_url(  # pyright: ignore[reportUnknownMemberType] - redis-py leaves kwargs untyped
        url, max_connections=_CONNECTIONS, timeout=config.timeout_s, retry=Retry(NoBackoff(), 0), **limits
    )
    return Client.from_pool(pool)


def _chunks_to_cells(chunks: Sequence[Chunk]) -> list[str | bytes]:
    """What is put at each place; of several chunks at one place, the last."""
    cells: dict[str, tuple[bytes, bytes, bytes]] = {}
    for chunk in chunks:
        place = f"{file_to_place(chunk.file)}/{chunk.number}"
        cells[place] = chunk_to_bytes(chunk), orjson.dumps(dict(chunk.attributes)), chunk.text.encode()
    return [cell for place, others in cells.items() for cell in (place, *others)]


def _rank(ranking: Ranking, pieces: Sequence[Piece]) -> list[Hit]:
    for nth in range(ranking.passes):
        for piece in pieces:
            ranking.look(piece, nth)
    return ranking.best()


def _look_at_page(ranking: Ranking, page: Page, nth: int) -> None:
    for piece in page_to_pieces(page):
        ranking.look(piece, nth)


def _found(hits: Sequence[Hit], texts: Sequence[bytes | None]) -> list[ScoredChunk]:
    return [
        ScoredChunk(hit.file, hit.number, (text or b"").decode(), dict(hit.attributes), hit.score)
        for hit, text in zip(hits, texts, strict=True)
    ]
