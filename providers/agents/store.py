"""SessionStore: loads sessions, and writes each change of one with its events and webhooks in one step."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, nullcontext
from typing import Final, Protocol
from weakref import WeakValueDictionary

import orjson

from apis.agents.sessions import RequestKey
from apis.errors import AgentNotFound, InvalidRequest, StorageCorrupt
from apis.fair_share import Place
from apis.storage.kv_store import ABSENT, Entry, KVStore, Op, Put
from apis.storage.lease import Lease
from apis.storage.records import decode_record, delete_all
from apis.webhooks import Webhooks
from providers.agents.records import (
    PART_KINDS,
    ActiveTurn,
    Json,
    SessionRef,
    SessionState,
    StoredSession,
    TurnRecord,
    once_key,
)
from providers.agents.transition import Transition
from providers.common.state.change import repeat_until_true
from providers.common.state.event_logs import LogReader, LogWakeups
from providers.common.state.scan import skipping_damaged

Edit = Callable[[Transition], Awaitable[bool]]
"""Changes a session, and returns False if nothing is to be written. It may run several times."""
_ONCE_S: Final = 86_400.0
"""Seconds for which a request with an Idempotency-Key is remembered."""


class _Writers:
    """Those of this process that change one session, its subagents included: one after the other, because each change
    writes the state of the session. `last` is the mark of the one that has read or written it last: the writer itself,
    which has its writers, would be held with its session until a full collection of garbage."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.last: object = None


class TurnDrivers(Protocol):
    """The workers of this process that drive turns."""

    def wake(self) -> None:
        """Look for turns to drive now."""
        ...

    def reserve(self, session: Transition) -> Place | None:
        """Return a place for the turn that the change lets go on, whose next response is chosen then, if nothing has to
        come before it; None if the change lets none go on, or there is no place for it."""
        ...

    async def write(self, session: Transition, ops: Sequence[Op], place: Place) -> list[int] | None:
        """Write the change, and drive the turn from now on. Return the versions of `ops`; None if they were not
        written."""
        ...


