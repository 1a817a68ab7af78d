"""StoredLimiter: the limits of projects in the KVStore."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from apis.accounts.limits import LIMIT_FIELDS, ORGANIZATION, WHOLE_PROJECT, RateLimit, unbounded_value
from apis.accounts.requests import UpdateRateLimit
from apis.errors import InvalidRequest
from apis.storage.keys import is_safe_id
from apis.storage.kv_store import ABSENT, Entry, KVStore, Op, Put
from apis.storage.records import decode_record, encode_record
from providers.accounts.audit_log import StoredAuditLog
from providers.accounts.records import ORGANIZATION_ID, limits_key, load_project_with
from providers.common.state.change import write_prepared

_MAX_LIMITS: Final = 1000
LimitTable = dict[str, RateLimit]


class StoredLimiter:
    """The limits of each project in one record, which is read together with a key. `Meter` counts under them."""

    def __init__(self, kv_store: KVStore, audit_log: StoredAuditLog) -> None:
        self._kv = kv_store
        self._audit = audit_log

    async def list_limits(self, project_id: str | None) -> LimitTable:
        """Return the limits of the project by their subjects. Raises NotFound."""
        return read_limits((await self._load(project_id))[0])

    async def set_limit(self, project_id: str, subject: str, update: UpdateRateLimit) -> RateLimit:
        """Change the limit of a subject; it holds everywhere within MAX_KEY_AGE_S. Raises NotFound, and InvalidRequest
        for more limits than a project may have."""
        if not is_safe_id(subject) or subject == ORGANIZATION:
            raise InvalidRequest("A limit is for '*', a model or 'key:KEY_ID'.", param="rate_limit_id")
        if update.max_stored_bytes is not None and subject != WHOLE_PROJECT:
            raise InvalidRequest("Stored bytes are limited for a whole project: 'rl-*'.", param="max_stored_bytes")

        def change(limits: LimitTable) -> RateLimit:
            limits[subject] = limit = _apply(limits.get(subject, RateLimit()), update)
            if len(limits) > _MAX_LIMITS:
                raise InvalidRequest(f"A project has at most {_MAX_LIMITS} limits.", param="rate_limit_id")
            return limit

        return await self.change_limits(project_id, change, f"rl-{subject}", update.model_dump(exclude_none=True))

    async def change_limits(
        self,
        project_id: str | None,
        change: Callable[[LimitTable], RateLimit],
        resource_id: str,
        requested: Mapping[str, Any],
    ) -> RateLimit:
        """Store the limits of a project, or of all projects together, as `change` leaves them, and return what it
        returns. The audit log records what was requested of the resource. Raises NotFound and Overloaded."""
        limit = RateLimit()

        async def prepare() -> list[Op]:
            nonlocal limit
            entry, key = await self._load(project_id)
            limits = read_limits(entry)
            limit = change(limits)
            put = Put(key, encode_record(limits), expect=ABSENT if entry is None else entry.version)
            changes = {"changes_requested": {**requested}}
            return [put, self._audit.put("rate_limit.updated", resource_id, project_id, changes)]

        await write_prepared(self._kv, prepare)
        return limit

    async def _load(self, project_id: str | None) -> tuple[Entry | None, str]:
        if project_id is None:
            key = limits_key(ORGANIZATION_ID)
            return await self._kv.get(key), key
        return (await load_project_with(self._kv, project_id, limits_key))[1], limits_key(project_id)


def read_limits(entry: Entry | None) -> LimitTable:
    """Return the limits in the record of a project, by subject."""
    return {} if entry is None else decode_record(entry, LimitTable)


def _apply(limit: RateLimit, update: UpdateRateLimit) -> RateLimit:
    sent: dict[str, int | None] = {field: getattr(update, name) for name, field in LIMIT_FIELDS.items()}
    changes = {
        field: None if value >= unbounded_value(field) else value for field, value in sent.items() if value is not None
    }
    return replace(limit, **changes)
