"""Named Python sessions of this machine, and the records in the KVStore that say which machine has a session.

    /python-deployment       random id of the deployment, which all its workers have in common
    TENANT/container/HASH    of a session's name: the machine that has it, until the session can have expired

A record only explains why a session cannot be found: another machine has it, or this one lost it. Its session server
alone says which sessions there are.
"""

import asyncio
import hashlib
import os
import platform
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Concatenate, Final, Literal, TypeVar

import msgspec

from apis.confinement.commands import CommandEvent, ShellCommand
from apis.errors import NotFound, StackError, StoreUnavailable, Unsupported
from apis.storage.kv_store import ABSENT, Delete, KVStore, Put
from apis.workspaces import Restore
from providers.tool_runtime.python.egress.settings import EgressCounts
from providers.tool_runtime.python.operations import SessionInfo, SessionOperations, ended_message
from providers.tool_runtime.python.outcomes import CommandsOutcome, RunOutcome
from providers.tool_runtime.python.session_client import (
    Operation,
    P,
    R,
    SessionClient,
    SessionExpired,
    SessionNotFound,
)
from providers.tool_runtime.python.sessions import NO_CONTENTS, SessionContents, SessionSettings

OutcomeT = TypeVar("OutcomeT", RunOutcome, CommandsOutcome)
_DEPLOYMENT_KEY: Final = "/python-deployment"
_SERVER_ENDED: Final = "the server process that kept it has ended"


class SessionRecord(msgspec.Struct):
    """Record of a session: the machine that has it."""

    machine: str


