"""HybridVectorStores: semantic and keyword search combined, over a VectorIndex and the KVStore of the stack."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import msgspec
from openai.types.file_object import FileObject
from openai.types.vector_store import VectorStore
from openai.types.vector_store_search_response import VectorStoreSearchResponse
from openai.types.vector_stores import FileContentResponse, VectorStoreFile, VectorStoreFileBatch
from pydantic import Field

from apis.accounts.accounts import Accounts
from apis.documents.files import Files
from apis.documents.reader import Reader
from apis.documents.vector_index import VectorIndex
from apis.documents.vector_store_requests import (
    AddFile,
    AddFiles,
    CreateVectorStore,
    SearchStores,
    UpdateFile,
    UpdateVectorStore,
    VectorStoreFileListParams,
    VectorStoreListParams,
)
from apis.documents.vector_stores import VectorStores
from apis.errors import InvalidRequest, NotFound, StackError, StorageCorrupt
from apis.fair_share import ONE_TENANT, Tenants
from apis.inference import Inference
from apis.provider import Provider
from apis.storage.keys import new_id_key
from apis.storage.kv_store import Delete, KVStore, Op, Put
from apis.storage.pages import Page
from apis.storage.records import decode_record, delete_all, encode_record, scan_all
from providers.common.jobs import LeasedJobs
from providers.common.state.change import change_existing, write_prepared
from providers.common.state.scan import decode_or_skip
from providers.common.state.tenant_records import TenantRecords
from providers.common.state.worker_signs import WorkerSign
from providers.common.supervision import supervise
from providers.vector_stores import records
from providers.vector_stores.ingest import IngestQueue, IngestSettings
from providers.vector_stores.objects import (
    build_batch_object,
    build_file_object,
    build_search_result,
    build_store_object,
    paginate_records,
)
from providers.vector_stores.pages import read_file_page, read_store_page
from providers.vector_stores.records import BatchRecord, FileRecord, FileRef, StoreRecord
from providers.vector_stores.search import search_stores

_log = logging.getLogger(__name__)
_TOUCH_INTERVAL_S: Final = 60.0
"""Seconds between updates of a store's time of last use: its precision."""
_SWEEP_INTERVAL_S: Final = 3600.0
_STOP_TIMEOUT_S: Final = 5.0


