"""StoredAutomations: the automations of tenants in the KVStore, and the records of their invocations.

    TENANT/automation/ID                        the automation
    TENANT/automation_target/AUTOMATION/NUMBER  its target, with what is confidential; one that it had before stays as
                                                long as an invocation waits with it
    TENANT/automation_invocation/AUTOMATION/ID  one of its invocations
    /automation_due/TIME/TENANT/AUTOMATION      the automation has something to do from TIME on, in ms of Unix time

Each change of an automation moves its due row in the same write, so that one row stands for all that it waits for: its
next time, or the delivery of its first invocation that is queued.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, Literal

import msgspec

from apis.agents.agents import AgentListParams
from apis.agents.automations import (
    AutomationListParams,
    CreateAutomation,
    UpdateAutomation,
)
from apis.batches.batches import BatchOwner
from apis.errors import AgentNotFound, Conflict, InvalidRequest
from apis.storage.keys import new_id_key, record_id
from apis.storage.kv_store import Delete, KVStore, Op, Put
from apis.storage.pages import Page
from apis.storage.records import decode_record, delete_all, encode_record, reading_stored
from apis.vaults.vaults import Vaults
from apis.wire.base import dump_sent
from providers.agents.schedules import check_schedule, find_last, list_next, load_zone
from providers.agents.sealed_store import SealedStore
from providers.agents.targets import Json, Target, parse_target, show_target
from providers.agents.work import AUTOMATION_PREFIX
from providers.common.due_rows import move_due_row
from providers.common.state.change import write_prepared
from providers.common.state.scan import list_records, read_page
from providers.common.state.tenant_records import TenantRecords

_MAX_TARGET_BYTES: Final = 1024 * 1024
_FIELDS: Final[Mapping[str, Sequence[str]]] = {"periodic": ("expression", "timezone"), "once": ("run_at",)}
"""The fields of a schedule by its kind."""
_SHOWN_TIMES: Final = 5
_MAX_QUEUED: Final = 10
"""Invocations of one automation that may wait for their delivery."""


class AutomationRecord(msgspec.Struct, kw_only=True):
    """An automation. `target` is what is shown of its target, whose number is `target_number`. `next_at` is its next
    time, None where there is none; `queued` are the ids of the invocations that wait for their delivery, oldest first,
    with the numbers of their targets, and `retry_at` is the time of the next attempt at the first of them."""

    name: str
    type: Literal["periodic", "once"]
    target: Json
    metadata: dict[str, str]
    created_at: int
    key_id: str
    expression: str = ""
    timezone: str = ""
    run_at: int = 0
    status: Literal["active", "paused", "completed"] = "active"
    pause_reason: str | None = None
    next_at: int | None = None
    target_number: int = 0
    queued: dict[str, int] = {}
    retry_at: float = 0.0
    due_key: str = ""

    @property
    def due_at(self) -> float | None:
        """The time from which the automation has something to do."""
        times = [*((self.next_at,) if self.next_at is not None else ()), *((self.retry_at,) if self.queued else ())]
        return min(times, default=None)


class InvocationRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One invocation. `automation` is a copy of what a schedule has invoked, empty for one by hand."""

    status: Literal["queued", "completed", "failed", "skipped"]
    created_at: int
    scheduled_at: int | None = None
    automation: Json = {}
    session_id: str | None = None
    response_id: str | None = None
    skip_reason: str | None = None
    error: dict[str, str] | None = None


Edit = Callable[[AutomationRecord, float], Sequence[Op] | None]
"""Changes an automation at a time, and returns what is written with it; None changes nothing. It raises the error of a
change that the automation does not allow, and may run several times, each on a record of its own."""