class SessionStore:
    """The sessions of one store. Events are deleted `event_ttl_s` after they were written."""

    def __init__(self, kv: KVStore, webhooks: Webhooks, event_ttl_s: float) -> None:
        self.kv = kv
        self._webhooks = webhooks
        self._event_ttl_s = event_ttl_s
        self.logs = LogReader(kv, LogWakeups())
        self.drivers: TurnDrivers | None = None
        """None where this process drives no turns."""
        self._writers: WeakValueDictionary[tuple[str, str], _Writers] = WeakValueDictionary()

    def find_writers(self, ref: SessionRef) -> _Writers:
        """Return the writers of the session, or of that of the subagent."""
        return self._writers.setdefault((ref.tenant, ref.id), _Writers())

    async def load(self, ref: SessionRef) -> Transition:
        """Return the session, or the subagent of one, as it is now. Raises AgentNotFound."""
        root_ref = SessionRef(ref.tenant, ref.id)
        refs = [root_ref] if root_ref == ref else [root_ref, ref]
        keys = [key for each in refs for key in (each.session_key, each.state_key)]
        entries, is_stable = await self.kv.get_many(keys), False
        while True:
            try:
                return await self._build(refs, entries, skips_damaged=is_stable)
            except StorageCorrupt:
                if is_stable:
                    raise
            # a part may be gone only because the session has changed meanwhile
            previous, entries = entries, await self.kv.get_many(keys)
            is_stable = _list_versions(entries) == _list_versions(previous)

    async def _build(
        self, refs: Sequence[SessionRef], entries: Sequence[Entry | None], *, skips_damaged: bool
    ) -> Transition:
        root = session = await self._read(refs[0], entries[:2])
        if len(refs) > 1:
            session = await self._read(refs[1], entries[2:], root, holds_root=True)
        for subagent_id, subagent in root.state.subagents.items():
            if subagent.has_actions and subagent_id not in root.subagents:
                key = refs[0].subagent(subagent_id).state_key
                with skipping_damaged(self.kv, key, SessionState.__name__) if skips_damaged else nullcontext():
                    await self.load_subagent(root, subagent_id)
        return session

    async def load_subagent(self, root: Transition, subagent_id: str) -> Transition:
        """Return a subagent as a part of the change of its session. Raises AgentNotFound."""
        ref = root.ref.subagent(subagent_id)
        subagent = root.subagents.get(subagent_id)
        if subagent is None:
            subagent = await self._read(ref, await self.kv.get_many([ref.session_key, ref.state_key]), root)
        return subagent

    async def _read(
        self,
        ref: SessionRef,
        entries: Sequence[Entry | None],
        root: Transition | None = None,
        *,
        holds_root: bool = False,
    ) -> Transition:
        session, state_entry = entries
        if session is None or state_entry is None:
            raise subagent_not_found() if ref.subagent_id else session_not_found()
        record, state = decode_record(session, StoredSession), decode_record(state_entry, SessionState)
        parts = None if state.turn is None else await self._load_turn(ref, state.turn)
        transition = Transition(ref, record, state, state_entry.version, root, holds_root=holds_root)
        if parts is not None:
            transition.turn_record, transition.actions, transition.open_items = parts
        return transition

    async def _load_turn(
        self, ref: SessionRef, turn: ActiveTurn
    ) -> tuple[TurnRecord, dict[int, Json], dict[int, Json]]:
        """Return the record of the turn, its waiting calls, and its commands that run."""
        actions = {action.number: ref.action_key(action.number) for action in turn.actions}
        commands = {command.number: ref.item_key(command.number) for command in turn.commands}
        entries = await self.kv.get_many([ref.turn_key(turn.id), *actions.values(), *commands.values()])
        if None in entries:
            raise StorageCorrupt
        turn_entry, *part_entries = [entry for entry in entries if entry is not None]
        parts, count = [decode_record(entry, Json) for entry in part_entries], len(actions)
        return (
            decode_record(turn_entry, TurnRecord),
            dict(zip(actions, parts[:count], strict=True)),
            dict(zip(commands, parts[count:], strict=True)),
        )

    async def find_keyed(self, tenant: str, key: RequestKey | None) -> str:
        """Return the id of the session that a request with this key has reached before, empty where none has. Raises
        InvalidRequest for a key of another body."""
        entry = None if key is None else await self.kv.get(once_key(tenant, key.name))
        if key is None or entry is None:
            return ""
        session_id, _, digest = entry.value.decode().partition(" ")
        if digest != key.digest:
            raise InvalidRequest(
                "This Idempotency-Key was sent before with another body: use a new one.",
                param="Idempotency-Key",
                code="idempotency_key_reused",
            )
        return session_id

    async def change(self, ref: SessionRef, edit: Edit, *, key: RequestKey | None = None) -> Transition | None:
        """Change a session and return it as it was written; None where nothing was: by `edit`, or because the request
        with the key has reached the session before. Raises AgentNotFound, InvalidRequest for a key of another body,
        Overloaded, and what `edit` raises."""
        changed: Transition | None = None

        async def attempt() -> bool:
            nonlocal changed
            changed = None
            if await self.find_keyed(ref.tenant, key):
                return True
            session = await self.load(ref)
            session.touch()
            if not await edit(session):
                return True
            writers.last = None
            if not await self.write(session, key):
                return False
            changed = session
            return True

        writers = self.find_writers(ref)
        async with writers.lock:
            await repeat_until_true(attempt)
        return changed

    async def write(self, session: Transition, key: RequestKey | None = None, more: Sequence[Op] = ()) -> bool:
        """Write a change with `more`, and announce it; return False if it was not written, because something changed
        meanwhile. A turn that it lets go on is driven by this process from now on, if it has a place."""
        place = None if self.drivers is None else self.drivers.reserve(session)
        with ExitStack() as reserved:
            if place is not None:
                reserved.enter_context(place)
            ops = [*await self.build_ops(session, key), *more]
            reserved.pop_all()  # from now on it is that of the turn
        if self.drivers is None or place is None:
            versions = await self.kv.write(ops)
        else:
            versions = await self.drivers.write(session, ops, place)
        if versions is None:
            return False
        self.announce(session, ops, is_driven=place is not None)
        session.root.settle(versions)
        return True

    async def build_ops(self, transition: Transition, key: RequestKey | None = None) -> list[Op]:
        """Return the operations that write a change, with those of its webhooks and of the key of its request."""
        transition = transition.root
        ops = [*transition.build_ops(self._event_ttl_s), *keep_request(transition.ref.tenant, key, transition.ref.id)]
        for event, data in transition.webhooks:
            ops += await self._webhooks.event_ops(event, transition.ref.id, transition.ref.tenant, data)
        return ops

    def announce(self, transition: Transition, ops: Sequence[Op], *, is_driven: bool = False) -> None:
        """Wake the readers of a change that was written by `ops`, its webhooks, and a worker that it has work for,
        unless the turn `is_driven` already."""
        transition = transition.root
        number, batch = transition.event_batch()
        if batch:
            self.logs.wakeups.wake(transition.ref.id, number, batch)
        self._webhooks.wake(ops)
        if transition.has_work and not is_driven and self.drivers is not None:
            self.drivers.wake()

    async def read_inputs(self, session: Transition) -> list[Json]:
        """Return the items that the present response of the turn reads."""
        ref, state = session.ref, session.state
        keys = [ref.kept_key(number) for number in range(state.kept_inputs)]
        keys += [ref.input_key(number) for number in range(state.input_first, session.turn.input_end)]
        entries = await self.kv.get_many(keys) if keys else []
        if None in entries:
            raise StorageCorrupt
        return [orjson.loads(entry.value) for entry in entries if entry is not None]

    async def delete_parts(self, ref: SessionRef) -> None:
        """Delete all that a deleted session, or a subagent of one, has left."""
        for kind in PART_KINDS:
            await delete_all(self.kv, ref.prefix(kind))
        if not ref.subagent_id:
            await delete_all(self.kv, ref.event_prefix)
            await self._webhooks.forget_deliveries(ref.id, tenant=ref.tenant)
            self.logs.wakeups.wake(ref.id)


