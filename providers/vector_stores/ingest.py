"""Ingest: makes the files of vector stores searchable in the background, in any process of the stack."""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from time import monotonic
from typing import Final

from apis.accounts.accounts import Accounts
from apis.documents.embeddings import EmbeddingRequest, Embeddings
from apis.documents.reader import Reader, UnreadableFile
from apis.documents.vector_index import Chunk, VectorIndex
from apis.errors import NotFound, RateLimited, StackError, StorageCorrupt, StoreUnavailable
from apis.fair_share import FairShare, Place
from apis.inference import Inference
from apis.storage.kv_store import ABSENT, Delete, Entry, KVStore, Put
from apis.storage.lease import Lease, LeaseLost
from apis.storage.records import decode_record, encode_record, scan_groups
from apis.ticks import wait_for_tick
from providers.common.state.change import repeat_until_true
from providers.common.state.scan import decode_or_skip
from providers.common.state.worker_signs import WorkerSign
from providers.common.supervision import supervise
from providers.vector_stores import records
from providers.vector_stores.embedding_charges import charging_embeddings
from providers.vector_stores.records import JOB_PREFIX, LEASE_PREFIX, FileRecord, FileRef, JobRecord, StoreRecord

log = logging.getLogger(__name__)

_EMBED_BATCH_SIZE: Final = 32
_MAX_LOST_WORKERS: Final = 3
"""Workers that may be lost over one file. Each is stored before it begins and removed where it ends in order: the
others have ended with their process, or were too slow for their lease."""
_MAX_ATTEMPTS: Final = 10
"""Attempts at one file that may end out of order, though their workers live."""
_DAMAGED_JOB: Final = JobRecord(1, ["unknown"])
_MAX_PARALLEL_JOBS: Final = 2
_JOBS_PER_LOOK: Final = 64
"""Jobs of each tenant that one look at the store reads. More than other processes can have claimed of it."""
_STOP_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class IngestSettings:
    """Seconds after which another process takes over the file of a dead one, largest text of a file, and whether a
    tenant may use only half of the places from the first file on."""

    lease_s: float
    max_chars: int
    several_tenants: bool = False


