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
from apis.reader import Reader, UnreadableFile
from apis.storage.kv_store import ABSENT, Delete, KVStore, Op, Put
from apis.vector_index import Chunk, VectorIndex
from providers.vector_stores import records as shelves
from providers.vector_stores.chunks import text_to_chunks
from providers.vector_stores.records import JOB_PREFIX, LEASE_PREFIX, FileRecord, FileRef, JobRecord, StoreRecord

log = logging.getLogger(__name__)

_EMBED_BATCH_SIZE: Final = 32
_MAX_ATTEMPTS: Final = 4
_STOP_TIMEOUT_S: Final = 5.0


class IngestWorker:
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
        self._max_parallel = 2
        self._wake_event = asyncio.Event()
        self._running_tasks: dict[str, asyncio.Task[None]] = {}
        self._poll_task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look for work."""
        self._poll_task = asyncio.create_task(self._poll_jobs())

    async def close(self) -> None:
        """Stop; what is not done is left for the next process, at once."""
        tasks = [*self._running_tasks.values(), *([self._poll_task] if self._poll_task else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_STOP_TIMEOUT_S)

    def wake(self) -> None:
        """There is new work."""
        self._wake_event.set()

    async def stop_files(self, file_refs: Sequence[FileRef]) -> None:
        """End the work on these files, as far as it is done in this process."""
        tasks = [task for place in file_refs if (task := self._running_tasks.get(str(place)))]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_STOP_TIMEOUT_S)

    async def _poll_jobs(self) -> None:
        while True:
            self._wake_event.clear()
            try:
                await self._claim_jobs()
            except StoreUnavailable as exc:
                log.warning("Files wait to be made searchable: %s", exc.message)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._lease_s):
                    await self._wake_event.wait()

    async def _claim_jobs(self) -> None:
        """Begin what can be begun now. What is left is looked at when one of these ends, or a lease later."""
        async for key, entry in shelves.scan(self._kv, JOB_PREFIX):
            name = key.removeprefix(JOB_PREFIX)
            if len(self._running_tasks) >= self._max_parallel:
                return
            if name in self._running_tasks:
                continue
            work = shelves.decode_record(entry, JobRecord)
            claim: list[Op] = [
                Put(LEASE_PREFIX + name, b"", self._lease_s, ABSENT),
                Put(key, shelves.encode_record(JobRecord(work.attempts + 1)), expect=entry.version),
            ]
            if await self._kv.write(claim) is not None:
                task = asyncio.create_task(self._run_job(FileRef(*name.split("/")), work.attempts + 1))
                self._running_tasks[name] = task
                task.add_done_callback(lambda ended, name=name: self._on_task_done(name, ended))

    def _on_task_done(self, name: str, task: asyncio.Task[None]) -> None:
        del self._running_tasks[name]
        if not task.cancelled():
            if isinstance(exc := task.exception(), StackError):
                log.warning("A file waits to be made searchable: %s", exc.message)
                return  # with the store as it is, at once would be too soon
            if exc is not None:
                log.error("Making a file searchable failed on a bug", exc_info=exc)
        self._wake_event.set()

    async def _run_job(self, file_ref: FileRef, attempts: int) -> None:
        beating = asyncio.create_task(self._renew_lease(file_ref))
        try:
            await self._ingest_file(file_ref, attempts)
        except asyncio.CancelledError:
            # Ours at the end, or because the file is taken out: neither is its fault.
            await self._release_job(file_ref, attempts - 1)
            raise
        finally:
            beating.cancel()

    async def _renew_lease(self, file_ref: FileRef) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            with suppress(StoreUnavailable):
                await self._kv.write([Put(f"{LEASE_PREFIX}{file_ref}", b"", self._lease_s)], durable=False)

    async def _release_job(self, file_ref: FileRef, attempts: int) -> None:
        with suppress(StackError, TimeoutError):
            async with asyncio.timeout(_STOP_TIMEOUT_S / 2):
                if (entry := await self._kv.get(f"{JOB_PREFIX}{file_ref}")) is not None:
                    again = Put(
                        f"{JOB_PREFIX}{file_ref}", shelves.encode_record(JobRecord(attempts)), expect=entry.version
                    )
                    await self._kv.write([again])
                await self._kv.write([Delete(f"{LEASE_PREFIX}{file_ref}")])

    async def _ingest_file(self, file_ref: FileRef, attempts: int) -> None:
        entries = await self._kv.get_many([shelves.store_key(file_ref.tenant, file_ref.store_id), file_ref.record_key])
        store, record = entries
        if store is None or record is None:
            return await self._delete_file(file_ref)
        known = shelves.decode_record(record, FileRecord)
        if known.status != "in_progress":
            await self._kv.write([Delete(f"{JOB_PREFIX}{file_ref}"), Delete(f"{LEASE_PREFIX}{file_ref}")])
            return None
        try:
            if attempts > _MAX_ATTEMPTS:
                raise UnreadableFile("server_error", "The file could not be processed. Add it again.")
            usage_bytes = await self._index_file(file_ref, shelves.decode_record(store, StoreRecord), known)
        except UnreadableFile as exc:
            await self._index.delete(file_ref.index_namespace, file_ref.file_id)
            return await self._write_outcome(
                file_ref, known, shelves.build_outcome(known, "failed", error=(exc.reason, exc.message))
            )
        return await self._write_outcome(
            file_ref, known, shelves.build_outcome(known, "completed", usage_bytes=usage_bytes)
        )

    async def _index_file(self, file_ref: FileRef, store: StoreRecord, record: FileRecord) -> int:
        """Read, cut, embed and index. Returns the bytes that takes up. Raises Unreadable."""
        try:
            document = await self._reader.load_upload(file_ref.file_id, tenant=file_ref.tenant)
        except NotFound:
            raise UnreadableFile("invalid_file", "The file was deleted, or has expired.") from None
        text = await self._reader.extract_text(replace(document, name=record.filename), self._max_chars)
        chunks = await asyncio.to_thread(lambda: list(text_to_chunks(text, record.max_tokens, record.overlap_tokens)))
        await self._index.delete(file_ref.index_namespace, file_ref.file_id)
        await shelves.store_text(self._kv, file_ref, text)
        usage_bytes = 0
        for start in range(0, len(chunks), _EMBED_BATCH_SIZE):
            some = chunks[start : start + _EMBED_BATCH_SIZE]
            vectors = await self._embed_texts(store, some)
            numbered = enumerate(zip(some, vectors, strict=True), start=start)
            await self._index.upsert(
                file_ref.index_namespace,
                [Chunk(file_ref.file_id, n, words, record.attributes, vector) for n, (words, vector) in numbered],
            )
            usage_bytes += sum(len(words.encode()) + 4 * len(v) for words, v in zip(some, vectors, strict=True))
        return usage_bytes

    async def _embed_texts(self, store: StoreRecord, texts: list[str]) -> Sequence[Sequence[float]]:
        request = EmbeddingRequest(model=store.model, input=texts, dimensions=store.dimensions)
        try:
            return (await self._inference.embed(request)).vectors
        except StackError as exc:
            log.warning("A file could not be embedded: %s", exc.message)
            raise UnreadableFile("server_error", f"The embedding model failed: {exc.message}") from exc

    async def _write_outcome(self, file_ref: FileRef, record: FileRecord, outcome: FileRecord) -> None:
        """Write the outcome, unless the file was taken out, added anew or stopped meanwhile."""
        while True:
            entry = await self._kv.get(file_ref.record_key)
            if entry is None:
                return await self._delete_file(file_ref)
            now = shelves.decode_record(entry, FileRecord)
            if now.generation != record.generation or now.status != "in_progress":
                if now.status == "cancelled":
                    await self._index.delete(file_ref.index_namespace, file_ref.file_id)
                    await shelves.delete_text(self._kv, file_ref)
                await self._kv.write([Delete(f"{LEASE_PREFIX}{file_ref}")])
                return None
            if now.attributes != record.attributes:
                await self._index.set_attributes(file_ref.index_namespace, file_ref.file_id, now.attributes)
                record = now
                outcome = shelves.build_outcome(
                    now, outcome.status, error=outcome.error, usage_bytes=outcome.usage_bytes
                )
            ops: list[Op] = [
                Put(file_ref.record_key, shelves.encode_record(outcome), expect=entry.version),
                *(Delete(f"{JOB_PREFIX}{file_ref}"), Delete(f"{LEASE_PREFIX}{file_ref}")),
            ]
            if await self._kv.write(ops) is not None:
                return None

    async def _delete_file(self, file_ref: FileRef) -> None:
        await self._index.delete(file_ref.index_namespace, file_ref.file_id)
        await shelves.delete_text(self._kv, file_ref)
        await self._kv.write([*shelves.build_remove_ops(file_ref), Delete(f"{LEASE_PREFIX}{file_ref}")])
