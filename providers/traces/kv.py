"""StoredTraces: traces of agents in the stack's own KVStore, bounded per trace and per tenant."""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Final

import msgspec
from pydantic import Field

from apis.errors import InvalidRequest, NotFound
from apis.observation.traces import (
    ID_PATTERN,
    IngestedSpan,
    IngestedTrace,
    IngestTraces,
    TraceDetail,
    TraceListParams,
    forward_span,
    to_unix_ns,
)
from apis.provider import Provider
from apis.storage.kv_store import ABSENT, Delete, Entry, KVStore, Op, Put
from apis.storage.pages import Page
from apis.storage.records import decode_record, delete_all, encode_record, reading_stored, scan_all
from providers.common.state.change import repeat_until_true
from providers.common.state.scan import decode_or_skip, skipping_damaged
from providers.traces.records import (
    StoredSpan,
    TraceRecord,
    TraceUsage,
    age_key,
    metadata_to_json,
    response_key,
    span_key,
    span_to_json,
    trace_key,
    usage_key,
)

_READ_SPANS: Final = 32
"""Stored spans that are read at a time, of up to 256 KiB each."""
_MAX_READ_ROWS: Final = 2000
"""Traces that one page reads at most: where few match the filters, it ends before it is full."""
_BATCH_ROWS: Final = 100
_THREAD_BYTES: Final = 1024 * 1024
"""Bytes of spans from which they are sorted in a thread."""

_TRACE_ID: Final = re.compile(ID_PATTERN)


@dataclass(slots=True)
class _Batch:
    """The changes of one request, computed from one state of the store."""

    records: dict[str, TraceRecord]
    versions: dict[str, int]
    stored_bytes: int
    """Bytes of the records before the changes."""
    ops: list[Op] = field(default_factory=list[Op])
    ended_spans: list[IngestedSpan] = field(default_factory=list[IngestedSpan])
    """The spans that were not stored before, or had not ended."""

    @property
    def added_bytes(self) -> int:
        return sum(record.size_bytes for record in self.records.values()) - self.stored_bytes

    @property
    def added_traces(self) -> int:
        return sum(version == ABSENT for version in self.versions.values())