class IngestWorker:
    """Claims files that are in progress, including those that a stopped process had begun. Tenants take turns.

    A job is claimed by a lease, renewed while the work goes on; when a process dies, another one takes the job when the
    lease has expired. A job starts from the beginning each time, and running it twice gives the same.
    """

    def __init__(
        self,
        kv: KVStore,
        reader: Reader,
        index: VectorIndex,
        inference: Inference,
        settings: IngestSettings,
        accounts: Accounts | None,
    ) -> None:
        self._kv = kv
        self._reader = reader
        self._index = index
        self._inference = inference
        self._accounts = accounts
        self._lease_s = settings.lease_s
        self._sign = WorkerSign(kv, settings.lease_s)
        self._max_chars = settings.max_chars
        self._places = FairShare(
            "files to be made searchable", _MAX_PARALLEL_JOBS, several_tenants=settings.several_tenants
        )
        self._last_turns: dict[str, int] = {}
        self._limited_until: dict[str, float] = {}
        self._wake_event = asyncio.Event()
        self._running_tasks: dict[str, asyncio.Task[None]] = {}
        self._poll_task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look for jobs."""
        self._sign.start()
        self._poll_task = supervise("the watcher of files to be made searchable", self._poll_jobs)

    async def close(self) -> None:
        """Stop, and release unfinished jobs so that another process can claim them at once."""
        await _cancel_tasks([*self._running_tasks.values(), *([self._poll_task] if self._poll_task else [])])
        await self._sign.close()

    def wake(self) -> None:
        """Look for new jobs now."""
        self._wake_event.set()

    async def stop_files(self, file_refs: Sequence[FileRef]) -> None:
        """Stop the jobs of these files that run in this process."""
        await _cancel_tasks([task for ref in file_refs if (task := self._running_tasks.get(str(ref)))])

    async def _poll_jobs(self) -> None:
        while True:
            self._wake_event.clear()
            try:
                await self._claim_jobs()
            except StoreUnavailable as exc:
                log.warning("Files wait to be made searchable: %s", exc.message)
            await wait_for_tick(self._wake_event, self._lease_s)

    async def _claim_jobs(self) -> None:
        """Start jobs up to the limit. The rest is looked at when one of these ends, or a lease later."""
        if self._places.used >= _MAX_PARALLEL_JOBS:
            return
        async with aclosing(scan_groups(self._kv, JOB_PREFIX, limit=_JOBS_PER_LOOK)) as groups:
            waiting = {tenant: deque(rows) async for tenant, rows in groups}
        self._limited_until = {name: end for name, end in self._limited_until.items() if end > monotonic()}
        for tenant in self._limited_until.keys() & waiting.keys():
            del waiting[tenant]
        self._last_turns = {tenant: turn for tenant, turn in self._last_turns.items() if tenant in waiting}
        while waiting:
            tenant = min(waiting, key=lambda name: (self._places.used_by(name), self._last_turns.get(name, 0)))
            place = self._places.try_acquire(tenant)
            if place is None or not await self._claim_job(waiting[tenant], place):
                del waiting[tenant]

    async def _claim_job(self, rows: deque[tuple[str, Entry]], place: Place) -> bool:
        """Start the tenant's first job that no process has; return False, and release the place, where there is
        none."""
        try:
            while rows:
                key, entry = rows.popleft()
                name = key.removeprefix(JOB_PREFIX)
                if name in self._running_tasks or not await self._can_run(FileRef(*name.split("/"))):
                    continue
                job = self._read_job(key, entry).next_attempt(self._sign.name)
                lease = Lease(self._kv, LEASE_PREFIX + name, self._lease_s)
                claim = [Put(key, encode_record(job), expect=entry.version)]
                if await lease.acquire(claim, durable=True) is not None:
                    self._start_job(name, job, lease, place)
                    return True
        except BaseException:
            place.release()
            raise
        place.release()
        return False

    def _read_job(self, key: str, entry: Entry) -> JobRecord:
        """Return the job; a damaged record counts as one lost worker, and is replaced by the claim."""
        return decode_or_skip(self._kv, key, entry, JobRecord) or _DAMAGED_JOB

    async def _can_run(self, file_ref: FileRef) -> bool:
        """Return True unless the chunks of the file's store are in the index of another machine, or a record that the
        job needs is damaged: then it waits until its owner deletes the file or the store."""
        store_key, file_key = records.store_key(file_ref.tenant, file_ref.store_id), file_ref.record_key
        store_entry, file_entry = await self._kv.get_many([store_key, file_key])
        if file_entry is not None and decode_or_skip(self._kv, file_key, file_entry, FileRecord) is None:
            return False
        if store_entry is None:
            return True  # the job removes what is left of the file
        store = decode_or_skip(self._kv, store_key, store_entry, StoreRecord)
        return store is not None and store.index_id == await self._index.identity()

    def _start_job(self, name: str, job: JobRecord, lease: Lease, place: Place) -> None:
        task = asyncio.create_task(self._run_job(FileRef(*name.split("/")), job, lease))
        self._running_tasks[name] = task
        self._last_turns[place.tenant] = max(self._last_turns.values(), default=0) + 1
        task.add_done_callback(lambda _: place.release())
        task.add_done_callback(lambda ended: self._on_task_done(name, ended))

    def _on_task_done(self, name: str, task: asyncio.Task[None]) -> None:
        del self._running_tasks[name]
        if not task.cancelled():
            if isinstance(exc := task.exception(), StackError):
                log.warning("A file waits to be made searchable: %s", exc.message)
                return  # the store or the index is in trouble: the next attempt waits until the lease has expired
            if exc is not None:
                log.error("Making a file searchable failed on a bug", exc_info=exc)
        self._wake_event.set()

    async def _run_job(self, file_ref: FileRef, job: JobRecord, lease: Lease) -> None:
        try:
            async with lease.renew_in_background():
                await self._ingest_file(file_ref, job, lease)
        except LeaseLost:
            log.warning("Another worker makes the file %s searchable now", file_ref.file_id)
        except asyncio.CancelledError:
            # This process stops, or the file was removed: neither counts as a lost worker.
            await self._leave_job(file_ref, job, lease, release=True)
            raise
        except StackError as exc:
            # The store or the index is in trouble, or a limit of the tenant is reached, which says nothing of the file.
            # The lease delays the next attempt.
            if isinstance(exc, RateLimited):
                self._limited_until[file_ref.tenant] = monotonic() + self._lease_s
            await self._leave_job(file_ref, job, lease, release=False)
            raise

    async def _leave_job(self, file_ref: FileRef, job: JobRecord, lease: Lease, *, release: bool) -> None:
        with suppress(StackError, LeaseLost, TimeoutError):
            async with asyncio.timeout(_STOP_TIMEOUT_S / 2):
                entry = await self._kv.get(file_ref.job_key)
                job_json = encode_record(job.undo_attempt())
                ops = [] if entry is None else [Put(file_ref.job_key, job_json, expect=entry.version)]
                if not release:
                    await lease.write(ops)
                elif not await lease.release(ops):
                    await lease.release()

    async def _ingest_file(self, file_ref: FileRef, job: JobRecord, lease: Lease) -> None:
        entries = await self._kv.get_many([records.store_key(file_ref.tenant, file_ref.store_id), file_ref.record_key])
        store, entry = entries
        if store is None or entry is None:
            return await self._delete_orphan(file_ref, lease, is_store_absent=store is None)
        record = decode_record(entry, FileRecord)
        if record.status != "in_progress":
            await lease.release([Delete(file_ref.job_key)])
            return None
        try:
            await self._refuse_poison(job)
            usage_bytes = await self._index_file(file_ref, decode_record(store, StoreRecord), record, lease)
            outcome = records.build_outcome(record, "completed", usage_bytes=usage_bytes)
        except UnreadableFile as exc:
            lease.check()
            await self._index.delete(file_ref.index_namespace, file_ref.file_id)
            outcome = records.build_outcome(record, "failed", error=(exc.reason, exc.message))
        return await self._write_outcome(file_ref, record, outcome, lease)

    async def _refuse_poison(self, job: JobRecord) -> None:
        """Raise UnreadableFile for a file that has cost too many workers; those that live are found out first."""
        *lost, present = job.workers
        if len(lost) > _MAX_LOST_WORKERS:
            lost = await self._sign.list_ended(lost)
            job.workers = [*lost, present]
        if len(lost) > _MAX_LOST_WORKERS:
            message = f"{len(lost)} servers stopped while they processed the file. It is not tried again."
            raise UnreadableFile("server_error", message)
        if job.attempts > _MAX_ATTEMPTS:
            message = f"{_MAX_ATTEMPTS} attempts to process the file have failed. It is not tried again."
            raise UnreadableFile("server_error", message)

    async def _index_file(self, file_ref: FileRef, store: StoreRecord, record: FileRecord, lease: Lease) -> int:
        """Read, chunk, embed and index the file. Returns the size of the text and vectors in bytes. Raises
        UnreadableFile, RateLimited where a limit of the tenant is reached, and LeaseLost before it would write to the
        index."""
        try:
            document = await self._reader.load_upload(file_ref.file_id, tenant=file_ref.tenant)
        except NotFound:
            raise UnreadableFile("invalid_file", "The file was deleted, or has expired.") from None
        except StorageCorrupt as exc:
            raise UnreadableFile("server_error", f"The file is damaged: {exc.message}") from exc
        chunked_text = await self._reader.extract_chunks(
            replace(document, name=record.filename),
            self._max_chars,
            max_tokens=record.max_tokens,
            overlap_tokens=record.overlap_tokens,
            tenant=file_ref.tenant,
        )
        chunks, usage_bytes = chunked_text.chunks, sum(len(text.encode()) for text in chunked_text.chunks)
        async with charging_embeddings(
            self._accounts, self._inference, file_ref.tenant, store.model, usage_bytes
        ) as embedded:
            lease.check()
            await self._index.delete(file_ref.index_namespace, file_ref.file_id)
            await records.store_text(self._kv, file_ref, chunked_text.text)
            for start in range(0, len(chunks), _EMBED_BATCH_SIZE):
                texts = chunks[start : start + _EMBED_BATCH_SIZE]
                embeddings = await self._embed_texts(store, texts, file_ref.tenant)
                embedded.count += embeddings.input_tokens
                numbered = enumerate(zip(texts, embeddings.vectors, strict=True), start=start)
                lease.check()
                await self._index.upsert(
                    file_ref.index_namespace,
                    [Chunk(file_ref.file_id, n, text, record.attributes, vector) for n, (text, vector) in numbered],
                )
                usage_bytes += sum(4 * len(vector) for vector in embeddings.vectors)
        return usage_bytes

    async def _embed_texts(self, store: StoreRecord, texts: Sequence[str], tenant: str) -> Embeddings:
        request = EmbeddingRequest(model=store.model, input=list(texts), dimensions=store.dimensions)
        try:
            return await self._inference.embed(request, tenant=tenant)
        except StackError as exc:
            log.warning("A file could not be embedded: %s", exc.message)
            raise UnreadableFile("server_error", f"The embedding model failed: {exc.message}") from exc

    async def _write_outcome(self, file_ref: FileRef, record: FileRecord, outcome: FileRecord, lease: Lease) -> None:
        """Store the outcome, unless the file was removed, added again or cancelled in the meantime. Raises
        LeaseLost."""

        async def attempt() -> bool:
            lease.check()
            try:
                store, store_version, [(stored, version)] = await records.load_store_and_files(
                    self._kv, file_ref.tenant, file_ref.store_id, [file_ref.file_id]
                )
            except NotFound:
                await self._delete_orphan(file_ref, lease, is_store_absent=True)
                return True
            if version == ABSENT:
                await self._delete_orphan(file_ref, lease, is_store_absent=False)
                return True
            if stored is None:
                raise StorageCorrupt
            if stored.generation != record.generation or stored.status != "in_progress":
                if stored.status == "cancelled":
                    await self._index.delete(file_ref.index_namespace, file_ref.file_id)
                    await records.delete_text(self._kv, file_ref)
                await lease.release()
                return True
            if stored.attributes != record.attributes:
                await self._index.set_attributes(file_ref.index_namespace, file_ref.file_id, stored.attributes)
            new = records.build_outcome(stored, outcome.status, error=outcome.error, usage_bytes=outcome.usage_bytes)
            store.count_file(stored, new)
            ops = [
                Put(file_ref.record_key, encode_record(new), expect=version),
                *records.build_store_ops(file_ref.tenant, file_ref.store_id, store, store_version),
            ]
            return await lease.release([*ops, Delete(file_ref.job_key)])

        await repeat_until_true(attempt)

    async def _delete_orphan(self, file_ref: FileRef, lease: Lease, *, is_store_absent: bool) -> None:
        """Delete what was made of a file that its store, or its owner, no longer has."""
        lease.check()
        await self._index.delete(file_ref.index_namespace, file_ref.file_id)
        await records.delete_text(self._kv, file_ref)
        store_key = records.store_key(file_ref.tenant, file_ref.store_id)
        ops = records.build_orphan_ops(file_ref, store_key if is_store_absent else file_ref.record_key)
        if not await lease.release(ops):
            await lease.release()  # the file was added again meanwhile


async def _cancel_tasks(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_STOP_TIMEOUT_S)