class HeldSession:
    """A session whose turn this process drives: it is read again only where another writer has changed it. What an edit
    leaves unwritten stays in memory, for the next one."""

    def __init__(self, store: SessionStore, ref: SessionRef, session: Transition | None = None) -> None:
        """`session` is the one that this process writes now, if it does."""
        self.ref = ref
        self.lease: Lease | None = None
        """That of the turn: the write after which the turn needs no worker releases it."""
        self._store = store
        self._writers = store.find_writers(ref)
        self._mark = object()
        self._session = session
        if session is not None:
            self._writers.last = self._mark

    async def load(self) -> Transition:
        """Return the session as it was last read or written here. Raises AgentNotFound."""
        if self._session is None:
            self._session, self._writers.last = await self._store.load(self.ref), self._mark
        return self._session

    async def refresh(self) -> Transition:
        """Return the session as it is now. Raises AgentNotFound."""
        session = self._session
        if session is not None:
            entry = await self._store.kv.get(self.ref.state_key)
            if entry is None or entry.version != session.version:
                self._session = None
        return await self.load()

    async def change(self, edit: Edit) -> Transition | None:
        """Change the session as `SessionStore.change` does, without reading it where it is as it was written here.
        Raises LeaseLost where the change ends the work of a lease that is lost."""
        changed: Transition | None = None

        async def attempt() -> bool:
            nonlocal changed
            session, self._session = await self.load(), None
            session.touch()
            if await edit(session):
                if not await self._write(session):
                    return False
                changed = session
            self._session = session
            return True

        async with self._writers.lock:
            if self._writers.last is not self._mark:
                self._session = None
            await repeat_until_true(attempt)
        return changed

    async def _write(self, session: Transition) -> bool:
        if self.lease is None or self.lease.is_relinquished or session.needs_worker:
            return await self._store.write(session)
        return await self.lease.release_with(lambda op: self._store.write(session, more=[op]))


def _list_versions(entries: Sequence[Entry | None]) -> list[int | None]:
    return [None if entry is None else entry.version for entry in entries]


def keep_request(tenant: str, key: RequestKey | None, reached_id: str) -> Sequence[Op]:
    """Return the operation that remembers what a request with an Idempotency-Key has reached."""
    if key is None:
        return ()
    return (Put(once_key(tenant, key.name), f"{reached_id} {key.digest}".encode(), _ONCE_S, ABSENT),)


def session_not_found(param: str = "session_id") -> AgentNotFound:
    """Return the error of an id that no session of the tenant has."""
    return AgentNotFound("No session has this id.", param=param)


def subagent_not_found(param: str = "subagent_id") -> AgentNotFound:
    """Return the error of an id that no subagent of the session has."""
    return AgentNotFound("No subagent of this session has this id.", param=param)
