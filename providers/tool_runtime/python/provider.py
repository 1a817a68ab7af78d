"""Python: runs programs of a model in a sandbox on this machine, as one tool named `python`."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from apis.containers import Containers
from apis.errors import ConfigError, NotFound, StackError, ToolFailed
from apis.files import Files
from apis.provider import Provider
from apis.storage.kv_store import KVStore
from apis.tool_runtime import ToolCall, ToolFile, ToolResult, ToolRuntime, ToolSpec
from providers.tool_runtime.python.cgroup import remove_stale_groups
from providers.tool_runtime.python.check import find_isolation_faults
from providers.tool_runtime.python.containers import ContainerPolicy, PythonContainers
from providers.tool_runtime.python.files import guess_media_type
from providers.tool_runtime.python.local_containers import LocalContainers, name_to_file_id, name_to_path
from providers.tool_runtime.python.sandbox import (
    INSTALL_HINT,
    MIB,
    Bubblewrap,
    DangerouslyUnsandboxed,
    Sandbox,
    SandboxLimits,
)
from providers.tool_runtime.python.session import PythonSession, RunOutcome, SessionEnded
from providers.tool_runtime.python.session_registry import SessionRegistry
from providers.tool_runtime.python.session_router import SessionRouter
from providers.tool_runtime.python.session_server import SessionServer
from providers.tool_runtime.python.sessions import PythonSessionPool, SessionKey, SessionSettings

_log = logging.getLogger(__name__)

_OVERHEAD_S: Final = 60.0
"""What a use of a session may take beside its program and the waiting for others': starting, stopping, files."""
_PYTHON_TOOL: Final = ToolSpec(
    name="python",
    description=(
        "Run Python code in a notebook: variables live from call to call, and the value of the last expression is "
        "shown. There is no network. Files written into the current folder are given to the user: link to them like "
        "[plot.png](sandbox:/mnt/data/plot.png)."
    ),
    parameters={
        "type": "object",
        "properties": {"code": {"type": "string", "description": "The Python code to run."}},
        "required": ["code"],
        "additionalProperties": False,
    },
)


