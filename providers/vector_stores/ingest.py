"""Ingest: makes the files of vector stores searchable in the background, in any process of the stack."""

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from time import monotonic
from typing import Final

from apis.accounts.accounts import Accounts
from apis.documents.embeddings import EmbeddingRequest, Embeddings
from apis.documents.reader import Reader, UnreadableFile
from apis.documents.vector_index import Chunk, VectorIndex
from apis.errors import NotFound, RateLimited, StackError, StorageCorrupt
from apis.fair_share import FairShare
from apis.inference import Inference
from apis.storage.kv_store import ABSENT, Delete, KVStore, Put
from apis.storage.lease import Lease
from apis.storage.records import decode_record, encode_record, scan_groups
from providers.common.jobs import MAX_UNRETURNED, Claim, Job, JobQueue, JobRecord
from providers.common.state.change import repeat_until_true
from providers.common.state.scan import decode_or_skip
from providers.vector_stores import records
from providers.vector_stores.embedding_charges import charging_embeddings
from providers.vector_stores.records import JOB_PREFIX, FileRecord, FileRef, StoreRecord

log = logging.getLogger(__name__)

_EMBED_BATCH_SIZE: Final = 32
_MAX_PARALLEL_JOBS: Final = 2
_JOBS_PER_LOOK: Final = 64
"""Jobs of each tenant that one look at the store reads. More than other processes can have claimed of it."""


@dataclass(frozen=True, slots=True)
class IngestSettings:
    """Seconds after which another process takes over the file of a dead one, largest text of a file, and whether a
    tenant may use only half of the places from the first file on."""

    lease_s: float
    max_chars: int
    several_tenants: bool = False


class IngestQueue(JobQueue[FileRef, JobRecord]):
    """Files that are in progress, including those that a stopped process had begun. A job starts from the beginning
    each time, and running it twice gives the same."""

    title = "files to be made searchable"
    max_lost_workers = 4

    def __init__(
        self,
        kv: KVStore,
        reader: Reader,
        index: VectorIndex,
        inference: Inference,
        settings: IngestSettings,
        accounts: Accounts | None,
    ) -> None:
        places = FairShare(self.title, _MAX_PARALLEL_JOBS, several_tenants=settings.several_tenants)
        super().__init__(kv, JobRecord, places, retry_s=settings.lease_s)
        self._reader = reader
        self._index = index
        self._inference = inference
        self._accounts = accounts
        self._lease_s = settings.lease_s
        self._max_chars = settings.max_chars
        self._limited_until: dict[str, float] = {}

    async def list_waiting(self) -> AsyncGenerator[Job[FileRef]]:
        self._limited_until = {name: end for name, end in self._limited_until.items() if end > monotonic()}
        async with aclosing(scan_groups(self.kv, JOB_PREFIX, limit=_JOBS_PER_LOOK)) as groups:
            async for tenant, rows in groups:
                if tenant not in self._limited_until:
                    for key, entry in rows:
                        file_ref = FileRef(*key.removeprefix(JOB_PREFIX).split("/"))
                        yield Job(tenant, file_ref, file_ref.lease_key, self._lease_s, key, entry)

    async def read_record(self, job: Job[FileRef]) -> JobRecord | None:
        return await super().read_record(job) if await self._can_run(job.subject) else None

    async def _can_run(self, file_ref: FileRef) -> bool:
        """Return True unless the chunks of the file's store are in the index of another machine, or a record that the
        job needs is damaged: then it waits until its owner deletes the file or the store."""
        store_key, file_key = records.store_key(file_ref.tenant, file_ref.store_id), file_ref.record_key
        store_entry, file_entry = await self.kv.get_many([store_key, file_key])
        if file_entry is not None and decode_or_skip(self.kv, file_key, file_entry, FileRecord) is None:
            return False
        if store_entry is None:
            return True  # the job removes what is left of the file
        store = decode_or_skip(self.kv, store_key, store_entry, StoreRecord)
        return store is not None and store.index_id == await self._index.identity()

    async def run(self, claim: Claim[FileRef, JobRecord]) -> None:
        try:
            await self._ingest_file(claim.subject, claim.lease)
        except RateLimited:
            self._limited_until[claim.job.tenant] = monotonic() + self._lease_s
            raise

    async def fail(self, claim: Claim[FileRef, JobRecord], lost_workers: int) -> None:
        message = (
            f"{lost_workers} servers stopped while they processed the file."
            if lost_workers
            else f"{MAX_UNRETURNED} attempts to process the file have failed."
        )
        await self._ingest_file(claim.subject, claim.lease, failure=f"{message} It is not tried again.")

    async def _ingest_file(self, file_ref: FileRef, lease: Lease, failure: str = "") -> None:
        """Make the file searchable, or let it fail for `failure`."""
        entries = await self.kv.get_many([records.store_key(file_ref.tenant, file_ref.store_id), file_ref.record_key])
        store, entry = entries
        if store is None or entry is None:
            return await self._delete_orphan(file_ref, lease, is_store_absent=store is None)
        record = decode_record(entry, FileRecord)
        if record.status != "in_progress":
            await lease.release([Delete(file_ref.job_key)])
            return None
        try:
            if failure:
                raise UnreadableFile("server_error", failure)
            usage_bytes = await self._index_file(file_ref, decode_record(store, StoreRecord), record, lease)
            outcome = records.build_outcome(record, "completed", usage_bytes=usage_bytes)
        except UnreadableFile as exc:
            lease.check()
            await self._index.delete(file_ref.index_namespace, file_ref.file_id)
            outcome = records.build_outcome(record, "failed", error=(exc.reason, exc.message))
        return await self._write_outcome(file_ref, record, outcome, lease)

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
            await records.store_text(self.kv, file_ref, chunked_text.text)
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
                    self.kv, file_ref.tenant, file_ref.store_id, [file_ref.file_id]
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
                    await records.delete_text(self.kv, file_ref)
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
        await records.delete_text(self.kv, file_ref)
        store_key = records.store_key(file_ref.tenant, file_ref.store_id)
        ops = records.build_orphan_ops(file_ref, store_key if is_store_absent else file_ref.record_key)
        if not await lease.release(ops):
            await lease.release()  # the file was added again meanwhile
