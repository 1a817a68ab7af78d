"""The API's objects, built from the records of vector stores, and pages of them."""

from collections import Counter
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, Final, Protocol, TypeVar, get_args

from openai.types.vector_store import VectorStore
from openai.types.vector_store_search_response import VectorStoreSearchResponse
from openai.types.vector_stores import VectorStoreFile, VectorStoreFileBatch

from apis.documents.vector_index import ScoredChunk
from apis.documents.vector_store_requests import VectorStoreListParams
from apis.storage.pages import Page, page_between
from providers.vector_stores.records import BatchRecord, FileRecord, FileRef, FileStatus, StoreRecord


class FileInStore(VectorStoreFile):
    """The SDK's object, with the attributes of its own request type: a whole number stays one."""

    attributes: dict[str, str | bool | int | float] | None = None  # pyright: ignore[reportIncompatibleVariableOverride] - wider than the SDK's, which makes floats of whole numbers


class SearchResult(VectorStoreSearchResponse):
    """The SDK's object, with whole numbers among its attributes."""

    attributes: dict[str, str | bool | int | float] | None = None  # pyright: ignore[reportIncompatibleVariableOverride] - as above


class _HasCreatedAt(Protocol):
    created_at: float


_STATUSES: Final[tuple[FileStatus, ...]] = get_args(FileStatus)
DatedRecordT = TypeVar("DatedRecordT", bound=_HasCreatedAt)


def paginate_records(
    records: Sequence[tuple[str, DatedRecordT]], page: VectorStoreListParams
) -> Page[tuple[str, DatedRecordT]]:
    """Return the page of the records, ordered by their creation."""
    ordered = sorted(records, key=lambda row: (row[1].created_at, row[0]), reverse=page.order == "desc")
    return page_between(ordered, page, page.before, itemgetter(0))


def build_store_object(store_id: str, store: StoreRecord, now: float) -> VectorStore:
    expired = store.expires_at is not None and now >= store.expires_at
    stored_counts = {} if expired else store.file_counts
    counts = {status: stored_counts.get(status, 0) for status in _STATUSES}
    fields: dict[str, Any] = {
        "id": store_id,
        "object": "vector_store",
        "created_at": int(store.created_at),
        "name": store.name,
        "description": store.description,
        "status": "expired" if expired else "in_progress" if counts["in_progress"] else "completed",
        "usage_bytes": 0 if expired else store.usage_bytes,
        "file_counts": {**counts, "total": sum(counts.values())},
        "expires_after": None
        if store.expires_days is None
        else {"anchor": "last_active_at", "days": store.expires_days},
        "expires_at": None if store.expires_at is None else int(store.expires_at),
        "last_active_at": int(store.last_active_at),
        "metadata": store.metadata or {},
    }
    return VectorStore.model_validate(fields)


def build_file_object(file_ref: FileRef, record: FileRecord) -> VectorStoreFile:
    sizes = {"max_chunk_size_tokens": record.max_tokens, "chunk_overlap_tokens": record.overlap_tokens}
    fields: dict[str, Any] = {
        "id": file_ref.file_id,
        "object": "vector_store.file",
        "created_at": int(record.created_at),
        "vector_store_id": file_ref.store_id,
        "status": record.status,
        "last_error": record.error and {"code": record.error[0], "message": record.error[1]},
        "usage_bytes": record.usage_bytes,
        "attributes": record.attributes,
        "chunking_strategy": {"type": "static", "static": sizes},
    }
    return FileInStore.model_validate(fields)


def build_batch_object(
    batch_id: str, store_id: str, batch: BatchRecord, files: Sequence[FileRecord]
) -> VectorStoreFileBatch:
    counts = _count_by_status(files)
    status = "completed"
    if counts["in_progress"]:
        status = "in_progress"
    elif batch.was_cancelled:
        status = "cancelled"
    elif files and counts["failed"] == len(files):
        status = "failed"
    fields: dict[str, Any] = {
        "id": batch_id,
        "object": "vector_store.files_batch",
        "created_at": int(batch.created_at),
        "vector_store_id": store_id,
        "status": status,
        "file_counts": counts,
    }
    return VectorStoreFileBatch.model_validate(fields)


def build_search_result(hit: ScoredChunk, file: FileRecord, score: float) -> VectorStoreSearchResponse:
    fields: dict[str, Any] = {
        "file_id": hit.file,
        "filename": file.filename,
        "score": score,
        "attributes": dict(hit.attributes),
        "content": [{"type": "text", "text": hit.text}],
    }
    return SearchResult.model_validate(fields)


def _count_by_status(files: Sequence[FileRecord]) -> dict[str, int]:
    by_status = Counter(file.status for file in files)
    counts = {status: by_status[status] for status in _STATUSES}
    return {**counts, "total": len(files)}
