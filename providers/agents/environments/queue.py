"""EnvironmentQueue: prepares, connects, suspends and expires environments, on any worker."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from apis.confinement.commands import CommandEvent, ShellCommand
from apis.containers import Containers
from apis.errors import AgentNotFound, NotFound, Overloaded, RateLimited, StackError, StoreUnavailable
from apis.fair_share import FairShare, Tenants
from apis.storage.kv_store import Delete
from providers.agents.environments.hosted import HostedEnvironments, note_restored
from providers.agents.environments.records import (
    ENDED,
    LIVE,
    EnvironmentRecord,
    EnvironmentRef,
)
from providers.agents.environments.specs import list_setup_commands
from providers.agents.environments.store import EnvironmentChange, EnvironmentStore
from providers.agents.transition import Transition
from providers.agents.work import ENVIRONMENT_PREFIX
from providers.common.due_rows import list_due_rows
from providers.common.jobs import Claim, Job, JobQueue, JobRecord, LeasedJobs
from providers.common.state.worker_signs import WorkerSign

_log = logging.getLogger(__name__)
_MAX_PLACES: Final = 16
_CLOSE_TIMEOUT_S: Final = 3.0
_MAX_WAIT_S: Final = 3600.0
"""Seconds that an environment may wait for a place."""
_MAX_SHOWN_OUTPUT: Final = 1000
_SETUP_FAILED: Final = "a setup command failed"


class _Failed(Exception):
    """An environment cannot be prepared. The text says why."""


@dataclass(frozen=True, slots=True)
class QueueTimes:
    """Times of the queue in seconds: an environment that waits for a worker that has ended goes on after `lease_s`, and
    the checkpoint of one is deleted `expiry_s` after it was suspended."""

    lease_s: float
    retry_s: float
    poll_s: float
    expiry_s: float


class EnvironmentQueue(JobQueue[EnvironmentRef, JobRecord]):
    """The environments of a store that have something to do now."""

    title = "environments of sessions"

    def __init__(
        self,
        environments: HostedEnvironments,
        containers: Containers,
        sign: WorkerSign,
        tenants: Tenants,
        times: QueueTimes,
    ) -> None:
        places = FairShare(self.title, _MAX_PLACES, several_tenants=tenants.are_several)
        super().__init__(environments.kv, JobRecord, places, retry_s=times.retry_s)
        self._environments = environments
        self._store: EnvironmentStore = environments.store
        self._workspaces = environments.workspaces
        self._containers = containers
        self._lease_s = times.lease_s
        self._expiry_s = times.expiry_s
        self._jobs = LeasedJobs(self, sign, times.poll_s)

    def start(self) -> None:
        """Begin to look for environments."""
        self._jobs.start()

    def wake(self) -> None:
        """Look for environments now."""
        self._jobs.wake()

    async def close(self) -> None:
        """Stop; unfinished work is released to other workers."""
        await self._jobs.close(_CLOSE_TIMEOUT_S)

    async def list_waiting(self) -> AsyncGenerator[Job[EnvironmentRef]]:
        async with aclosing(list_due_rows(self.kv, ENVIRONMENT_PREFIX, time.time())) as rows:
            async for tenant, environment_id, key, entry in rows:
                ref = EnvironmentRef(tenant, environment_id)
                yield Job(tenant, ref, ref.lease_key, self._lease_s, key, entry)

    async def run(self, claim: Claim[EnvironmentRef, JobRecord]) -> None:
        ref = claim.subject
        try:
            record = await self._store.load(ref)
            if record.due_key != claim.job.key:
                await claim.lease.release([Delete(claim.job.key)])
                return
            await self._work(claim, ref, record)
        except AgentNotFound:  # it was deleted meanwhile, perhaps before it had the workspace
            await self._workspaces.end(ref.workspace_id, tenant=ref.tenant)
            await claim.lease.release([Delete(claim.job.key)])

    async def fail(self, claim: Claim[EnvironmentRef, JobRecord], lost_workers: int) -> None:
        await self._store.change(claim.subject, self._give_up)

    def _give_up(self, change: EnvironmentChange) -> bool:
        """Fail an environment that is new, or that a turn waits for. An idle one keeps what was saved of it, and is
        tried again later."""
        if change.record.status == "pending" or change.record.is_wanted:
            return self._fail(change, "The workers that prepared it ended.")
        change.record.due_at = time.time() + self._environments.idle_s
        return True

    async def _work(
        self, claim: Claim[EnvironmentRef, JobRecord], ref: EnvironmentRef, record: EnvironmentRecord
    ) -> None:
        is_awaited = record.status == "pending" or record.is_wanted
        try:
            if record.status == "pending":
                await self._prepare(claim, ref)
            elif record.is_wanted and record.status in (*LIVE, "suspended"):
                await self._connect(ref, record)
            elif record.status in LIVE:
                await self._suspend(claim, ref, record)
            elif record.status == "suspended" and record.is_ending:
                await self._end_workspace(ref)
            elif record.status == "suspended":
                await self._store.change(ref, lambda change: self._expire(change, ref))
            elif record.status in ENDED and not record.session_id:
                await self._environments.delete(ref)
                await claim.lease.release()
            else:
                await self._store.change(ref, self._rest)
        except (Overloaded, RateLimited, StoreUnavailable):
            if not is_awaited or time.time() - max(record.wanted_at, record.created_at) < _MAX_WAIT_S:
                raise
            await self._store.change(ref, lambda change: self._fail(change, "There was no room for it."))
        except AgentNotFound:
            raise
        except (_Failed, StackError) as exc:
            if not is_awaited:  # an idle one keeps what was saved of it, and is tried again
                raise
            message = exc.message if isinstance(exc, StackError) else str(exc)
            # a command may print what is confidential: the client reads it, and no log has it
            _log.warning("an environment cannot be used: %s", message if isinstance(exc, StackError) else _SETUP_FAILED)
            await self._store.change(ref, lambda change: self._fail(change, message))

    async def _prepare(self, claim: Claim[EnvironmentRef, JobRecord], ref: EnvironmentRef) -> None:
        """Make the workspace of a new environment, and run its setup, from the beginning."""
        configuration = await self._environments.load_configuration(ref)
        await self._workspaces.end(ref.workspace_id, tenant=ref.tenant)  # a worker may have ended in the middle
        record = await self._store.load(ref)
        await self._environments.restore_workspace(ref, record, is_lossy=False)
        commands = list_setup_commands(configuration)
        try:
            for command in commands:
                await self._run_setup(ref, command)
            claim.lease.check()
            if commands or configuration.files:
                await self._environments.save_workspace(ref, record)
        except NotFound as exc:
            raise Overloaded("The workspace was lost while it was prepared.") from exc
        await self._store.change(ref, self._note_ready)

    def _note_ready(self, change: EnvironmentChange) -> bool:
        record = change.record
        if record.status != "pending":
            return False
        change.set_status("ready")
        if record.is_wanted:
            change.connect()
        record.used_at = time.time()
        record.due_at = record.used_at + self._environments.idle_s
        return True

    async def _run_setup(self, ref: EnvironmentRef, command: str) -> None:
        """Run one command. Raises _Failed, with the end of its output, where it does not succeed."""
        events: list[CommandEvent] = []
        await self._containers.run_commands(ref.workspace_id, [ShellCommand(command)], events.append, tenant=ref.tenant)
        if not events or events[-1].exit_code != 0:
            code = events[-1].exit_code if events else None
            output = "".join(event.stdout + event.stderr for event in events)[-_MAX_SHOWN_OUTPUT:].strip()
            ended = "took too long" if code is None else f"ended with the exit code {code}"
            raise _Failed(f"A setup command {ended}: {output}")

    async def _connect(self, ref: EnvironmentRef, record: EnvironmentRecord) -> None:
        is_restored = False
        if not await self._workspaces.exists(ref.workspace_id, tenant=ref.tenant):
            is_restored = await self._environments.restore_workspace(ref, record, is_lossy=False)

        def note(change: EnvironmentChange) -> bool:
            if is_restored:
                note_restored(change, self._environments.idle_s)
            change.connect()
            change.record.wanted_at = 0.0
            change.record.due_at = time.time() + self._environments.idle_s
            return True

        await self._store.change(ref, note)

    async def _suspend(
        self, claim: Claim[EnvironmentRef, JobRecord], ref: EnvironmentRef, record: EnvironmentRecord
    ) -> None:
        """Save and end the workspace of an environment that has not been used for long."""
        session = await self._store.load_session(ref, record)
        idle_until = _idle_until(record, self._environments.idle_s, session and session.state.last_active_at)
        now = time.time()
        if _is_used(session) or idle_until > now:
            due_at = idle_until if idle_until > now else now + self._environments.idle_s
            await self._store.change(ref, lambda change: _postpone(change, due_at))
            return
        if record.added and await self._workspaces.exists(ref.workspace_id, tenant=ref.tenant):
            await self._environments.save_workspace(ref, record)
        claim.lease.check()

        def note(change: EnvironmentChange) -> bool:
            if change.record.is_wanted or _is_used(change.session):
                return False
            change.set_status("suspended")
            change.record.is_ending, change.record.due_at = True, time.time()
            return True

        suspended = await self._store.change(ref, note)
        if suspended.status == "suspended":
            await asyncio.shield(self._end_workspace(ref))

    async def _end_workspace(self, ref: EnvironmentRef) -> None:
        """End the workspace of an environment that is suspended. A worker that ends before leaves this to the next
        one."""
        await self._workspaces.end(ref.workspace_id, tenant=ref.tenant)

        def note(change: EnvironmentChange) -> bool:
            record = change.record
            if record.status != "suspended" or not record.is_ending:
                return False
            record.is_ending = False
            if not record.is_wanted:
                record.due_at = time.time() + self._expiry_s
            return True

        await self._store.change(ref, note)

    def _rest(self, change: EnvironmentChange) -> bool:
        """Let an environment wait for its session. One that has ended without a session is deleted some days later."""
        record = change.record
        is_left = record.status in ENDED and not record.session_id
        record.due_at, record.is_wanted = time.time() + self._expiry_s if is_left else None, False
        return True

    def _expire(self, change: EnvironmentChange, ref: EnvironmentRef) -> bool:
        record = change.record
        if record.status != "suspended" or record.is_wanted:
            return False
        change.set_status("expired")
        change.ops += [Delete(ref.checkpoint_key), *(Delete(ref.added_key(number)) for number in record.added)]
        record.has_checkpoint, record.added = False, []
        return self._rest(change)

    def _fail(self, change: EnvironmentChange, message: str) -> bool:
        change.set_status("failed", {"type": "environment_error", "code": "sandbox_error", "message": message})
        change.fail_turn(f"The environment of the session failed: {message}")
        return self._rest(change)


def _is_used(session: Transition | None) -> bool:
    """Return True while an agent of the session works."""
    if session is None:
        return False
    turn, subagents = session.state.turn, session.state.subagents.values()
    return (turn is not None and turn.status != "waiting") or any(
        each.turn_id and not each.has_actions for each in subagents
    )


def _idle_until(record: EnvironmentRecord, idle_s: float, last_active_at: int | None) -> float:
    return max(record.used_at, last_active_at or 0.0) + idle_s


def _postpone(change: EnvironmentChange, due_at: float) -> bool:
    if change.record.is_wanted or change.record.status not in LIVE:
        return False
    change.record.due_at = due_at
    return True
