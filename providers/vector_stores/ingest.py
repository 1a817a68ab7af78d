"""Ingest: makes added files searchable in the background, whichever process of the stack gets to them first."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from apis.embeddings import EmbeddingRequest
from apis.errors import NotFound, StackError, StoreUnavailable
from apis.inference import Inference
from apis.reader import Reader, Unreadable
from apis.storage.kv_store import ABSENT, Delete, KVStore, Op, Put
from apis.vector_index import Chunk, VectorIndex
from providers.vector_stores import records as shelves
from providers.vector_stores.chunks import text_to_chunks
from providers.vector_stores.records import CLAIM, WORK, Place, Store, StoreFile, Work

log = logging.getLogger(__name__)

_EMBEDDED_AT_ONCE: Final = 32
_MAX_ATTEMPTS: Final = 4
_END_S: Final = 5.0


class Ingest:
    """Takes up whatever is in progress, also what an earlier process left, `parallel` files at a time.

    A file is claimed for `lease_s`, again and again while its work goes on: when a process dies, another takes the
    file up that much later. Work is done over from the start, and done twice it gives the same.
    """

    def __init__(
        self,
        kv: KVStore,
        reader: Reader,
        index: VectorIndex,
        inference: Inference,
        *,
        lease_s: float,
        max_chars: int,
    ) -> None:
        self._kv = kv
        self._reader = reader
        self._index = index
        self._inference = inference
        self._lease_s = lease_s
        self._max_chars = max_chars
        self._parallel = 2
        self._wake = asyncio.Event()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look for work."""
        self._looking = asyncio.create_task(self._look())

    async def close(self) -> None:
        """Stop; what is not done is left for the next process, at once."""
        tasks = [*self._running.values(), *([self._looking] if self._looking else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_END_S)

    def wake(self) -> None:
        """There is new work."""
        self._wake.set()

    async def stop(self, places: Sequence[Place]) -> None:
        """End the work on these files, as far as it is done in this process."""
        tasks = [task for place in places if (task := self._running.get(str(place)))]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_END_S)

    async def _look(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self._begin_all()
            except StoreUnavailable as exc:
                log.warning("Files wait to be made searchable: %s", exc.message)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._lease_s):
                    await self._wake.wait()

    async def _begin_all(self) -> None:
        """Begin what can be begun now. What is left is looked at when one of these ends, or a lease later."""
        async for key, entry in shelves.scan(self._kv, WORK):
            name = key.removeprefix(WORK)
            if len(self._running) >= self._parallel:
                return
            if name in self._running:
                continue
            work = shelves.decode(entry, Work)
            claim: list[Op] = [
                Put(CLAIM + name, b"", self._lease_s, ABSENT),
                Put(key, shelves.encode(Work(work.attempts + 1)), expect=entry.version),
            ]
            if await self._kv.write(claim) is not None:
                task = asyncio.create_task(self._do(Place(*name.split("/")), work.attempts + 1))
                self._running[name] = task
                task.add_done_callback(lambda ended, name=name: self._ended(name, ended))

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        del self._running[name]
        if not task.cancelled():
            if isinstance(exc := task.exception(), StackError):
                log.warning("A file waits to be made searchable: %s", exc.message)
                return  # with the store as it is, at once would be too soon
            if exc is not None:
                log.error("Making a file searchable failed on a bug", exc_info=exc)
        self._wake.set()

    async def _do(self, place: Place, attempts: int) -> None:
        beating = asyncio.create_task(self._beat(place))
        try:
            await self._ingest(place, attempts)
        except asyncio.CancelledError:
            # Ours at the end, or because the file is taken out: neither is its fault.
            await self._release(place, attempts - 1)
            raise
        finally:
            beating.cancel()

    async def _beat(self, place: Place) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            with suppress(StoreUnavailable):
                await self._kv.write([Put(f"{CLAIM}{place}", b"", self._lease_s)], durable=False)

    async def _release(self, place: Place, attempts: int) -> None:
        with suppress(StackError, TimeoutError):
            async with asyncio.timeout(_END_S / 2):
                if (entry := await self._kv.get(f"{WORK}{place}")) is not None:
                    again = Put(f"{WORK}{place}", shelves.encode(Work(attempts)), expect=entry.version)
                    await self._kv.write([again])
                await self._kv.write([Delete(f"{CLAIM}{place}")])

    async def _ingest(self, place: Place, attempts: int) -> None:
        entries = await self._kv.get_many([shelves.store_key(place.tenant, place.store), place.record])
        store, record = entries
        if store is None or record is None:
            return await self._forget(place)
        known = shelves.decode(record, StoreFile)
        if known.status != "in_progress":
            await self._kv.write([Delete(f"{WORK}{place}"), Delete(f"{CLAIM}{place}")])
            return None
        try:
            if attempts > _MAX_ATTEMPTS:
                raise Unreadable("server_error", "The file could not be processed. Add it again.")
            usage_bytes = await self._index_file(place, shelves.decode(store, Store), known)
        except Unreadable as exc:
            await self._index.delete(place.shelf, place.file)
            return await self._settle(place, known, shelves.settled(known, "failed", error=(exc.reason, exc.message)))
        return await self._settle(place, known, shelves.settled(known, "completed", usage_bytes=usage_bytes))

    async def _index_file(self, place: Place, store: Store, record: StoreFile) -> int:
        """Read, cut, embed and index. Returns the bytes that takes up. Raises Unreadable."""
        try:
            document = await self._reader.uploaded(place.file, tenant=place.tenant)
        except NotFound:
            raise Unreadable("invalid_file", "The file was deleted, or has expired.") from None
        text = await self._reader.text(replace(document, name=record.name), self._max_chars)
        chunks = await asyncio.to_thread(lambda: list(text_to_chunks(text, record.max_tokens, record.overlap_tokens)))
        await self._index.delete(place.shelf, place.file)
        await shelves.keep_text(self._kv, place, text)
        usage_bytes = 0
        for start in range(0, len(chunks), _EMBEDDED_AT_ONCE):
            some = chunks[start : start + _EMBEDDED_AT_ONCE]
            vectors = await self._embed(store, some)
            numbered = enumerate(zip(some, vectors, strict=True), start=start)
            await self._index.upsert(
                place.shelf, [Chunk(place.file, n, words, record.attributes, vector) for n, (words, vector) in numbered]
            )
            usage_bytes += sum(len(words.encode()) + 4 * len(v) for words, v in zip(some, vectors, strict=True))
        return usage_bytes

    async def _embed(self, store: Store, texts: list[str]) -> Sequence[Sequence[float]]:
        request = EmbeddingRequest(model=store.model, input=texts, dimensions=store.dimensions)
        try:
            return (await self._inference.embed(request)).vectors
        except StackError as exc:
            log.warning("A file could not be embedded: %s", exc.message)
            raise Unreadable("server_error", f"The embedding model failed: {exc.message}") from exc

    async def _settle(self, place: Place, known: StoreFile, outcome: StoreFile) -> None:
        """Write the outcome, unless the file was taken out, added anew or stopped meanwhile."""
        while True:
            entry = await self._kv.get(place.record)
            if entry is None:
                return await self._forget(place)
            now = shelves.decode(entry, StoreFile)
            if now.round != known.round or now.status != "in_progress":
                if now.status == "cancelled":
                    await self._index.delete(place.shelf, place.file)
                    await shelves.drop_text(self._kv, place)
                await self._kv.write([Delete(f"{CLAIM}{place}")])
                return None
            if now.attributes != known.attributes:
                await self._index.set_attributes(place.shelf, place.file, now.attributes)
                known = now
                outcome = shelves.settled(now, outcome.status, error=outcome.error, usage_bytes=outcome.usage_bytes)
            ops: list[Op] = [
                Put(place.record, shelves.encode(outcome), expect=entry.version),
                *(Delete(f"{WORK}{place}"), Delete(f"{CLAIM}{place}")),
            ]
            if await self._kv.write(ops) is not None:
                return None

    async def _forget(self, place: Place) -> None:
        await self._index.delete(place.shelf, place.file)
        await shelves.drop_text(self._kv, place)
        await self._kv.write([*shelves.file_ops(place), Delete(f"{CLAIM}{place}")])
