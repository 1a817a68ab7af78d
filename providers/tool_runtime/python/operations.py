"""Operations of the machine's Python session server: what workers may ask of the sessions in its memory."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from apis.confinement.commands import CommandEvent, ShellCommand
from apis.fair_share import FairShare
from providers.tool_runtime.python.cgroup import prepare_groups
from providers.tool_runtime.python.check import find_isolation_faults
from providers.tool_runtime.python.commands import bind_command
from providers.tool_runtime.python.egress.access import Egress
from providers.tool_runtime.python.egress.proxy import ContainerProxy, open_proxy
from providers.tool_runtime.python.egress.settings import EgressCounts, EgressSettings, NetworkSettings, SecretValue
from providers.tool_runtime.python.messages import SessionFailure
from providers.tool_runtime.python.outcomes import CommandsOutcome, FileRefused, RunOutcome, SessionEnded
from providers.tool_runtime.python.sandbox import (
    REMEDY,
    Bubblewrap,
    DangerouslyUnsandboxed,
    Sandbox,
    SandboxLimits,
    SandboxUnavailable,
)
from providers.tool_runtime.python.session import PythonSession
from providers.tool_runtime.python.sessions import (
    PythonSessionPool,
    SessionContents,
    SessionEntry,
    SessionKey,
    SessionSettings,
)

_log = logging.getLogger(__name__)

_CHECK_OWNER: Final = ("", "check")


@dataclass(frozen=True, slots=True)
class SessionServerConfig:
    """Settings that all workers of a session server share. `python` is the interpreter, None for the system's. A tenant
    may have `max_tenant_sessions` once there are several."""

    isolated: bool
    python: str | None
    limits: SandboxLimits
    max_sessions: int
    allow_loopback: bool = False
    max_tenant_sessions: int | None = None
    several_tenants: bool = False
    egress: EgressSettings = EgressSettings()  # noqa: RUF009 - it is frozen


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """State of a named session; times are in seconds since 1970."""

    name: str
    settings: SessionSettings
    created_at: float
    last_used_at: float


@dataclass(frozen=True, slots=True)
class SessionFile:
    """File in a session's work folder; `is_uploaded` when a client put it there, and not a program."""

    name: str
    size_bytes: int
    modified_at: int
    is_uploaded: bool


@dataclass(frozen=True, slots=True)
class _CheckedSandbox:
    """Sandbox that was proven to hold, and whether its sessions have a control group."""

    sandbox: Sandbox
    has_cgroup: bool


