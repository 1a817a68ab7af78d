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
from providers.tool_runtime.python.cgroup import remove_left_groups
from providers.tool_runtime.python.check import faults_of
from providers.tool_runtime.python.containers import Offer, PythonContainers
from providers.tool_runtime.python.files import media_type
from providers.tool_runtime.python.local_containers import HeldContainers, id_of, path_of
from providers.tool_runtime.python.sandbox import INSTALL, MIB, Bubblewrap, DangerouslyUnsandboxed, Limits, Sandbox
from providers.tool_runtime.python.session import Outcome, Session, SessionOver
from providers.tool_runtime.python.session_registry import Directory
from providers.tool_runtime.python.session_router import Deployment
from providers.tool_runtime.python.session_server import Keeper
from providers.tool_runtime.python.sessions import Key, Sessions, Terms

_log = logging.getLogger(__name__)

_OVERHEAD_S: Final = 60.0
"""What a use of a session may take beside its program and the waiting for others': starting, stopping, files."""
_TOOL: Final = ToolSpec(
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
        self._limits = Limits(
            wall_s=config.timeout_s,
            cpu_s=config.cpu_s,
            memory_bytes=config.memory_mib * MIB,
            processes=config.max_processes,
            scratch_bytes=config.scratch_mib * MIB,
            output_bytes=config.max_output_bytes,
        )
        self._terms = Terms(config.idle_timeout_s, self._limits.memory_bytes)
        self._sandbox: Sandbox | None = None
        use_s = 3 * config.timeout_s + _OVERHEAD_S
        self._directory = Directory(kv_store, use_s)
        self._sessions = Sessions(self._start_session, config.max_sessions, 2 * config.timeout_s, self._directory)
        isolated = config.backend != "dangerously_unsandboxed"
        held = HeldContainers(self._sessions, isolated=isolated)
        on_files = (held.files, held.file, held.content, held.add_file, held.delete_file)
        self._keeper = Keeper((self._run, held.get, held.all, held.delete, *on_files), self._sessions.has)
        self._deployment = Deployment(self._sessions, self._directory, use_s)
        offer = Offer(self._terms, max(config.memory_mib, config.max_memory_mib) * MIB, isolated)
        self._containers = PythonContainers(self._deployment, held, offer, files)

    async def start(self) -> None:
        await self._start_sandbox()
        await self._keeper.start()
        self._directory.open(self._keeper.address)

    async def _start_sandbox(self) -> None:
        if self._config.backend == "dangerously_unsandboxed":
            _log.warning("the tool `python` runs programs of models with all the rights of this server")
            self._sandbox = DangerouslyUnsandboxed(self._config.python)
            return
        self._sandbox = await asyncio.to_thread(Bubblewrap, self._config.python)
        await asyncio.to_thread(remove_left_groups)
        try:
            session = await Session.start(self._sandbox, self._limits)
        except SessionOver as exc:
            raise ConfigError(
                f"tool_runtime: bubblewrap does not work here: {exc}. It needs unprivileged user namespaces "
                f"(sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns) and a current "
                f"version: {INSTALL}"
            ) from exc
        try:
            faults = await faults_of(session)
        finally:
            await session.kill()
        if faults:
            raise ConfigError(
                f"tool_runtime: the Python sandbox does not hold here; these are possible in it: "
                f"{'; '.join(faults)}. Use a current bubblewrap: {INSTALL}"
            )

    async def close(self) -> None:
        await self._keeper.close()
        await self._sessions.close()
        await self._directory.close()

    def tools(self) -> Sequence[ToolSpec]:
        return (_TOOL,)

    async def call(self, call: ToolCall) -> ToolResult:
        if call.name != _TOOL.name:
            raise ToolFailed("There is no such tool; there is only `python`.")
        try:
            code = _Arguments.model_validate(dict(call.arguments)).code
        except ValidationError as exc:
            told = exc.errors(include_url=False, include_context=False, include_input=False)[0]["msg"]
            raise ToolFailed(f"Wrong arguments: they must be one text, `code`, of at most 1 MiB ({told}).") from None
        try:
            if call.session is None:
                return await self._run_alone(code, call.tenant)
            return await self._run_anywhere(code, call.session, call.tenant)
        except ToolFailed:
            raise
        except StackError as exc:
            raise ToolFailed(exc.message) from exc

    def containers(self) -> Containers:
        return self._containers

    async def _run_alone(self, code: str, tenant: str) -> ToolResult:
        key = self._sessions.create(tenant, None, self._terms)
        try:
            return await self._use(key, code)
        finally:
            self._sessions.drop(key)

    async def _run_anywhere(self, code: str, session: str, tenant: str) -> ToolResult:
        """In the process that keeps the session; where none does, it is kept here from now on."""
        with suppress(NotFound):
            return await self._deployment.do(tenant, session, self._run, code, session, tenant)
        await self._deployment.make(tenant, session, self._terms)
        return await self._deployment.do(tenant, session, self._run, code, session, tenant)

    async def _run(self, code: str, session: str, tenant: str) -> ToolResult:
        """In a session that is kept here."""
        return await self._use((tenant, session, 0), code)

    async def _use(self, key: Key, code: str) -> ToolResult:
        async with self._sessions.use(key) as (session, lost):
            _log.debug("a program begins to run")
            outcome = await session.run(code)
        return _result(outcome, lost, key[1])

    async def _start_session(self, terms: Terms) -> Session:
        assert self._sandbox is not None, "started before it is called"
        try:
            return await Session.start(self._sandbox, replace(self._limits, memory_bytes=terms.memory_bytes))
        except (SessionOver, OSError) as exc:
            _log.warning("a Python session could not start: %s", exc)
            raise ToolFailed("The Python sandbox could not be started; try again later.") from exc


def _result(outcome: Outcome, lost: str, container_id: str | None) -> ToolResult:
    parts: list[str] = []
    if lost:
        parts.append(f"[this is a new Python session, the earlier one is gone: {lost}]\n")
    parts.append(outcome.output or ("" if outcome.reason else "[no output]"))
    if outcome.reason:
        parts.append(
            f"\n[the Python session was ended: {outcome.reason}. Its variables and files are gone; "
            "the next call begins a new session]"
        )
    if outcome.files:
        parts.append(f"\n[files: {', '.join(name for name, _ in outcome.files)}]")
    if outcome.skipped:
        parts.append(f"\n[too many or too large to be given to the user: {', '.join(outcome.skipped)}]")
    files = [ToolFile(name, media_type(name), data) for name, data in outcome.files]
    names = [*(name for name, _ in outcome.files), *outcome.skipped] if container_id is not None else []
    made = {path_of(name): id_of(container_id or "", name) for name in names}
    data = {"logs": outcome.output, "exit": outcome.exit, **({"files": made} if made else {})}
    return ToolResult("".join(parts).strip("\n"), files=files, data=data)
