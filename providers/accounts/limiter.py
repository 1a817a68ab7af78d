"""StoredLimiter: the limits of projects in the KVStore."""

from dataclasses import replace
from typing import Final

from apis.accounts.limits import (
    LIMIT_FIELDS,
    ORGANIZATION,
    WHOLE_PROJECT,
    Limiter,
    RateLimit,
    UpdateRateLimit,
    unbounded_value,
)
from apis.errors import InvalidRequest, NotFound, Overloaded
from apis.storage.keys import is_safe_id
from apis.storage.kv_store import ABSENT, Entry, KVStore, Put
from apis.storage.records import decode_record, encode_record
from providers.accounts.audit_log import StoredAuditLog
from providers.accounts.records import limits_key, project_key

_ATTEMPTS: Final = 200
_MAX_LIMITS: Final = 1000
LimitTable = dict[str, RateLimit]


class StoredLimiter(Limiter):
    """The limits of each project in one record, which is read together with a key."""

    def __init__(self, kv_store: KVStore, audit_log: StoredAuditLog) -> None:
        self._kv = kv_store
        self._audit = audit_log

    async def list_limits(self, project_id: str) -> LimitTable:
        return read_limits((await self._load(project_id))[0])

    async def set_limit(self, project_id: str, subject: str, update: UpdateRateLimit) -> RateLimit:
        if not is_safe_id(subject) or subject == ORGANIZATION:
            raise InvalidRequest("A limit is for '*', a model or 'key:KEY_ID'.", param="rate_limit_id")
        if update.max_stored_bytes is not None and subject != WHOLE_PROJECT:
            raise InvalidRequest("Stored bytes are limited for a whole project: 'rl-*'.", param="max_stored_bytes")
        for _ in range(_ATTEMPTS):
            entry, key = await self._load(project_id)
            limits = read_limits(entry)
            limits[subject] = limit = _apply(limits.get(subject, RateLimit()), update)
            if len(limits) > _MAX_LIMITS:
                raise InvalidRequest(f"A project has at most {_MAX_LIMITS} limits.", param="rate_limit_id")
            version = ABSENT if entry is None else entry.version
            changes = {"changes_requested": update.model_dump(exclude_none=True)}
            record = self._audit.put("rate_limit.updated", f"rl-{subject}", project_id, changes)
            if await self._kv.write([Put(key, encode_record(limits), expect=version), record]) is not None:
                return limit
        raise Overloaded("Others are changing the same limits. Try again.", retry_after_s=1)

    async def _load(self, project_id: str) -> tuple[Entry | None, str]:
        name = project_id if is_safe_id(project_id) and "/" not in project_id else "."
        project, limits = await self._kv.get_many((project_key(name), limits_key(name)))
        if project is None:
            raise NotFound(f"No project found with id '{project_id[:128]}'.")
        return limits, limits_key(name)


def read_limits(entry: Entry | None) -> LimitTable:
    """Return the limits in the record of a project, by subject."""
    return {} if entry is None else decode_record(entry, LimitTable)


def _apply(limit: RateLimit, update: UpdateRateLimit) -> RateLimit:
    sent: dict[str, int | None] = {field: getattr(update, name) for name, field in LIMIT_FIELDS.items()}
    changes = {
        field: None if value >= unbounded_value(field) else value for field, value in sent.items() if value is not None
    }
    return replace(limit, **changes)