class SessionOperations:
    """Operations on the sessions of one server, called by name with positional arguments. All raise SessionFailure."""

    def __init__(self, config: SessionServerConfig) -> None:
        self._config = config
        places = FairShare(
            "Python sessions",
            config.max_sessions,
            tenant_places=config.max_tenant_sessions,
            several_tenants=config.several_tenants,
        )
        self._pool = PythonSessionPool(self._start_session, places, 2 * config.limits.wall_s)
        self._egress = Egress(config.egress, several_tenants=config.several_tenants)
        self._sandbox: asyncio.Task[_CheckedSandbox] = asyncio.ensure_future(_start_sandbox(config, self._egress))

    async def close(self) -> None:
        """End all sessions and wait until they have ended."""
        self._sandbox.cancel()
        await asyncio.gather(self._sandbox, return_exceptions=True)
        await self._pool.close()
        self._egress.close()

    async def wait_until_ready(self) -> bool:
        """Return, when the sandbox has passed its check, whether sessions have a control group. Raise SessionFailure
        `config` when it does not pass."""
        try:
            return (await asyncio.shield(self._sandbox)).has_cgroup
        except SandboxUnavailable as exc:
            raise SessionFailure("config", str(exc)) from exc

    async def create(
        self, tenant: str, name: str, settings: SessionSettings, loss_reason: str, contents: SessionContents
    ) -> bool:
        """Reserve a place for a session; return False when there is one already. `loss_reason` says why an earlier
        one is gone, where the server itself does not know better."""
        if self._pool.get_entry(tenant, name) is not None:
            return False
        self._pool.create_session(tenant, name, settings, loss_reason, contents)
        return True

    async def update_secrets(self, tenant: str, name: str, secrets: list[SecretValue]) -> None:
        """Take other secrets of a session in place of the former ones. In a workspace they may have other names: its
        next commands have their variables."""
        entry = self._get_entry(tenant, name)
        if [*entry.contents.secrets] == secrets:
            return
        entry.contents = replace(entry.contents, secrets=secrets)
        if entry.session is not None and entry.session.proxy is not None:
            await entry.session.proxy.access.secrets.update(secrets)

    async def run(self, tenant: str, name: str, code: str) -> RunOutcome:
        """Run code in a session."""
        due_record_idle_s = self._get_entry(tenant, name).claim_record_renewal()
        return replace(await self._run((tenant, name, 0), code), due_record_idle_s=due_record_idle_s)

    async def run_commands(
        self, tenant: str, name: str, commands: list[ShellCommand], on_event: Callable[[CommandEvent], None]
    ) -> CommandsOutcome:
        """Run shell commands in a session at the same time, also as those of other calls, within its limits."""
        due_record_idle_s = self._get_entry(tenant, name).claim_record_renewal()
        limits = self._config.limits
        bound_commands = [bind_command(each, limits.wall_s, limits.output_bytes) for each in commands]
        async with self._pool.use_session((tenant, name, 0), is_shared=True) as (session, loss_reason):
            _log.debug("a command begins to run")
            outcome = await session.run_commands(bound_commands, on_event)
            counts = _take_counts(session)
            return replace(outcome, loss_reason=loss_reason, due_record_idle_s=due_record_idle_s, egress=counts)

    async def run_once(self, tenant: str, settings: SessionSettings, code: str) -> RunOutcome:
        """Run code in a session of its own, which ends with it."""
        key = self._pool.create_session(tenant, None, settings)
        try:
            return await self._run(key, code)
        finally:
            self._pool.end_session(key)

    async def get(self, tenant: str, name: str) -> SessionInfo:
        """Return the session's state, without waiting for its users."""
        return _session_info(name, self._get_entry(tenant, name))

    async def list_sessions(self, tenant: str) -> list[SessionInfo]:
        """Return the named sessions of a tenant, oldest first."""
        infos = [_session_info(name, entry) for name, entry in self._pool.list_entries(tenant).items()]
        return sorted(infos, key=lambda info: (info.created_at, info.name))

    async def end(self, tenant: str, name: str) -> None:
        """End the session and everything that runs in it."""
        self._get_entry(tenant, name)
        self._pool.end_session((tenant, name, 0))

    async def list_files(self, tenant: str, name: str) -> list[SessionFile]:
        """Return the files in the work folder; a session without a process has none, and none is started for it."""
        if self._get_entry(tenant, name).session is None:
            return []
        async with self._use_session(tenant, name) as (session, entry):
            return await _list_files(session, entry)

    async def list_folder(self, tenant: str, name: str, folder: str) -> list[SessionFile]:
        """Return the files in a folder of the work folder, and below it. The session starts where it has not."""
        async with self._use_session(tenant, name) as (session, entry):
            return await _list_files(session, entry, folder)

    async def pack(self, tenant: str, name: str) -> bytes:
        """Return an archive of the work folder."""
        async with self._use_session(tenant, name) as (session, _):
            return await session.folder.pack()

    async def read_file(self, tenant: str, name: str, filename: str) -> bytes:
        """Return a file's content."""
        async with self._use_session(tenant, name) as (session, _):
            return await session.folder.read(filename)

    async def write_file(self, tenant: str, name: str, filename: str, data: bytes) -> list[SessionFile]:
        """Write a whole file as uploaded by a client, and return all files."""
        async with self._use_session(tenant, name) as (session, entry):
            await session.folder.write(filename, data)
            entry.uploaded_names.add(filename)
            return await _list_files(session, entry)

    async def delete_file(self, tenant: str, name: str, filename: str) -> None:
        """Delete a file."""
        async with self._use_session(tenant, name) as (session, entry):
            await session.folder.delete(filename)
            entry.uploaded_names.discard(filename)

    def _get_entry(self, tenant: str, name: str) -> SessionEntry:
        entry = self._pool.get_entry(tenant, name)
        if entry is None:
            if reason := self._pool.get_loss_reason(tenant, name):
                raise SessionFailure("session_ended", ended_message(name, reason))
            raise SessionFailure("no_session", f"Container with id '{name:.256}' not found.")
        return entry

    @asynccontextmanager
    async def _use_session(self, tenant: str, name: str) -> AsyncGenerator[tuple[PythonSession, SessionEntry]]:
        entry = self._get_entry(tenant, name)
        try:
            async with self._pool.use_session((tenant, name, 0), is_shared=True) as (session, loss_reason):
                if loss_reason:  # it is for a model, which reads the results of programs alone
                    self._pool.record_loss((tenant, name, 0), loss_reason)
                yield session, entry
        except FileRefused as exc:
            if exc.is_missing:
                raise SessionFailure("no_file", "There is no such file in this container.") from None
            raise SessionFailure("file_refused", f"The file could not be used: {exc}.") from None
        except SessionEnded as exc:
            raise SessionFailure("unavailable", f"The container's programs ended: {exc}. Try again.") from exc

    async def _run(self, key: SessionKey, code: str) -> RunOutcome:
        async with self._pool.use_session(key) as (session, loss_reason):
            _log.debug("a program begins to run")
            outcome = await session.run(code)
            counts = _take_counts(session)
            return replace(outcome, loss_reason=loss_reason or outcome.loss_reason, egress=counts)

    async def _start_session(self, key: SessionKey, entry: SessionEntry) -> PythonSession:
        limits = replace(self._config.limits, memory_bytes=entry.settings.memory_bytes)
        tenant, name, _ = key
        try:
            sandbox, proxy = (await asyncio.shield(self._sandbox)).sandbox, None
            if entry.settings.network is not None:
                owner, secrets = (tenant, name or ""), entry.contents.secrets
                proxy = await open_proxy(
                    self._egress,
                    owner,
                    entry.settings.network,
                    secrets,
                    entry.network_use,
                    may_get_secrets=entry.settings.is_workspace,
                )
            contents = entry.contents
            environment = contents.environment if entry.settings.is_workspace else None
            session = await PythonSession.start(sandbox, limits, contents.skill_files, proxy, environment)
            await _fill(session, contents)
            entry.contents = replace(entry.contents, files=(), archive=b"")
            known_secrets = contents.secrets
            while proxy is not None and entry.contents.secrets is not known_secrets:  # others came meanwhile
                known_secrets = entry.contents.secrets
                await proxy.access.secrets.update(known_secrets)
            return session
        except FileRefused as exc:
            raise SessionFailure("file_refused", f"The files do not fit into the workspace: {exc}.") from None
        except (SessionEnded, OSError) as exc:
            _log.warning("a Python session could not start: %s", exc)
            message = "The Python sandbox could not be started; try again later."
            raise SessionFailure("unavailable", message) from exc