class HybridVectorStores(VectorStores):
    """Files are read, chunked and embedded in the background; a search fuses rankings by vectors and by keywords."""

    class Config(Provider.Config):
        """`embedding_model` is a model of the stack's inference; a store always uses the one it was created with.

        `max_text_chars` bounds the text of a file. `lease_s` after a process died, another one takes over its files.
        """

        embedding_model: str = Field(min_length=1)
        embedding_dimensions: int | None = Field(default=None, ge=1, le=16_000)
        max_stores: int = Field(default=1000, ge=1, le=100_000)
        max_files_per_store: int = Field(default=10_000, ge=1, le=100_000)
        max_text_chars: int = Field(default=5_000_000, ge=1000, le=50_000_000)
        lease_s: float = Field(default=30.0, gt=0, le=3600)

    def __init__(  # noqa: PLR0913, PLR0917 - every API that it builds on is one argument
        self,
        config: Config,
        files: Files,
        reader: Reader,
        vector_index: VectorIndex,
        inference: Inference,
        kv_store: KVStore,
        accounts: Accounts | None,
        tenants: Tenants = ONE_TENANT,
    ) -> None:
        self.now: Callable[[], float] = time.time
        self._config = config
        self._files = files
        self._reader = reader
        self._index = vector_index
        self._inference = inference
        self._kv = kv_store
        self._stores = TenantRecords(kv_store, "vs", StoreRecord, partial(records.not_found, "vector store"))
        self._sweep_task: asyncio.Task[None] | None = None
        self._sign = WorkerSign(kv_store, config.lease_s)
        queue = IngestQueue(
            kv_store,
            reader,
            vector_index,
            inference,
            IngestSettings(config.lease_s, config.max_text_chars, tenants.are_several),
            accounts,
        )
        self._ingest = LeasedJobs(queue, self._sign, poll_s=config.lease_s)

    async def start(self) -> None:
        await asyncio.to_thread(self._reader.check)
        self._sign.start()
        self._ingest.start()
        self._sweep_task = supervise("the sweep of expired vector stores", self._sweep_stores)

    async def close(self) -> None:
        if self._sweep_task is not None:
            self._sweep_task.cancel()
        await self._ingest.close(_STOP_TIMEOUT_S)
        await self._sign.close()

    async def create(self, request: CreateVectorStore, *, tenant: str) -> VectorStore:
        now = self.now()
        # a full tenant is refused before its files are looked at
        await self._stores.count_new(tenant, self._config.max_stores, _too_many_stores_error)
        store_id = f"vs_{new_id_key()}"
        store = StoreRecord(
            created_at=now,
            last_active_at=now,
            model=self._config.embedding_model,
            dimensions=self._config.embedding_dimensions,
            name=request.name or "",
            description=request.description,
            metadata=request.metadata,
            expires_days=request.expires_after.days if request.expires_after else None,
            index_id=await self._index.identity(),
        )
        added = [AddFile(file_id=name, chunking_strategy=request.chunking_strategy) for name in request.file_ids or ()]
        file_records = await self._build_records(store_id, added, tenant, "file_ids[{}]")
        self._require_room(len(file_records))
        for _, record in file_records:
            store.count_file(None, record)
        also = [*records.build_expiry_ops(tenant, store_id, store), *_add_ops(file_records)]
        await self._stores.create(tenant, store_id, store, self._config.max_stores, _too_many_stores_error, also)
        self._ingest.wake()
        return build_store_object(store_id, store, now)

    async def get(self, store_id: str, *, tenant: str) -> VectorStore:
        return build_store_object(store_id, await self._load_store(store_id, tenant), self.now())

    async def update(self, store_id: str, request: UpdateVectorStore, *, tenant: str) -> VectorStore:
        changes = {
            "name": request.name,
            "metadata": request.metadata,
            "expires_days": request.expires_after.days if request.expires_after else None,
        }
        cleared = {"expires_days"} if "expires_after" in request.model_fields_set else set[str]()
        set_fields = {name: value for name, value in changes.items() if value is not None or name in cleared}
        updated: StoreRecord | None = None

        async def prepare() -> Sequence[Op]:
            nonlocal updated
            store, version = await records.load_record(
                self._kv, records.store_key(tenant, store_id), StoreRecord, "vector store"
            )
            if self._is_expired(store):
                raise records.expired_error(store_id)
            updated = msgspec.structs.replace(store, last_active_at=self.now(), **set_fields)
            return records.build_store_ops(tenant, store_id, updated, version)

        await write_prepared(self._kv, prepare)
        assert updated is not None
        return build_store_object(store_id, updated, self.now())

    async def list(self, params: VectorStoreListParams, *, tenant: str) -> Page[VectorStore]:
        prefix = records.store_key(tenant, "")
        page = await read_store_page(self._kv, tenant, params)
        return page.map(lambda row: build_store_object(row.key[len(prefix) :], row.record, self.now()))

    async def delete(self, store_id: str, *, tenant: str) -> None:
        # the mark lets the sweep remove the files where this process dies before it has
        mark = Put(f"{records.EXPIRING_PREFIX}{tenant}/{store_id}", b"")
        await self._stores.delete(tenant, store_id, lambda _: [mark])
        await self._remove_deleted(store_id, tenant)
        await self._kv.write([Delete(mark.key)])

    async def delete_all(self, *, tenant: str) -> None:
        prefix = records.store_key(tenant, "")
        async for key, _ in scan_all(self._kv, prefix):
            with suppress(NotFound):
                await self.delete(key[len(prefix) :], tenant=tenant)

    async def check(self, store_id: str, *, tenant: str) -> None:
        await self._load_active_store(store_id, tenant)

    async def search(
        self, store_ids: Sequence[str], request: SearchStores, *, tenant: str
    ) -> Sequence[VectorStoreSearchResponse]:
        stores = {store_id: await self._load_active_store(store_id, tenant) for store_id in dict.fromkeys(store_ids)}
        ranked_hits = await search_stores(self._index, self._inference, tenant, stores, request)
        for store_id, store in stores.items():
            await self._mark_active(store_id, store, tenant)
        file_refs = [FileRef(tenant, store_id, hit.file) for (store_id, hit), _ in ranked_hits]
        entries = dict(
            zip(file_refs, await self._kv.get_many([file_ref.record_key for file_ref in file_refs]), strict=True)
        )
        results: list[VectorStoreSearchResponse] = []
        for file_ref, ((_, hit), score) in zip(file_refs, ranked_hits, strict=True):
            # a file that was removed while the search ran is not shown
            if (entry := entries[file_ref]) is not None:
                record = decode_or_skip(self._kv, file_ref.record_key, entry, FileRecord)
                if record is not None:
                    results.append(build_search_result(hit, record, score))
        return results

    async def add_file(self, store_id: str, request: AddFile, *, tenant: str) -> VectorStoreFile:
        await self._load_active_store(store_id, tenant)
        ((file_ref, record),) = await self._build_records(store_id, [request], tenant, "file_id")
        await self._add_records(store_id, tenant, [(file_ref, record)])
        return build_file_object(file_ref, record)

    async def get_file(self, store_id: str, file_id: str, *, tenant: str) -> VectorStoreFile:
        file_ref, record, _ = await self._load_file(store_id, file_id, tenant)
        return build_file_object(file_ref, record)

    async def list_files(
        self, store_id: str, params: VectorStoreFileListParams, *, batch_id: str | None = None, tenant: str
    ) -> Page[VectorStoreFile]:
        await self._load_store(store_id, tenant)
        if batch_id is None:
            page = await read_file_page(self._kv, tenant, store_id, params)
        else:
            batch, _ = await self._load_batch(store_id, batch_id, tenant)
            files = await records.load_files(self._kv, tenant, store_id, batch.file_ids)
            page = paginate_records([file for file in files if params.filter in (None, file[1].status)], params)
        return page.map(lambda file: build_file_object(FileRef(tenant, store_id, file[0]), file[1]))

    async def update_file(self, store_id: str, file_id: str, request: UpdateFile, *, tenant: str) -> VectorStoreFile:
        await records.require_index(self._index, store_id, await self._load_store(store_id, tenant))
        file_ref, _, _ = await self._load_file(store_id, file_id, tenant)

        def set_attributes(record: FileRecord) -> FileRecord:
            return msgspec.structs.replace(record, attributes=request.attributes or {})

        not_found = records.not_found("file in this vector store", file_id)
        record = await change_existing(self._kv, file_ref.record_key, FileRecord, set_attributes, not_found)
        await self._index.set_attributes(file_ref.index_namespace, file_id, record.attributes)
        return build_file_object(file_ref, record)

    async def delete_file(self, store_id: str, file_id: str, *, tenant: str) -> None:
        await self._load_store(store_id, tenant)
        file_ref = FileRef(tenant, store_id, file_id)
        await records.load_entry(self._kv, file_ref.record_key, "file in this vector store")
        await self._remove_file(file_ref)

    async def file_content(self, store_id: str, file_id: str, *, tenant: str) -> Sequence[FileContentResponse]:
        file_ref, _, _ = await self._load_file(store_id, file_id, tenant)
        text = await records.load_text(self._kv, file_ref)
        return [FileContentResponse(type="text", text=text)] if text else []

    async def forget_file(self, file_id: str, *, tenant: str) -> None:
        prefix = f"{tenant}/vs_of/{file_id}/"
        async for key, _ in scan_all(self._kv, prefix):
            await self._remove_file(FileRef(tenant, key[len(prefix) :], file_id))

    async def add_files(self, store_id: str, request: AddFiles, *, tenant: str) -> VectorStoreFileBatch:
        await self._load_active_store(store_id, tenant)
        shared = {"attributes": request.attributes, "chunking_strategy": request.chunking_strategy}
        added = request.files or [AddFile(file_id=name).model_copy(update=shared) for name in request.file_ids or ()]
        file_records = await self._build_records(
            store_id, added, tenant, "files[{}].file_id" if request.files else "file_ids[{}]"
        )
        batch_id = records.new_id("vsfb", self.now())
        batch = BatchRecord(created_at=self.now(), file_ids=[file_ref.file_id for file_ref, _ in file_records])
        put_batch = Put(records.batch_key(tenant, store_id, batch_id), encode_record(batch))
        await self._add_records(store_id, tenant, file_records, put_batch)
        return build_batch_object(batch_id, store_id, batch, [record for _, record in file_records])

    async def get_batch(self, store_id: str, batch_id: str, *, tenant: str) -> VectorStoreFileBatch:
        batch, _ = await self._load_batch(store_id, batch_id, tenant)
        files = await records.load_files(self._kv, tenant, store_id, batch.file_ids)
        return build_batch_object(batch_id, store_id, batch, [record for _, record in files])

    async def cancel_batch(self, store_id: str, batch_id: str, *, tenant: str) -> VectorStoreFileBatch:
        batch, _ = await self._load_batch(store_id, batch_id, tenant)
        stopped: list[FileRef] = []

        async def prepare() -> Sequence[Op] | None:
            store, version, files = await records.load_store_and_files(self._kv, tenant, store_id, batch.file_ids)
            stopped.clear()
            ops: list[Op] = []
            for file_id, (record, file_version) in zip(batch.file_ids, files, strict=True):
                if record is not None and record.status == "in_progress":
                    file_ref, cancelled = FileRef(tenant, store_id, file_id), records.build_outcome(record, "cancelled")
                    store.count_file(record, cancelled)
                    put = Put(file_ref.record_key, encode_record(cancelled), expect=file_version)
                    ops += [put, Delete(file_ref.job_key)]
                    stopped.append(file_ref)
            batch.was_cancelled = batch.was_cancelled or bool(stopped)
            put_batch = Put(records.batch_key(tenant, store_id, batch_id), encode_record(batch))
            store_ops = records.build_store_ops(tenant, store_id, store, version)
            return [*ops, *store_ops, put_batch] if stopped else None

        await write_prepared(self._kv, prepare)
        await self._delete_contents(stopped)
        return await self.get_batch(store_id, batch_id, tenant=tenant)

    async def _load_store(self, store_id: str, tenant: str) -> StoreRecord:
        """Return the record of a store; one that has expired is emptied first. Raises NotFound."""
        key = records.store_key(tenant, store_id)
        store, version = await records.load_record(self._kv, key, StoreRecord, "vector store")
        if not self._is_expired(store) or store.is_emptied:
            return store
        await self._remove_all_files(store_id, tenant)
        emptied = msgspec.structs.replace(store, is_emptied=True, file_counts={}, usage_bytes=0)
        if await self._kv.write([Put(key, encode_record(emptied), expect=version)]) is not None:
            return emptied
        return (await records.load_record(self._kv, key, StoreRecord, "vector store"))[0]

    async def _load_active_store(self, store_id: str, tenant: str) -> StoreRecord:
        store = await self._load_store(store_id, tenant)
        if self._is_expired(store):
            raise records.expired_error(store_id)
        await records.require_index(self._index, store_id, store)
        return store

    def _is_expired(self, store: StoreRecord) -> bool:
        return store.expires_at is not None and self.now() >= store.expires_at

    async def _mark_active(self, store_id: str, store: StoreRecord, tenant: str) -> None:
        if self.now() - store.last_active_at > _TOUCH_INTERVAL_S:
            key = records.store_key(tenant, store_id)
            entry = await self._kv.get(key)
            if entry is not None:
                fresh = msgspec.structs.replace(decode_record(entry, StoreRecord), last_active_at=self.now())
                await self._kv.write([Put(key, encode_record(fresh), expect=entry.version)], durable=False)

    async def _load_file(self, store_id: str, file_id: str, tenant: str) -> tuple[FileRef, FileRecord, int]:
        await self._load_store(store_id, tenant)
        file_ref = FileRef(tenant, store_id, file_id)
        record, version = await records.load_record(
            self._kv, file_ref.record_key, FileRecord, "file in this vector store"
        )
        return file_ref, record, version

    async def _load_batch(self, store_id: str, batch_id: str, tenant: str) -> tuple[BatchRecord, int]:
        await self._load_store(store_id, tenant)
        return await records.load_record(
            self._kv, records.batch_key(tenant, store_id, batch_id), BatchRecord, "file batch"
        )

    async def _build_records(
        self, store_id: str, requests: Sequence[AddFile], tenant: str, param: str
    ) -> "list[tuple[FileRef, FileRecord]]":
        """Return a record for each file. Raises NotFound for an unknown file, naming its field by `param`."""
        params = {request.file_id: param.format(index) for index, request in reversed([*enumerate(requests)])}
        requests = list({request.file_id: request for request in requests}.values())
        files = await asyncio.gather(
            *[self._get_file(request.file_id, params[request.file_id], tenant) for request in requests]
        )
        now = self.now()
        return [
            (
                FileRef(tenant, store_id, request.file_id),
                records.build_file_record(request, file.filename, now + position * 1e-6),
            )
            for position, (request, file) in enumerate(zip(requests, files, strict=True))
        ]

    async def _get_file(self, file_id: str, param: str, tenant: str) -> FileObject:
        try:
            return await self._files.get(file_id, tenant=tenant)
        except NotFound as exc:
            raise NotFound(exc.message, param=param, code=exc.code) from exc

    async def _add_records(
        self, store_id: str, tenant: str, file_records: "Sequence[tuple[FileRef, FileRecord]]", *more: Op
    ) -> None:
        """Add the files to their store, which must not have been deleted or have expired meanwhile, and write `more` in
        the same step."""
        file_refs = [file_ref for file_ref, _ in file_records]
        await self._stop_ingest(file_refs)

        async def prepare() -> Sequence[Op]:
            file_ids = [file_ref.file_id for file_ref in file_refs]
            store, version, stored = await records.load_store_and_files(self._kv, tenant, store_id, file_ids)
            if self._is_expired(store):
                raise records.expired_error(store_id)
            old_order_keys: set[str] = set()
            for (file_ref, record), (old, _) in zip(file_records, stored, strict=True):
                store.count_file(old, record)
                if old is not None:
                    old_order_keys.add(records.file_order_key(file_ref, old))
            self._require_room(store.count_all())
            store.last_active_at = self.now()
            add_ops = _add_ops(file_records)
            order_ops = [Delete(key) for key in old_order_keys - {op.key for op in add_ops}]
            return [*records.build_store_ops(tenant, store_id, store, version), *order_ops, *add_ops, *more]

        await write_prepared(self._kv, prepare)
        self._ingest.wake()

    def _require_room(self, file_count: int) -> None:
        if file_count > self._config.max_files_per_store:
            raise InvalidRequest(f"A vector store holds at most {self._config.max_files_per_store} files.")

    async def _remove_file(self, file_ref: FileRef) -> None:
        """Remove a file: first its record, so that no reader sees it, then its contents."""

        async def prepare() -> Sequence[Op]:
            try:
                store, version, [(record, _)] = await records.load_store_and_files(
                    self._kv, file_ref.tenant, file_ref.store_id, [file_ref.file_id]
                )
            except (NotFound, StorageCorrupt):
                return records.build_remove_ops(file_ref)  # the counts went with the store
            store.count_file(record, None)
            order_ops = [] if record is None else [Delete(records.file_order_key(file_ref, record))]
            store_ops = records.build_store_ops(file_ref.tenant, file_ref.store_id, store, version)
            return [*records.build_remove_ops(file_ref), *order_ops, *store_ops]

        await write_prepared(self._kv, prepare)
        await self._delete_contents([file_ref])

    async def _delete_contents(self, file_refs: Sequence[FileRef]) -> None:
        await self._stop_ingest(file_refs)
        for file_ref in file_refs:
            await self._index.delete(file_ref.index_namespace, file_ref.file_id)
            await records.delete_text(self._kv, file_ref)

    async def _stop_ingest(self, file_refs: Sequence[FileRef]) -> None:
        """Stop the work at these files that is in progress in this process."""
        await self._ingest.cancel([file_ref.lease_key for file_ref in file_refs], _STOP_TIMEOUT_S)

    async def _sweep_stores(self) -> None:
        """Empty expired stores that no client asks for, and remove what is left of deleted ones."""
        while True:
            async for key, _ in scan_all(self._kv, records.EXPIRING_PREFIX):
                tenant, _, store_id = key.removeprefix(records.EXPIRING_PREFIX).partition("/")
                try:
                    await self._sweep_store(key, store_id, tenant)
                except StackError as exc:
                    _log.warning("the vector store %s is not swept yet: %s", store_id, exc.message)
            await asyncio.sleep(_SWEEP_INTERVAL_S)

    async def _sweep_store(self, mark_key: str, store_id: str, tenant: str) -> None:
        try:
            is_empty = (await self._load_store(store_id, tenant)).is_emptied
        except NotFound:
            await self._remove_deleted(store_id, tenant)
            is_empty = True
        if is_empty:
            await self._kv.write([Delete(mark_key)])

    async def _remove_deleted(self, store_id: str, tenant: str) -> None:
        """Remove all that was made for a store whose record is deleted."""
        await self._remove_all_files(store_id, tenant)
        await delete_all(self._kv, records.batch_key(tenant, store_id, ""), durable=True)

    async def _remove_all_files(self, store_id: str, tenant: str) -> None:
        prefix = records.file_prefix(tenant, store_id)
        file_refs = [FileRef(tenant, store_id, key[len(prefix) :]) async for key, _ in scan_all(self._kv, prefix)]
        ops: list[Op] = [op for file_ref in file_refs for op in records.build_remove_ops(file_ref)]
        if ops:
            await self._kv.write(ops)
        await delete_all(self._kv, records.file_order_prefix(tenant, store_id), durable=True)
        await self._stop_ingest(file_refs)
        await self._index.delete(f"{tenant}/{store_id}")
        await records.delete_store_texts(self._kv, tenant, store_id)


def _too_many_stores_error(count: int) -> InvalidRequest:
    return InvalidRequest(f"You have {count} vector stores. Delete some first.", code="too_many_stores")


def _add_ops(file_records: Sequence[tuple[FileRef, FileRecord]]) -> list[Op]:
    return [op for file_ref, record in file_records for op in records.build_add_ops(file_ref, record)]
