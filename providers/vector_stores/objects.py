"""The API's objects out of what is kept of vector stores, and pages of them."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from openai.types import VectorStore, VectorStoreSearchResponse
from openai.types.vector_stores import VectorStoreFile, VectorStoreFileBatch

from apis.files import Page
from apis.vector_index import Found
from apis.vector_stores import StoresPage
from providers.vector_stores.records import Batch, Place, Store, StoreFile


class _Made(Protocol):
    at: float


Kept = TypeVar("Kept", bound=_Made)


def page_of(found: Sequence[tuple[str, Kept]], page: StoresPage) -> Page[tuple[str, Kept]]:
    """The page of these, by the time they were made. An id that is no longer there marks no place."""
    ordered = sorted(found, key=lambda each: (each[1].at, each[0]), reverse=page.order == "desc")
    places = {name: position for position, (name, _) in enumerate(ordered)}
    first = places[page.after] + 1 if page.after in places else 0
    last = places[page.before] if page.before in places else len(ordered)
    if page.before in places and page.after is None:
        return Page(ordered[max(0, last - page.limit) : last], has_more=last > page.limit)
    return Page(ordered[first:last][: page.limit], has_more=last - first > page.limit)


def store_object(store_id: str, store: Store, files: Sequence[StoreFile], now: float) -> VectorStore:
    expired = store.expires_at is not None and now >= store.expires_at
    counts = _counts(files)
    fields: dict[str, Any] = {
        "id": store_id,
        "object": "vector_store",
        "created_at": int(store.at),
        "name": store.name,
        "description": store.description,
        "status": "expired" if expired else "in_progress" if counts["in_progress"] else "completed",
        "usage_bytes": sum(file.usage_bytes for file in files),
        "file_counts": counts,
        "expires_after": None
        if store.expires_days is None
        else {"anchor": "last_active_at", "days": store.expires_days},
        "expires_at": None if store.expires_at is None else int(store.expires_at),
        "last_active_at": int(store.active_at),
        "metadata": store.metadata or {},
    }
    return VectorStore.model_validate(fields)


def file_object(place: Place, record: StoreFile) -> VectorStoreFile:
    sizes = {"max_chunk_size_tokens": record.max_tokens, "chunk_overlap_tokens": record.overlap_tokens}
    fields: dict[str, Any] = {
        "id": place.file,
        "object": "vector_store.file",
        "created_at": int(record.at),
        "vector_store_id": place.store,
        "status": record.status,
        "last_error": record.error and {"code": record.error[0], "message": record.error[1]},
        "usage_bytes": record.usage_bytes,
        "attributes": record.attributes,
        "chunking_strategy": {"type": "static", "static": sizes},
    }
    return VectorStoreFile.model_validate(fields)


def batch_object(batch_id: str, store_id: str, batch: Batch, files: Sequence[StoreFile]) -> VectorStoreFileBatch:
    counts = _counts(files)
    status = "completed"
    if counts["in_progress"]:
        status = "in_progress"
    elif batch.cancelled:
        status = "cancelled"
    elif files and counts["failed"] == len(files):
        status = "failed"
    fields: dict[str, Any] = {
        "id": batch_id,
        "object": "vector_store.files_batch",
        "created_at": int(batch.at),
        "vector_store_id": store_id,
        "status": status,
        "file_counts": counts,
    }
    return VectorStoreFileBatch.model_validate(fields)


def search_result(hit: Found, file: StoreFile, score: float) -> VectorStoreSearchResponse:
    fields: dict[str, Any] = {
        "file_id": hit.file,
        "filename": file.name,
        "score": score,
        "attributes": dict(hit.attributes),
        "content": [{"type": "text", "text": hit.text}],
    }
    return VectorStoreSearchResponse.model_validate(fields)


def _counts(files: Sequence[StoreFile]) -> dict[str, int]:
    by_status = Counter(file.status for file in files)
    counts = {status: by_status[status] for status in ("in_progress", "completed", "failed", "cancelled")}
    return {**counts, "total": len(files)}