async def _start_sandbox(config: SessionServerConfig, egress: Egress) -> _CheckedSandbox:
    """Return a sandbox that was proven to hold. Raise SandboxUnavailable, with the remedy, when it does not."""
    python = Path(config.python) if config.python else None
    if not config.isolated:
        return _CheckedSandbox(DangerouslyUnsandboxed(python), has_cgroup=False)
    sandbox = await asyncio.to_thread(Bubblewrap, python, allow_loopback=config.allow_loopback)
    await asyncio.to_thread(prepare_groups)
    checks = [_find_faults(sandbox, config, None)]
    if config.egress.allowed_hosts:
        checks.append(_find_faults(sandbox, config, await open_proxy(egress, _CHECK_OWNER, NetworkSettings(()), ())))
    try:
        results = await asyncio.gather(*checks)
    except SessionEnded as exc:
        raise SandboxUnavailable(
            f"tool_runtime: bubblewrap does not work here: {exc}. It needs unprivileged user namespaces "
            f"(sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns) and a current "
            f"version: {REMEDY}"
        ) from exc
    if faults := [fault for session_faults, _ in results for fault in session_faults]:
        raise SandboxUnavailable(
            f"tool_runtime: the Python sandbox does not hold here; these are possible in it: "
            f"{'; '.join(faults)}. Use a current bubblewrap: {REMEDY}"
        )
    return _CheckedSandbox(sandbox, has_cgroup=all(has_cgroup for _, has_cgroup in results))


async def _find_faults(
    sandbox: Bubblewrap, config: SessionServerConfig, proxy: ContainerProxy | None
) -> tuple[list[str], bool]:
    """Return the isolation faults of a new session, and whether it has a control group. Raise SessionEnded."""
    session = await PythonSession.start(sandbox, config.limits, (), proxy)
    try:
        names = () if proxy is None else proxy.access.environment
        allow_loopback = config.allow_loopback or proxy is not None
        return await find_isolation_faults(session, names, allow_loopback=allow_loopback), session.has_cgroup
    finally:
        await session.kill()


async def _fill(session: PythonSession, contents: SessionContents) -> None:
    """Write what a workspace begins with. Raise FileRefused and SessionEnded: the session has ended then."""
    try:
        if contents.archive:
            await session.folder.unpack(contents.archive)
        for name, data in contents.files:
            await session.folder.write(name, data)
    except BaseException:
        await session.kill()
        raise


def _take_counts(session: PythonSession) -> EgressCounts:
    """Return the work of a session's proxy since the last call."""
    return session.proxy.access.take_counts() if session.proxy is not None else EgressCounts()


def ended_message(name: str, reason: str) -> str:
    """Return the error's text for a container that is gone for this reason."""
    return f"Container with id '{name:.256}' has expired: {reason}. Its variables and files are gone; make a new one."


def _session_info(name: str, entry: SessionEntry) -> SessionInfo:
    return SessionInfo(name, entry.settings, entry.created_at, entry.last_used_at)


async def _list_files(session: PythonSession, entry: SessionEntry, folder: str = "") -> list[SessionFile]:
    return [
        SessionFile(name, size, modified_at, name in entry.uploaded_names)
        for name, size, modified_at in await session.folder.list_files(folder)
    ]