class MachineSessions:
    """Calls the session server on sessions by tenant and name, and writes their records.

    A record is written to outlive twice the time that its session may be idle and the `max_use_s` of a use, and again
    with the first use after the idle time.
    """

    def __init__(self, client: SessionClient, kv: KVStore, max_use_s: float) -> None:
        self._client = client
        self._kv = kv
        self._max_use_s = max_use_s
        self.egress_counts = EgressCounts()
        self.restore: Restore | None = None
        """Makes a session that is gone again, if it can."""

    async def start(self) -> None:
        """Join the session server of this store's deployment. Raise ConfigError and StoreUnavailable."""
        await self._client.start(await self._load_deployment_id())

    async def close(self) -> None:
        """Leave the session server."""
        await self._client.close()

    @property
    def has_cgroup(self) -> bool:
        """True when a control group holds the memory and the processes of each session."""
        return self._client.has_cgroup

    async def create(
        self,
        tenant: str,
        name: str,
        settings: SessionSettings,
        contents: SessionContents = NO_CONTENTS,
        *,
        is_new_name: bool = False,
        loss_reason: str = "",
    ) -> bool:
        """Create a session; return False when there is one already. `is_new_name` when no other can have had it. A
        `loss_reason` says why an earlier one is gone, where its owner knows that.

        Raise Overloaded when there is no room, Unsupported when another machine has the session, and StoreUnavailable
        when its record cannot be written: then it is not created.
        """
        machine = None if is_new_name else await self._find_machine(tenant, name)
        if machine == "other":
            raise _elsewhere(name)
        loss_reason = loss_reason or (_SERVER_ENDED if machine == "this" and not settings.is_workspace else "")
        if not await self._client.call(SessionOperations.create, tenant, name, settings, loss_reason, contents):
            return False
        try:
            await self._write_record(tenant, name, settings.idle_s)
        except BaseException:
            with suppress(StackError):
                await self._client.call(SessionOperations.end, tenant, name)
            raise
        return True

    async def run(self, tenant: str, name: str, code: str, settings: SessionSettings) -> RunOutcome:
        """Run code in a session, which is created with the settings where there is none."""
        try:
            outcome = await self.call(SessionOperations.run, tenant, name, code)
        except SessionNotFound:
            await self.create(tenant, name, settings)
            outcome = await self.call(SessionOperations.run, tenant, name, code)
        return await self._note_use(tenant, name, outcome)

    async def run_commands(
        self, tenant: str, name: str, commands: list[ShellCommand], on_event: Callable[[CommandEvent], None]
    ) -> CommandsOutcome:
        """Run shell commands in a session. Raise as `call` does."""

        async def run() -> CommandsOutcome:
            return await self._client.call_with_events(
                SessionOperations.run_commands, (tenant, name), commands, on_event
            )

        outcome = await self._call_existing(tenant, name, run, self.restore)
        return await self._note_use(tenant, name, outcome)

    async def run_once(self, tenant: str, code: str, settings: SessionSettings) -> RunOutcome:
        """Run code in a session of its own, which no one else can use."""
        return await self._client.call(SessionOperations.run_once, tenant, settings, code)

    async def list_sessions(self, tenant: str) -> list[SessionInfo]:
        """Return the named sessions of a tenant on this machine, oldest first."""
        return await self._client.call(SessionOperations.list_sessions, tenant)

    async def end(self, tenant: str, name: str) -> None:
        """End a session."""

        async def run() -> None:
            await self._client.call(SessionOperations.end, tenant, name)

        await self._call_existing(tenant, name, run, restore=None)
        with suppress(StoreUnavailable):
            await self._kv.write([Delete(_record_key(tenant, name))], durable=False)

    async def call(
        self,
        operation: Operation[Concatenate[str, str, P], R],
        tenant: str,
        name: str,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Return the result of an operation on a session.

        Raise NotFound when there is no such session, Unsupported when another machine has it, and what
        `SessionClient.call` raises.
        """

        async def run() -> R:
            return await self._client.call(operation, tenant, name, *args, **kwargs)

        return await self._call_existing(tenant, name, run, self.restore)

    async def exists(self, tenant: str, name: str) -> bool:
        """Return whether this machine has the session. Raise Unsupported when another one has it."""

        async def run() -> bool:
            await self._client.call(SessionOperations.get, tenant, name)
            return True

        try:
            return await self._call_existing(tenant, name, run, restore=None)
        except NotFound:
            return False

    async def _call_existing(
        self, tenant: str, name: str, run: Callable[[], Awaitable[R]], restore: Restore | None
    ) -> R:
        """Return the result of an operation, for which a session that is gone is restored, where that is possible."""
        try:
            return await run()
        except SessionNotFound as exc:
            if restore is not None and await restore(tenant, name):
                return await run()
            if isinstance(exc, SessionExpired):
                raise
            raise (await self._explain_missing(tenant, name) or exc) from None

    async def _explain_missing(self, tenant: str, name: str) -> StackError | None:
        """Return the error that says why this machine has no such session; None where that is not known."""
        machine = await self._find_machine(tenant, name)
        if machine == "other":
            return _elsewhere(name)
        return SessionExpired(ended_message(name, _SERVER_ENDED)) if machine == "this" else None

    async def _load_deployment_id(self) -> str:
        deployment_id = secrets.token_hex(16).encode()
        if await self._kv.write([Put(_DEPLOYMENT_KEY, deployment_id, None, ABSENT)]) is None:
            entry = await self._kv.get(_DEPLOYMENT_KEY)
            deployment_id = entry.value if entry is not None else deployment_id
        return deployment_id.decode()

    async def _find_machine(self, tenant: str, name: str) -> Literal["this", "other"] | None:
        entry = await self._kv.get(_record_key(tenant, name))
        if entry is None:
            return None
        machine = await asyncio.to_thread(_machine)
        return "this" if msgspec.json.decode(entry.value, type=SessionRecord).machine == machine else "other"

    async def _note_use(self, tenant: str, name: str, outcome: OutcomeT) -> OutcomeT:
        """Return the outcome of a use, whose work is counted; the record of the session is written again if it is
        due."""
        if outcome.due_record_idle_s:
            with suppress(StoreUnavailable):  # a record that is too old does no harm
                await self._write_record(tenant, name, outcome.due_record_idle_s)
        self.egress_counts += outcome.egress
        return outcome

    async def _write_record(self, tenant: str, name: str, idle_s: float) -> None:
        record = msgspec.json.encode(SessionRecord(await asyncio.to_thread(_machine)))
        ttl_s = 2 * idle_s + self._max_use_s
        await self._kv.write([Put(_record_key(tenant, name), record, ttl_s)], durable=False)


def _elsewhere(name: str) -> Unsupported:
    return Unsupported(
        f"The container '{name:.256}' is kept on another machine of this deployment, or was until that ended. "
        "Send what is for it to that machine, or make a new one.",
        code="container_elsewhere",
    )


def _record_key(tenant: str, name: str) -> str:
    # Hashed, because a client may name anything, and not all of it makes a key.
    return f"{tenant}/container/{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()[:32]}"


def _machine() -> str:
    """Return a name of this machine's boot that is equal for processes of one user that see the same files."""
    boot, mounts = platform.node(), ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with suppress(OSError):
        mounts = os.readlink("/proc/self/ns/mnt")
    return f"{boot} {mounts} {os.geteuid()}"
