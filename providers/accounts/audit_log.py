"""StoredAuditLog: records of administrative acts in the KVStore, ordered by their time."""

import secrets
import time
from collections.abc import Mapping
from typing import Any, Final

from apis.accounts.audit import CURRENT_ACTOR, AuditEvent, AuditLogQuery, AuditRecord
from apis.accounts.directory import Project
from apis.storage.keys import is_safe_id
from apis.storage.kv_store import ABSENT, KVStore, Put
from apis.storage.pages import Page
from apis.storage.records import encode_record
from providers.accounts.records import audit_key
from providers.common.state.scan import first_matches, scan_records

_ID_PREFIX: Final = "audit_log-"
_MAX_CLOCK_SKEW_S: Final = 3600
"""Seconds by which the time in a record's id may differ from the bounds of a query that skips by ids."""


class StoredAuditLog:
    """The records of a store, which expire after the retention; nothing here replaces or deletes one. Each is written
    in one atomic step with the act that it describes."""

    def __init__(self, kv_store: KVStore, retention_days: float) -> None:
        self._kv = kv_store
        self._ttl_s = retention_days * 86_400

    def put(
        self, event: AuditEvent, resource_id: str, project: Project | str | None, details: Mapping[str, Any]
    ) -> Put:
        """Return the operation that records an act of the current actor on the resource: to be written with the act.
        `project` is the project or its id, None for what belongs to no project."""
        project_id, name = (project.id, project.name) if isinstance(project, Project) else (project, None)
        record = AuditRecord(
            id=f"{_ID_PREFIX}{_time_part(time.time())}{secrets.token_hex(8)}",
            type=event,
            effective_at=int(time.time()),
            actor=CURRENT_ACTOR.get(),
            project_id=project_id,
            project_name=name,
            resource_ids=(resource_id,) if project_id in (None, resource_id) else (resource_id, str(project_id)),
            details={"id": resource_id, **details},
        )
        return Put(audit_key(record.id), encode_record(record), self._ttl_s, ABSENT)

    async def list_records(self, query: AuditLogQuery) -> Page[AuditRecord]:
        """Return a page of the records that the query admits, newest first; with `before` alone, those that come
        directly before it in this order. Raises StoreUnavailable."""
        is_backward = query.before is not None and query.after is None
        older_than, newer_than = _bounds(query)
        rows = scan_records(
            self._kv, audit_key(""), AuditRecord, after=newer_than, before=older_than, reverse=not is_backward
        )
        page = (await first_matches(rows, query.limit, query.admits)).map(lambda row: row.record)
        return Page([*reversed(page.data)], page.has_more) if is_backward else page


def _bounds(query: AuditLogQuery) -> tuple[str, str]:
    """Return the keys before and after which the records of a page are, as `scan` takes them."""
    end, first = query.effective_at.end, query.effective_at.first
    older_than = "" if end is None else audit_key(_id_at(end + _MAX_CLOCK_SKEW_S))
    newer_than = audit_key(_id_at(first - _MAX_CLOCK_SKEW_S)) if first else ""
    if query.after is not None:
        cursor = audit_key(query.after if is_safe_id(query.after) else "")
        older_than = min(cursor, older_than or cursor)
    if query.before is not None:
        newer_than = max(newer_than, audit_key(query.before if is_safe_id(query.before) else "~"))
    return older_than, newer_than


def _id_at(seconds: int) -> str:
    return f"{_ID_PREFIX}{_time_part(seconds)}"


def _time_part(seconds: float) -> str:
    """Return a time in microseconds, so that the acts of one request are in order."""
    return f"{int(max(0, seconds) * 1_000_000):014x}"
