"""EnvironmentStore: loads environments, and writes each change of one with its events and webhooks in one step."""

from collections.abc import Callable, Sequence
from typing import Any, Final

from apis.errors import AgentNotFound
from apis.storage.kv_store import Op, Put
from apis.storage.records import decode_record, encode_record
from apis.webhooks import Webhooks
from providers.agents.environments.records import (
    EnvironmentRecord,
    EnvironmentRef,
    EnvironmentStatus,
    Json,
    move_due,
    show_state,
)
from providers.agents.records import SessionRef
from providers.agents.store import SessionStore
from providers.agents.transition import Transition
from providers.common.jobs import JobRecord
from providers.common.state.change import write_prepared

_EARLY_WEBHOOKS: Final = ("ready", "failed")
"""Statuses of which webhooks hear while the environment has no session, whose events say them."""
_WEBHOOKS: Final = ("suspended", "expired")


class EnvironmentChange:
    """One change of an environment, and of its session where it has one."""

    def __init__(self, ref: EnvironmentRef, record: EnvironmentRecord, session: Transition | None) -> None:
        self.ref = ref
        self.record = record
        self.session = session
        self.ops: list[Op] = []
        self.webhooks: list[str] = []

    def set_status(self, status: EnvironmentStatus, error: Json | None = None) -> None:
        """Give the environment another status, with its event."""
        self.record.status, self.record.error = status, error
        self._emit(status, environment=show_state(self.ref, self.record))
        if status in _WEBHOOKS or (status in _EARLY_WEBHOOKS and self.session is None):
            self.webhooks.append(f"agent.environment.{status}")

    def reset(self) -> None:
        """Count a workspace that was replaced, with changes that are lost."""
        self.record.reset_count += 1
        self._emit("reset", environment_id=self.ref.id, reset_count=self.record.reset_count)

    def connect(self) -> None:
        """Let the turn that waits for the environment go on."""
        if self.record.status != "connected" and self.session is not None:
            self.set_status("connected")
        self.record.is_wanted = self.record.is_ending = False
        self.wake_turn()

    def wake_turn(self) -> None:
        """Let a worker drive the turn of the session, if it has one that works, and those of its subagents."""
        if self.session is None:
            return
        turn = self.session.state.turn
        refs = [self.session.ref] if turn is not None and turn.status == "in_progress" else []
        for subagent_id, subagent in self.session.state.subagents.items():
            if subagent.turn_id and not subagent.has_actions:
                refs.append(self.session.ref.subagent(subagent_id))
        for ref in refs:
            self.session.put(ref.job_key, encode_record(JobRecord()))

    def fail_turn(self, message: str) -> None:
        """End the turn that waits for the environment. Those of subagents see by themselves that it failed."""
        self.wake_turn()
        turn = self.session.state.turn if self.session is not None else None
        if self.session is not None and turn is not None and turn.status == "in_progress":
            self.session.end_turn("failed", {"code": "sandbox_error", "message": message})

    def _emit(self, name: str, **fields: Any) -> None:
        if self.session is not None:
            turn = self.session.state.turn
            ids = {"session_id": self.session.ref.id, "turn_id": None if turn is None else turn.id}
            self.session.emit(f"agent.session.environment.{name}", **ids, **fields)


Edit = Callable[[EnvironmentChange], bool]
"""Changes an environment, and returns False if nothing is to be written. It may run several times."""


class EnvironmentStore:
    """The environments of one store."""

    def __init__(self, sessions: SessionStore, webhooks: Webhooks) -> None:
        self.kv = sessions.kv
        self.sessions = sessions
        self._webhooks = webhooks

    async def forget_deliveries(self, ref: EnvironmentRef) -> None:
        """Delete the log of the webhook deliveries of an environment."""
        await self._webhooks.forget_deliveries(ref.id, tenant=ref.tenant)

    async def load(self, ref: EnvironmentRef) -> EnvironmentRecord:
        """Return an environment. Raises AgentNotFound."""
        entry = await self.kv.get(ref.key)
        if entry is None:
            raise environment_not_found()
        return decode_record(entry, EnvironmentRecord)

    async def load_session(self, ref: EnvironmentRef, record: EnvironmentRecord) -> Transition | None:
        """Return the session of an environment; None where it has none."""
        if not record.session_id:
            return None
        try:
            return await self.sessions.load(SessionRef(ref.tenant, record.session_id))
        except AgentNotFound:
            return None

    async def change(self, ref: EnvironmentRef, edit: Edit) -> EnvironmentRecord:
        """Change an environment and return it as it is then. Raises AgentNotFound, Overloaded, and what `edit`
        raises."""
        changed: EnvironmentChange | None = None
        ops: list[Op] = []

        async def prepare() -> Sequence[Op] | None:
            nonlocal changed, ops
            entry = await self.kv.get(ref.key)
            if entry is None:
                raise environment_not_found()
            record = decode_record(entry, EnvironmentRecord)
            changed = EnvironmentChange(ref, record, await self.load_session(ref, record))
            if not edit(changed):
                ops = []
                return None
            ops = [*changed.ops, *move_due(ref, record)]
            for event in changed.webhooks:
                ops += await self._webhooks.event_ops(event, ref.id, ref.tenant, {})
            if changed.session is not None and changed.session.has_changes:
                ops += await self.sessions.build_ops(changed.session)
            ops.append(Put(ref.key, encode_record(record), None, entry.version))
            return ops

        await write_prepared(self.kv, prepare)
        assert changed is not None  # it was prepared at least once
        if ops and changed.session is not None and changed.session.has_changes:
            self.sessions.announce(changed.session, ops)
        else:
            self._webhooks.wake(ops)
        return changed.record


def environment_not_found(param: str = "environment_id") -> AgentNotFound:
    """Return the error of an id that no environment of the tenant has."""
    return AgentNotFound("No environment has this id.", param=param)