class StoredAutomations:
    """The automations of one store, of which a tenant may have `max_automations`. Invocations are kept for
    `retention_s`. `now` returns the time in seconds of Unix time."""

    def __init__(
        self,
        kv: KVStore,
        vaults: Vaults | None,
        *,
        max_automations: int,
        retention_s: float,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.kv = kv
        self._sealed = SealedStore(kv, vaults)
        self.retention_s = retention_s
        self.now = now
        self._max_automations = max_automations
        self._records = TenantRecords(kv, "automation", AutomationRecord, lambda _: _not_found("automation_id"))
        self.on_due: Callable[[], None] = lambda: None
        """Called when something has become due at once."""

    async def create(self, request: CreateAutomation, *, owner: BatchOwner) -> Json:
        """Create an automation, whose invocations have the rights of the owner's key. Raises InvalidRequest."""
        tenant = owner.tenant
        await self.kv.require_room(tenant)
        now, target = self.now(), _dump_bounded(request.target)
        record = AutomationRecord(
            name=request.name,
            type=request.type,
            target=show_target(request.target),
            metadata=dict(request.metadata or {}),
            created_at=int(now),
            key_id=owner.key_id,
        )
        for name in _FIELDS[request.type]:
            if getattr(request, name) is None:
                raise InvalidRequest(
                    f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter"
                )
            setattr(record, name, getattr(request, name))
        _refuse_fields(request, record.type)
        if record.type == "periodic":
            await load_zone(record.timezone)
        _plan(record, now)
        automation_id = f"automation_{new_id_key()}"
        ops = self._sealed.build_put(_target_key(tenant, automation_id, record.target_number), target)
        ops = [*ops, *move_due(record, tenant, automation_id)]
        await self._records.create(tenant, automation_id, record, self._max_automations, self._build_error, ops)
        return _show_planned(automation_id, record)

    async def get(self, automation_id: str, *, tenant: str) -> Json:
        """Return the automation. Raises AgentNotFound."""
        record, _ = await self.load(automation_id, tenant)
        await _load_zone(record)
        return _show_planned(automation_id, record)

    async def load(self, automation_id: str, tenant: str) -> tuple[AutomationRecord, int]:
        """Return the record of an automation, and its version. Raises AgentNotFound."""
        entry = await self._records.get(tenant, automation_id)
        return decode_record(entry, AutomationRecord), entry.version

    async def list(self, params: AutomationListParams, *, tenant: str) -> Page[Json]:
        """Return a page of automations; a filtered one may have fewer than there are, and then names the last one that
        was looked at. Raises AgentNotFound for an unknown cursor."""
        session_id = params.session_id
        return await self._records.list(
            tenant,
            params,
            lambda automation_id, record: _show_planned(automation_id, record, 1),
            accepts=None if session_id is None else lambda record: record.target.get("session_id") == session_id,
        )

    async def update(self, automation_id: str, request: UpdateAutomation, *, owner: BatchOwner) -> Json:
        """Change the fields that the request has, and return the automation; with another target, its invocations have
        the rights of the owner's key. Raises AgentNotFound and InvalidRequest."""
        tenant, target = owner.tenant, None if request.target is None else _dump_bounded(request.target)
        if request.timezone is not None:
            await load_zone(request.timezone)

        def edit(record: AutomationRecord, now: float) -> Sequence[Op]:
            _refuse_fields(request, record.type)
            if request.run_at is not None and record.next_at is None and record.status != "paused":
                raise InvalidRequest("The one time of this automation has come already.", param="run_at")
            if target is not None and target["type"] != record.target["type"]:
                raise InvalidRequest("The target of an automation keeps its type.", param="target.type")
            record.name = request.name or record.name
            record.metadata = record.metadata if request.metadata is None else dict(request.metadata)
            if request.expression or request.timezone or request.run_at is not None:
                record.expression = request.expression or record.expression
                record.timezone = request.timezone or record.timezone
                record.run_at = record.run_at if request.run_at is None else request.run_at
                _plan(record, now)
            if request.target is None or target is None:
                return ()
            former, record.target = record.target_number, show_target(request.target)
            record.key_id = owner.key_id
            record.target_number += 1
            put = self._sealed.build_put(_target_key(tenant, automation_id, record.target_number), target)
            return [*put, *self.build_target_end(record, former, tenant, automation_id)]

        return _show_planned(automation_id, await self.edit(automation_id, owner.tenant, edit))

    def build_target_end(self, record: AutomationRecord, number: int, tenant: str, automation_id: str) -> Sequence[Op]:
        """Return the operations that delete a target, unless the automation or an invocation of it still has it."""
        is_used = number == record.target_number or number in record.queued.values()
        return () if is_used else self._sealed.build_delete(_target_key(tenant, automation_id, number))

    async def load_target(self, automation_id: str, number: int, tenant: str) -> Target:
        """Return a target with what is confidential. Raises StorageCorrupt."""
        key = _target_key(tenant, automation_id, number)
        stored = await self._sealed.load(key)
        with reading_stored(key):
            return parse_target(stored)

    async def pause(self, automation_id: str, *, tenant: str) -> Json:
        """Have the schedule rest: its times pass without an invocation. Raises AgentNotFound and Conflict."""

        def edit(record: AutomationRecord, _now: float) -> Sequence[Op]:
            _require_unfinished(record)
            record.status, record.next_at = "paused", None
            return ()

        return _show_planned(automation_id, await self.edit(automation_id, tenant, edit))

    async def resume(self, automation_id: str, *, tenant: str) -> Json:
        """Have the schedule go on with its next time; the one time of an automation that has passed comes at once.
        Raises AgentNotFound and Conflict."""

        def edit(record: AutomationRecord, now: float) -> Sequence[Op]:
            _require_unfinished(record)
            if record.status == "paused":
                record.status, record.pause_reason = "active", None
                record.next_at = record.run_at if record.type == "once" else _next_time(record, now)
            return ()

        return _show_planned(automation_id, await self.edit(automation_id, tenant, edit))

    async def delete(self, automation_id: str, *, tenant: str) -> Json:
        """Delete an automation with the records of its invocations; those that are queued are not delivered. Raises
        AgentNotFound."""

        def delete_due(record: AutomationRecord | None) -> Sequence[Op]:
            # a worker deletes the due row of one that is damaged
            ops: list[Op] = [Delete(record.due_key)] if record is not None and record.due_key else []
            for number in () if record is None else {record.target_number, *record.queued.values()}:
                ops += self._sealed.build_delete(_target_key(tenant, automation_id, number))
            return ops

        await self._records.delete(tenant, automation_id, delete_due)
        await delete_all(self.kv, invocation_key(tenant, automation_id, ""))
        await delete_all(self.kv, _target_prefix(tenant, automation_id))  # of one that is damaged
        return {"id": automation_id, "deleted": True, "object": "agent.automation.deleted"}

    def _build_error(self, _count: int) -> InvalidRequest:
        return InvalidRequest(f"A project has at most {self._max_automations} automations.")

    async def delete_all(self, *, tenant: str) -> None:
        """Delete the automations of a tenant with their due rows, whose keys do not begin with its name."""
        prefix, after = self._records.key(tenant, ""), ""
        while rows := await list_records(self.kv, prefix, AutomationRecord, limit=10, after=after):
            for row in rows:
                with suppress(AgentNotFound):
                    await self.delete(row.key.removeprefix(prefix), tenant=tenant)
            after = rows[-1].key

    async def invoke(self, automation_id: str, *, tenant: str) -> Json:
        """Invoke an automation now, also one that rests, and return the invocation. Raises AgentNotFound, and
        Conflict while too many wait."""
        invocation_id, invocation = new_invocation_id(), InvocationRecord(status="queued", created_at=int(self.now()))

        def edit(record: AutomationRecord, now: float) -> Sequence[Op]:
            if len(record.queued) >= _MAX_QUEUED:
                raise Conflict(f"{_MAX_QUEUED} invocations of this automation wait for their delivery already.")
            if not record.queued:
                record.retry_at = now
            record.queued = {**record.queued, invocation_id: record.target_number}
            return [self.put_invocation(tenant, automation_id, invocation_id, invocation)]

        await self.edit(automation_id, tenant, edit)
        self.on_due()
        return _show_invocation(automation_id, invocation_id, invocation)

    async def get_invocation(self, automation_id: str, invocation_id: str, *, tenant: str) -> Json:
        """Return an invocation. Raises AgentNotFound."""
        record = await self.load_invocation(automation_id, invocation_id, tenant)
        if record is None:
            raise _not_found("invocation_id")
        return _show_invocation(automation_id, invocation_id, record)

    async def load_invocation(self, automation_id: str, invocation_id: str, tenant: str) -> InvocationRecord | None:
        """Return the record of an invocation; None where there is none."""
        entry = await self.kv.get(invocation_key(tenant, record_id(automation_id), record_id(invocation_id)))
        return None if entry is None else decode_record(entry, InvocationRecord)

    async def list_invocations(self, automation_id: str, params: AgentListParams, *, tenant: str) -> Page[Json]:
        """Return a page of the invocations of an automation. Raises AgentNotFound, also for an unknown cursor."""
        await self.load(automation_id, tenant)
        prefix, show = invocation_key(tenant, automation_id, ""), partial(_show_invocation, automation_id)
        return await read_page(self.kv, prefix, InvocationRecord, params, _not_found("after"), show)

    async def edit(self, automation_id: str, tenant: str, edit: Edit) -> AutomationRecord:
        """Change an automation, move its due row, and write what `edit` returns, all in one write. Return it as it
        is then. Raises AgentNotFound, and the errors of `edit`."""
        record: AutomationRecord | None = None

        async def prepare() -> Sequence[Op] | None:
            nonlocal record
            record, version = await self.load(automation_id, tenant)
            await _load_zone(record)
            also = edit(record, self.now())
            if also is None:
                return None
            moved = move_due(record, tenant, automation_id)
            return [Put(self._records.key(tenant, automation_id), encode_record(record), None, version), *moved, *also]

        await write_prepared(self.kv, prepare)
        assert record is not None  # it was prepared at least once
        return record

    def put_invocation(self, tenant: str, automation_id: str, invocation_id: str, invocation: InvocationRecord) -> Put:
        """Return the operation that stores an invocation."""
        key = invocation_key(tenant, automation_id, invocation_id)
        return Put(key, encode_record(invocation), self.retention_s)


def begin_occurrence(record: AutomationRecord, automation_id: str, now: float) -> tuple[str, InvocationRecord] | None:
    """Take the time that has come from an automation, plan the next one, and return the id and the record of its
    invocation; None if no time has come. Of several that have passed, as after a stop of all servers, only the last one
    is invoked. One is skipped while an earlier invocation waits for its delivery."""
    if record.next_at is None or record.next_at > now or record.status != "active":
        return None
    if record.type == "once":
        moment, record.next_at, record.status = record.next_at, None, "completed"
    else:
        moment = max(record.next_at, find_last(record.expression, record.timezone, now) or 0)
        record.next_at = _next_time(record, max(now, moment))
    snapshot = _show(automation_id, record)
    invocation = InvocationRecord(status="queued", created_at=int(now), scheduled_at=moment, automation=snapshot)
    if record.queued:
        invocation.status, invocation.skip_reason = "skipped", "pending_delivery"
    return new_invocation_id(), invocation


def move_due(record: AutomationRecord, tenant: str, automation_id: str) -> list[Op]:
    """Return the operations that move the due row of an automation to its time."""
    key, ops = move_due_row(AUTOMATION_PREFIX, tenant, automation_id, record.due_key, record.due_at)
    record.due_key = key
    return ops


def invocation_key(tenant: str, automation_id: str, invocation_id: str) -> str:
    """Return the key of an invocation; with an empty id, the beginning of those of all."""
    return f"{tenant}/automation_invocation/{automation_id}/{invocation_id}"


def new_invocation_id() -> str:
    """Return the id of a new invocation; ids sort in the order of their times."""
    return f"invocation_{new_id_key()}"


def _target_prefix(tenant: str, automation_id: str) -> str:
    return f"{tenant}/automation_target/{automation_id}/"


def _target_key(tenant: str, automation_id: str, number: int) -> str:
    return f"{_target_prefix(tenant, automation_id)}{number}"


async def _load_zone(record: AutomationRecord) -> None:
    """Load the time zone of a stored automation. Where this machine does not know it, another one may have taken it:
    the automation can still be seen and changed here, and its times come from those that know it."""
    if record.type == "periodic":
        with suppress(InvalidRequest):
            await load_zone(record.timezone)


def _refuse_fields(request: CreateAutomation | UpdateAutomation, kind: str) -> None:
    """Raise InvalidRequest for a field of a schedule of another kind."""
    for name in (name for other, names in _FIELDS.items() if other != kind for name in names):
        if getattr(request, name) is not None:
            raise InvalidRequest(f"An automation of the type '{kind}' has no '{name}'.", param=name)


def _plan(record: AutomationRecord, now: float) -> None:
    """Check the schedule of a record, and set its next time. Raises InvalidRequest."""
    if record.type == "once":
        if record.run_at <= now:
            raise InvalidRequest("'run_at' is in the past.", param="run_at")
    else:
        check_schedule(record.expression, record.timezone, now)
    if record.status != "paused":
        record.next_at = record.run_at if record.type == "once" else _next_time(record, now)


def _next_time(record: AutomationRecord, now: float) -> int | None:
    return next(iter(list_next(record.expression, record.timezone, now, 1)), None)


def _require_unfinished(record: AutomationRecord) -> None:
    if record.status == "completed":
        raise Conflict("This automation is completed: its one time has come.")


def _dump_bounded(target: Target) -> Json:
    """Return a target with what is confidential, to be stored."""
    dumped: Json = dump_sent(target)
    if len(encode_record(dumped)) > _MAX_TARGET_BYTES:
        raise InvalidRequest(f"The target is larger than {_MAX_TARGET_BYTES} bytes.", param="target")
    return dumped


def _not_found(param: str) -> AgentNotFound:
    return AgentNotFound("There is no such automation or invocation.", param=param)


def _show(automation_id: str, record: AutomationRecord) -> Json:
    fields: Json = {
        "id": automation_id,
        "object": "agent.automation",
        "type": record.type,
        "name": record.name,
        "status": record.status,
        "pause_reason": record.pause_reason,
        "target": record.target,
        "created_by": {"type": "developer"},
        "metadata": record.metadata,
        "created_at": record.created_at,
    }
    if record.type == "once":
        return {**fields, "run_at": record.run_at}
    return {**fields, "expression": record.expression, "timezone": record.timezone}


def _show_planned(automation_id: str, record: AutomationRecord, count: int = _SHOWN_TIMES) -> Json:
    """Return the automation with its next times, at most `count`: its time zone is loaded, where they are several. Only
    the next one is known where this machine does not know the time zone."""
    times = [] if record.next_at is None else [record.next_at]
    if times and count > 1 and record.type == "periodic":
        with suppress(InvalidRequest):
            times += list_next(record.expression, record.timezone, times[0], count - 1)
    return {**_show(automation_id, record), "next_times": times}


def _show_invocation(automation_id: str, invocation_id: str, record: InvocationRecord) -> Json:
    by_schedule = {"type": "automation", "automation": record.automation}
    fields: Json = {
        "id": invocation_id,
        "object": "agent.automation.invocation",
        "automation_id": automation_id,
        "status": record.status,
        "skip_reason": record.skip_reason,
        "source": by_schedule if record.automation else {"type": "manual"},
        "session_id": record.session_id,
        "scheduled_at": record.scheduled_at,
        "error": record.error,
        "created_at": record.created_at,
    }
    if record.response_id is not None:
        fields["response_id"] = record.response_id
    return fields