class StoredTraces(Provider):
    """Traces and spans of agents in the KVStore, for any number of workers, stored for the retention time of the
    config. Another tenant's id is an unknown id. A change is one atomic write on the condition that the traces and the
    tenant's usage are as they were read."""

    class Config(Provider.Config):
        """Traces and spans are deleted `retention_days` after they came. A trace has at most `max_trace_spans` of
        `max_trace_bytes` together: further ones are dropped and counted. A tenant has at most `max_tenant_traces` of
        `max_tenant_bytes` together: its oldest ones are deleted for new ones."""

        retention_days: float = Field(default=30, gt=0)
        max_trace_spans: int = Field(default=2000, ge=1, le=100_000)
        max_trace_bytes: int = Field(default=16 * 1024 * 1024, ge=1024 * 1024)
        max_tenant_traces: int = Field(default=10_000, ge=1, le=1_000_000)
        max_tenant_bytes: int = Field(default=256 * 1024 * 1024, ge=1024 * 1024)

    def __init__(self, config: Config, kv_store: KVStore) -> None:
        self._config = config
        self._kv = kv_store
        self._ttl_s = config.retention_days * 86_400

    async def ingest(self, request: IngestTraces, *, tenant: str) -> None:
        # in a thread, because a request may hold 32 MiB
        """Store traces and spans, all or none. A span that is stored already stays as it is, unless it had not ended;
        so an exporter can repeat a request. Long values of a span are cut as OpenAI's exporter cuts them.

        A span that its trace has no room for is dropped and counted in the trace. Where the tenant has no room left,
        its oldest traces are deleted. Raises InvalidRequest for a single span or trace that is too large.
        """
        traces, spans = await asyncio.to_thread(_encode_items, request)
        if not traces and not spans:
            return
        await self._kv.require_room(tenant)
        batch = _Batch({}, {}, 0)

        async def attempt() -> bool:
            nonlocal batch
            batch = await self._load(
                tenant, {*(trace.id for trace, _ in traces), *(span.trace_id for span, _ in spans)}
            )
            for trace, metadata_json in traces:
                batch.records[trace.id].set_trace(trace, metadata_json)
            await self._add_spans(tenant, batch, spans)
            usage, usage_version = await self._make_room(tenant, batch)
            usage = TraceUsage(usage.traces + batch.added_traces, usage.size_bytes + batch.added_bytes)
            ops = [*batch.ops, *self._record_ops(tenant, batch)]
            ops.append(Put(usage_key(tenant), encode_record(usage), expect=usage_version))
            return await self._kv.write(ops, durable=False) is not None

        await repeat_until_true(attempt)
        for span in batch.ended_spans:
            forward_span(span, batch.records[span.trace_id].group_id, tenant)

    async def _load(self, tenant: str, trace_ids: set[str]) -> _Batch:
        ids = sorted(trace_ids)
        entries = await self._kv.get_many([trace_key(tenant, trace_id) for trace_id in ids])
        records = {
            trace_id: TraceRecord(time.time()) if entry is None else decode_record(entry, TraceRecord)
            for trace_id, entry in zip(ids, entries, strict=True)
        }
        versions = {
            trace_id: ABSENT if entry is None else entry.version for trace_id, entry in zip(ids, entries, strict=True)
        }
        stored = sum(record.size_bytes for trace_id, record in records.items() if versions[trace_id] != ABSENT)
        return _Batch(records, versions, stored)

    async def _add_spans(self, tenant: str, batch: _Batch, spans: Sequence[tuple[IngestedSpan, bytes]]) -> None:
        """Add the spans that are not stored yet, or that have ended since."""
        for start in range(0, len(spans), _READ_SPANS):
            part = spans[start : start + _READ_SPANS]
            keys = [span_key(tenant, span.trace_id, span.id) for span, _ in part]
            for key, entry, (span, span_json) in zip(keys, await self._kv.get_many(keys), part, strict=True):
                record = batch.records[span.trace_id]
                if entry is not None:
                    stored = decode_record(entry, StoredSpan)
                    if stored.ended_at is not None or span.ended_at is None:
                        continue
                    record.replace_span(span, len(span_json), stored, len(entry.value))
                    batch.ended_spans.append(span)
                elif (
                    record.span_count >= self._config.max_trace_spans
                    or record.size_bytes + len(span_json) > self._config.max_trace_bytes
                ):
                    record.dropped_spans += 1
                    continue
                else:
                    record.add_span(span, len(span_json))
                    if span.ended_at is not None:
                        batch.ended_spans.append(span)
                batch.ops.append(Put(key, span_json, self._ttl_s))

    def _record_ops(self, tenant: str, batch: _Batch) -> list[Op]:
        ops: list[Op] = []
        for trace_id, record in batch.records.items():
            key = trace_key(tenant, trace_id)
            ops.append(Put(key, encode_record(record), self._ttl_s, batch.versions[trace_id]))
            ops.append(Put(age_key(tenant, record.created_at, trace_id), b"%d" % record.size_bytes, self._ttl_s))
            ops += [Put(response_key(tenant, name, trace_id), b"", self._ttl_s) for name in record.response_ids]
        return ops

    async def _make_room(self, tenant: str, batch: _Batch) -> tuple[TraceUsage, int]:
        """Return the tenant's usage and its version, after its oldest traces were deleted if there was no room. Raises
        InvalidRequest if the changes alone are too large."""
        usage, version = await self._load_usage(tenant)
        if self._has_room(usage, batch):
            return usage, version
        # the stored usage includes expired traces: count before deleting any
        sizes = await self._load_sizes(tenant)
        usage = TraceUsage(len(sizes), sum(sizes.values()))
        for trace_id, size_bytes in sizes.items():
            if self._has_room(usage, batch):
                break
            if trace_id not in batch.records:
                await self._delete_stored(tenant, trace_id)
                usage = TraceUsage(usage.traces - 1, usage.size_bytes - size_bytes)
        if not self._has_room(usage, batch):
            raise InvalidRequest(
                f"These traces are larger than all that you may store: {self._config.max_tenant_bytes} bytes in "
                f"{self._config.max_tenant_traces} traces (`traces.max_tenant_bytes`, `traces.max_tenant_traces`).",
                param="data",
                code="storage_quota_exceeded",
            )
        return usage, version

    def _has_room(self, usage: TraceUsage, batch: _Batch) -> bool:
        return (
            usage.traces + batch.added_traces <= self._config.max_tenant_traces
            and usage.size_bytes + batch.added_bytes <= self._config.max_tenant_bytes
        )

    async def _load_usage(self, tenant: str) -> tuple[TraceUsage, int]:
        """Return the usage and the version of its record; a damaged one is counted again."""
        entry = await self._kv.get(usage_key(tenant))
        if entry is None:
            return TraceUsage(), ABSENT
        usage = decode_or_skip(self._kv, usage_key(tenant), entry, TraceUsage)
        if usage is None:
            sizes = await self._load_sizes(tenant)
            usage = TraceUsage(len(sizes), sum(sizes.values()))
        return usage, entry.version

    async def _load_sizes(self, tenant: str) -> dict[str, int]:
        """Return the bytes of all traces by id, oldest first. One whose size cannot be read counts as empty."""
        sizes: dict[str, int] = {}
        async for key, entry in scan_all(self._kv, f"{tenant}/trace_age/"):
            trace_id = key.rpartition("/")[2]
            sizes[trace_id] = 0
            with skipping_damaged(self._kv, key, "size of a trace"):
                sizes[trace_id] = int(entry.value)
        return sizes

    async def list(self, params: TraceListParams, *, tenant: str) -> Page[dict[str, Any]]:
        """Return a page of the tenant's traces without their spans, newest first by default, by the time at which they
        first came. A page may hold fewer than `limit` where few match. Raises InvalidRequest for an unknown
        `after`."""
        cursor = ""
        if params.after is not None:
            entry = await self._kv.get(trace_key(tenant, params.after))
            if entry is None:
                raise InvalidRequest("No trace has this id.", param="after", code="invalid_value")
            cursor = age_key(tenant, decode_record(entry, TraceRecord).created_at, params.after)
        if params.response_id is not None:
            return await self._list_of_response(params, params.response_id, cursor, tenant)
        data: list[dict[str, Any]] = []
        last_id, read_rows = None, 0
        async for trace_id, record in self._read_records(tenant, cursor, is_reversed=params.order == "desc"):
            if len(data) == params.limit or read_rows == _MAX_READ_ROWS:
                return Page(data, has_more=True, last_id=last_id)
            read_rows += 1
            last_id = trace_id
            if _matches(record, params):
                data.append(record.to_fields(trace_id))
        return Page(data, last_id=last_id)

    async def _read_records(
        self, tenant: str, cursor: str, *, is_reversed: bool
    ) -> AsyncGenerator[tuple[str, TraceRecord]]:
        prefix = f"{tenant}/trace_age/"
        after, before = ("", cursor) if is_reversed else (cursor, "")
        while rows := await self._kv.scan(prefix, after=after, before=before, limit=_BATCH_ROWS, reverse=is_reversed):
            for row in await self._load_records(tenant, [key.rpartition("/")[2] for key, _ in rows]):
                yield row
            after, before = ("", rows[-1][0]) if is_reversed else (rows[-1][0], "")

    async def _load_records(self, tenant: str, trace_ids: Sequence[str]) -> Sequence[tuple[str, TraceRecord]]:
        """Return those of the traces that are stored and can be read."""
        keys = [trace_key(tenant, trace_id) for trace_id in trace_ids]
        traces: list[tuple[str, TraceRecord]] = []
        for trace_id, key, entry in zip(trace_ids, keys, await self._kv.get_many(keys), strict=True):
            record = None if entry is None else decode_or_skip(self._kv, key, entry, TraceRecord)
            if record is not None:
                traces.append((trace_id, record))
        return traces

    async def _list_of_response(
        self, params: TraceListParams, response_id: str, cursor: str, tenant: str
    ) -> Page[dict[str, Any]]:
        """Return a page of the traces that have a span of one response: nearly always one."""
        rows = await self._kv.scan(response_key(tenant, response_id), limit=_MAX_READ_ROWS)
        records = await self._load_records(tenant, [key.rpartition("/")[2] for key, _ in rows])
        matches = [
            (age_key(tenant, record.created_at, trace_id), record.to_fields(trace_id))
            for trace_id, record in records
            if _matches(record, params)
        ]
        is_reversed = params.order == "desc"
        matches.sort(key=itemgetter(0), reverse=is_reversed)
        data = [trace for key, trace in matches if not cursor or (key < cursor if is_reversed else key > cursor)]
        return Page(data[: params.limit], has_more=len(data) > params.limit)

    async def get(self, trace_id: str, *, tenant: str) -> TraceDetail:
        """Return a trace with its spans. Raises NotFound."""
        record = await self._load_record(trace_id, tenant)
        spans: list[bytes] = []
        async for _, entry in scan_all(self._kv, span_key(tenant, trace_id)):
            spans.append(entry.value)
        with reading_stored(trace_id):
            if record.size_bytes > _THREAD_BYTES:
                spans = await asyncio.to_thread(_sort_spans, spans)
            else:
                spans = _sort_spans(spans)
        return TraceDetail(record.to_fields(trace_id), spans)

    async def delete(self, trace_id: str, *, tenant: str) -> None:
        """Delete a trace with its spans. Raises NotFound."""
        if not _TRACE_ID.fullmatch(trace_id) or await self._kv.get(trace_key(tenant, trace_id)) is None:
            raise _not_found()
        await self._delete_stored(tenant, trace_id)

    async def _load_record(self, trace_id: str, tenant: str) -> TraceRecord:
        entry = await self._kv.get(trace_key(tenant, trace_id)) if _TRACE_ID.fullmatch(trace_id) else None
        if entry is None:
            raise _not_found()
        return decode_record(entry, TraceRecord)

    async def _delete_stored(self, tenant: str, trace_id: str) -> None:
        """Delete a trace, then its spans: those of a process that ends in between expire."""

        async def attempt() -> bool:
            entry = await self._kv.get(trace_key(tenant, trace_id))
            if entry is None:
                return True
            ops = await self._deletion_ops(tenant, trace_id, entry)
            return await self._kv.write(ops, durable=False) is not None

        await repeat_until_true(attempt)
        await delete_all(self._kv, span_key(tenant, trace_id), page_size=_READ_SPANS)

    async def _deletion_ops(self, tenant: str, trace_id: str, entry: Entry) -> Sequence[Op]:
        """Return the operations that delete a trace, whose record may be damaged, but not its spans."""
        usage, usage_version = await self._load_usage(tenant)
        record = decode_or_skip(self._kv, trace_key(tenant, trace_id), entry, TraceRecord)
        if record is None:
            sizes = await self._load_sizes(tenant)
            size = sizes.get(trace_id, 0)
            prefix = f"{tenant}/trace_age/"
            related = [key async for key, _ in scan_all(self._kv, prefix) if key.endswith(f"/{trace_id}")]
        else:
            size = record.size_bytes
            related = [age_key(tenant, record.created_at, trace_id)]
            related += [response_key(tenant, name, trace_id) for name in record.response_ids]
        usage = TraceUsage(max(0, usage.traces - 1), max(0, usage.size_bytes - size))
        return [
            Delete(trace_key(tenant, trace_id), entry.version),
            *(Delete(key) for key in related),
            Put(usage_key(tenant), encode_record(usage), expect=usage_version),
        ]