class _Arguments(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    code: str = Field(max_length=MIB)


class Python(ToolRuntime):
    """A notebook for each (tenant, `ToolCall.session`); a call without a session has one for itself alone.

    `ToolResult.text` is what the code printed, its exceptions included, and in square brackets what else the model
    should know: that a session ended and why, or which files there are. `files` are those that the call made or
    changed below the work folder, at most 20 and 16 MiB together; images are known by their media type. `data` is
    `{"logs": str, "exit": str, "files": {path: id}}`: the output alone; `ok`, `exception` (raised by the code), or how
    the session ended: `timed_out`, `cpu_limit`, `memory_limit`, `files_limit`, `crashed`; and the files of the
    container that the call wrote. Between calls a session's processes are stopped.

    A session with a name is known to all processes of this machine that share the store: each call runs in the process
    that keeps the session, over a Unix socket where that is another one. All sessions end with the process that keeps
    them, however it ends; the call that finds out says so.

    The backend `bubblewrap` isolates programs and is proven to do so at start; nothing replaces it when it cannot.
    The backend `dangerously_unsandboxed` gives every program the rights of this server.
    """

    class Config(Provider.Config):
        """Limits are per call (`timeout_s`, `cpu_s`, `max_output_bytes`) or per session (the others). A container may
        ask for as much as `max_memory_mib`. `python` names an interpreter other than the system's, such as one of a
        virtual environment with packages for programs."""

        backend: Literal["bubblewrap", "dangerously_unsandboxed"] = "bubblewrap"
        python: Path | None = None
        timeout_s: float = Field(30.0, gt=0, le=600)
        cpu_s: float = Field(10.0, gt=0, le=600)
        memory_mib: int = Field(512, ge=64, le=65536)
        max_memory_mib: int = Field(1024, ge=64, le=65536)
        max_processes: int = Field(64, ge=1, le=1024)
        scratch_mib: int = Field(64, ge=1, le=4096)
        max_output_bytes: int = Field(256 * 1024, ge=1024, le=256 * 1024)
        max_sessions: int = Field(16, ge=1, le=1024)
        idle_timeout_s: float = Field(1200.0, gt=0, le=86400)

    def __init__(self, config: Config, files: Files | None, kv_store: KVStore) -> None:
        self._config = config
        self._limits = SandboxLimits(
            wall_s=config.timeout_s,
            cpu_s=config.cpu_s,
            memory_bytes=config.memory_mib * MIB,
            processes=config.max_processes,
            scratch_bytes=config.scratch_mib * MIB,
            output_bytes=config.max_output_bytes,
        )
        self._default_settings = SessionSettings(config.idle_timeout_s, self._limits.memory_bytes)
        self._sandbox: Sandbox | None = None
        use_s = 3 * config.timeout_s + _OVERHEAD_S
        self._registry = SessionRegistry(kv_store, use_s)
        self._sessions = PythonSessionPool(
            self._start_session, config.max_sessions, 2 * config.timeout_s, self._registry
        )
        isolated = config.backend != "dangerously_unsandboxed"
        held = LocalContainers(self._sessions, is_isolated=isolated)
        on_files = (held.files, held.file, held.content, held.add_file, held.delete_file)
        self._server = SessionServer(
            (self._run, held.get, held.all, held.delete, *on_files), self._sessions.has_session
        )
        self._router = SessionRouter(self._sessions, self._registry, use_s)
        offer = ContainerPolicy(self._default_settings, max(config.memory_mib, config.max_memory_mib) * MIB, isolated)
        self._containers = PythonContainers(self._router, held, offer, files)

    async def start(self) -> None:
        await self._start_sandbox()
        await self._server.start()
        self._registry.publish_at(self._server.address)

    async def _start_sandbox(self) -> None:
        if self._config.backend == "dangerously_unsandboxed":
            _log.warning("the tool `python` runs programs of models with all the rights of this server")
            self._sandbox = DangerouslyUnsandboxed(self._config.python)
            return
        self._sandbox = await asyncio.to_thread(Bubblewrap, self._config.python)
        await asyncio.to_thread(remove_stale_groups)
        try:
            session = await PythonSession.start(self._sandbox, self._limits)
        except SessionEnded as exc:
            raise ConfigError(
                f"tool_runtime: bubblewrap does not work here: {exc}. It needs unprivileged user namespaces "
                f"(sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns) and a current "
                f"version: {INSTALL_HINT}"
            ) from exc
        try:
            faults = await find_isolation_faults(session)
        finally:
            await session.kill()
        if faults:
            raise ConfigError(
                f"tool_runtime: the Python sandbox does not hold here; these are possible in it: "
                f"{'; '.join(faults)}. Use a current bubblewrap: {INSTALL_HINT}"
            )

    async def close(self) -> None:
        await self._server.close()
        await self._sessions.close()
        await self._registry.close()

    def tools(self) -> Sequence[ToolSpec]:
        return (_PYTHON_TOOL,)

    async def call(self, call: ToolCall) -> ToolResult:
        if call.name != _PYTHON_TOOL.name:
            raise ToolFailed("There is no such tool; there is only `python`.")
        try:
            code = _Arguments.model_validate(dict(call.arguments)).code
        except ValidationError as exc:
            told = exc.errors(include_url=False, include_context=False, include_input=False)[0]["msg"]
            raise ToolFailed(f"Wrong arguments: they must be one text, `code`, of at most 1 MiB ({told}).") from None
        try:
            if call.session is None:
                return await self._run_in_new_session(code, call.tenant)
            return await self._run_in_named_session(code, call.session, call.tenant)
        except ToolFailed:
            raise
        except StackError as exc:
            raise ToolFailed(exc.message) from exc

    def containers(self) -> Containers:
        return self._containers

    async def _run_in_new_session(self, code: str, tenant: str) -> ToolResult:
        key = self._sessions.create_session(tenant, None, self._default_settings)
        try:
            return await self._run_in_session(key, code)
        finally:
            self._sessions.end_session(key)

    async def _run_in_named_session(self, code: str, session: str, tenant: str) -> ToolResult:
        """In the process that keeps the session; where none does, it is kept here from now on."""
        with suppress(NotFound):
            return await self._router.call(tenant, session, self._run, code, session, tenant)
        await self._router.create_session(tenant, session, self._default_settings)
        return await self._router.call(tenant, session, self._run, code, session, tenant)

    async def _run(self, code: str, session: str, tenant: str) -> ToolResult:
        """In a session that is kept here."""
        return await self._run_in_session((tenant, session, 0), code)

    async def _run_in_session(self, key: SessionKey, code: str) -> ToolResult:
        async with self._sessions.use_session(key) as (session, lost):
            _log.debug("a program begins to run")
            outcome = await session.run(code)
        return _build_result(outcome, lost, key[1])

    async def _start_session(self, settings: SessionSettings) -> PythonSession:
        assert self._sandbox is not None, "started before it is called"
        try:
            return await PythonSession.start(self._sandbox, replace(self._limits, memory_bytes=settings.memory_bytes))
        except (SessionEnded, OSError) as exc:
            _log.warning("a Python session could not start: %s", exc)
            raise ToolFailed("The Python sandbox could not be started; try again later.") from exc


def _build_result(outcome: RunOutcome, loss_reason: str, container_id: str | None) -> ToolResult:
    parts: list[str] = []
    if loss_reason:
        parts.append(f"[this is a new Python session, the earlier one is gone: {loss_reason}]\n")
    parts.append(outcome.output or ("" if outcome.reason else "[no output]"))
    if outcome.reason:
        parts.append(
            f"\n[the Python session was ended: {outcome.reason}. Its variables and files are gone; "
            "the next call begins a new session]"
        )
    if outcome.files:
        parts.append(f"\n[files: {', '.join(name for name, _ in outcome.files)}]")
    if outcome.skipped_names:
        parts.append(f"\n[too many or too large to be given to the user: {', '.join(outcome.skipped_names)}]")
    files = [ToolFile(name, guess_media_type(name), data) for name, data in outcome.files]
    names = [*(name for name, _ in outcome.files), *outcome.skipped_names] if container_id is not None else []
    made = {name_to_path(name): name_to_file_id(container_id or "", name) for name in names}
    data = {"logs": outcome.output, "exit": outcome.exit_status, **({"files": made} if made else {})}
    return ToolResult("".join(parts).strip("\n"), files=files, data=data)