def _not_found() -> NotFound:
    return NotFound("No trace has this id.", param="trace_id")


def _encode_items(
    request: IngestTraces,
) -> tuple[Sequence[tuple[IngestedTrace, bytes]], Sequence[tuple[IngestedSpan, bytes]]]:
    """Return the traces with the JSON of their metadata, and the spans with theirs; of two with one id the last. Raises
    InvalidRequest for one that is too large."""
    traces: dict[str, tuple[IngestedTrace, bytes]] = {}
    spans: dict[tuple[str, str], tuple[IngestedSpan, bytes]] = {}
    for position, item in enumerate(request.data):
        if isinstance(item, IngestedTrace):
            traces[item.id] = item, metadata_to_json(item, position)
        else:
            spans[item.trace_id, item.id] = item, span_to_json(item, position)
    return [*traces.values()], [*spans.values()]


def _matches(record: TraceRecord, params: TraceListParams) -> bool:
    return params.group_id in (None, record.group_id) and params.workflow_name in (None, record.workflow_name)


def _sort_spans(spans: Sequence[bytes]) -> list[bytes]:
    """Return the spans in the order of their starts."""
    decoder = msgspec.json.Decoder(StoredSpan)

    def find_start(span_json: bytes) -> tuple[int, str]:
        span = decoder.decode(span_json)
        return to_unix_ns(span.started_at) if span.started_at else 0, span.id

    return sorted(spans, key=find_start)
