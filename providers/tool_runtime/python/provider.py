"""The tool `python`, which runs programs of a model in a sandbox on this machine."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from apis.containers import Containers
from apis.documents.files import Files
from apis.errors import ConfigError, StackError, ToolFailed
from apis.fair_share import ONE_TENANT, Tenants
from apis.provider import Provider, UserPath
from apis.skills.skills import Skills
from apis.storage.kv_store import KVStore
from apis.tool_runtime import ToolCall, ToolFile, ToolResult, ToolRuntime, ToolSpec
from apis.workspaces import Workspaces
from providers.common.net.addresses import IPNetwork
from providers.tool_runtime.python.containers import (
    ContainerPolicy,
    PythonContainers,
    name_to_file_id,
    name_to_path,
)
from providers.tool_runtime.python.egress.rules import HostRule
from providers.tool_runtime.python.egress.settings import EgressSettings
from providers.tool_runtime.python.files import guess_media_type
from providers.tool_runtime.python.machine_sessions import MachineSessions
from providers.tool_runtime.python.operations import SessionServerConfig
from providers.tool_runtime.python.outcomes import RunOutcome
from providers.tool_runtime.python.sandbox import MIB, SandboxLimits
from providers.tool_runtime.python.session_client import SessionClient
from providers.tool_runtime.python.sessions import SessionSettings
from providers.tool_runtime.python.workspaces import PythonWorkspaces

_log = logging.getLogger(__name__)


def _check_host(text: str) -> str:
    try:
        HostRule.parse_with_port(text)
    except ValueError:
        raise ValueError("expected a host such as example.com, *.example.com or example.com:8443") from None
    return text


class EgressConfig(BaseModel):
    """Hosts that containers may reach where their request names them, by HTTP and TLS. `*.example.com` is each name
    below example.com, and not example.com itself. A host has the ports 80 and 443, or the one that stands after it.
    `allowed_private_networks` permits networks outside the public internet; `denied_networks` forbids more, and wins.
    `max_connections` counts those of all containers of the machine. `max_container_mib` bounds all that passes for one
    container, for as long as it lives, `idle_timeout_s` the silence of a connection, `timeout_s` all of its time."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    allowed_hosts: list[Annotated[str, AfterValidator(_check_host)]] = Field(default_factory=list[str])
    allowed_private_networks: list[IPNetwork] = Field(default_factory=list[IPNetwork])
    denied_networks: list[IPNetwork] = Field(default_factory=list[IPNetwork])
    max_connections: int = Field(default=256, ge=1, le=16384)
    max_container_connections: int = Field(default=32, ge=1, le=1024)
    max_container_mib: int = Field(default=1024, ge=1)
    connect_timeout_s: float = Field(default=10.0, gt=0)
    idle_timeout_s: float = Field(default=60.0, gt=0)
    timeout_s: float = Field(default=600.0, gt=0)

    def settings(self) -> EgressSettings:
        """Return the settings as a session server takes them."""
        return EgressSettings(
            allowed_hosts=self.allowed_hosts,
            allowed_private_networks=[str(each) for each in self.allowed_private_networks],
            denied_networks=[str(each) for each in self.denied_networks],
            max_connections=self.max_connections,
            max_container_connections=self.max_container_connections,
            container_bytes=self.max_container_mib * MIB,
            connect_timeout_s=self.connect_timeout_s,
            idle_timeout_s=self.idle_timeout_s,
            connection_timeout_s=self.timeout_s,
        )


@dataclass(frozen=True, slots=True)
class EgressMetrics:
    """Work of the proxies of containers, counted with the calls of this process."""

    egress_connections: int
    egress_refusals: int
    egress_sent_bytes: int
    egress_received_bytes: int


_OVERHEAD_S: Final = 60.0
"""Seconds that a use of a session may take in addition to its program and the wait for other users: starting it,
stopping its processes, reading its files."""
_CGROUP_REMEDY: Final = "start the server with systemd's Delegate=yes, or by `systemd-run --scope -p Delegate=yes`"
_PYTHON_TOOL: Final = ToolSpec(
    name="python",
    description=(
        "Run Python code in a notebook: variables live from call to call, and the value of the last expression is "
        "shown. Files written into the current folder are given to the user: link to them like "
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
    """Runs each call in the notebook of its (tenant, `ToolCall.session`), or without a session in one of its own.

    `ToolResult.text` is what the code printed, its exceptions included, and in square brackets what else the model
    should know: that a session ended and why, or which files there are. `files` are those that the call created or
    changed below the work folder, at most 20 and 16 MiB together; images have their media type. `data` is
    `{"logs": str, "exit": str, "files": {path: id}}`: the output alone; `ok`, `exception` (raised by the code), or how
    the session ended: `timed_out`, `cpu_limit`, `memory_limit`, `files_limit`, `crashed`; and the files of the
    container that the call wrote. Between calls a session's processes are stopped.

    All processes of this machine and user that share the store and these settings use the sessions of one session
    server, a child process that the first of them starts. It runs until the last of them ends, so a session outlives
    the process that created it. When the session server itself dies, its sessions are lost; the call that finds out
    says so, and a new server is started.

    The backend `bubblewrap` isolates programs and is proven to do so when the session server starts; nothing replaces
    it when it cannot. The backend `dangerously_unsandboxed` gives every program the rights of this server.
    """

    class Config(Provider.Config):
        """Limits are per call (`timeout_s`, `cpu_s`, `max_output_bytes`), per machine (`max_sessions`, and of those
        `max_tenant_sessions` of one tenant where there are several, by default half) or per session (the others). A
        container may ask for as much as `max_memory_mib`. `python` names an interpreter other than the system's, such
        as one of a virtual environment with packages for programs. With `allow_loopback` programs may open TCP and UDP
        sockets, which reach nothing but themselves. `egress` names the hosts that containers may reach. Several tenants
        need a control group for each session, or `dangerously_share_without_bounds`."""

        backend: Literal["bubblewrap", "dangerously_unsandboxed"] = "bubblewrap"
        python: UserPath | None = None
        timeout_s: float = Field(30.0, gt=0, le=600)
        cpu_s: float = Field(10.0, gt=0, le=600)
        memory_mib: int = Field(512, ge=64, le=65536)
        max_memory_mib: int = Field(1024, ge=64, le=65536)
        max_processes: int = Field(64, ge=1, le=1024)
        scratch_mib: int = Field(64, ge=1, le=4096)
        max_output_bytes: int = Field(256 * 1024, ge=1024, le=256 * 1024)
        max_sessions: int = Field(16, ge=1, le=1024)
        max_tenant_sessions: int | None = Field(None, ge=1, le=1024)
        idle_timeout_s: float = Field(1200.0, gt=0, le=86400)
        allow_loopback: bool = False
        egress: EgressConfig = Field(default_factory=EgressConfig)
        dangerously_share_without_bounds: bool = False

    def __init__(
        self,
        config: Config,
        files: Files | None,
        kv_store: KVStore,
        skills: Skills,
        tenants: Tenants = ONE_TENANT,
    ) -> None:
        limits = SandboxLimits(
            wall_s=config.timeout_s,
            cpu_s=config.cpu_s,
            memory_bytes=config.memory_mib * MIB,
            processes=config.max_processes,
            scratch_bytes=config.scratch_mib * MIB,
            output_bytes=config.max_output_bytes,
        )
        self._is_isolated = config.backend != "dangerously_unsandboxed"
        self._default_settings = SessionSettings(config.idle_timeout_s, limits.memory_bytes)
        max_use_s = 3 * config.timeout_s + _OVERHEAD_S
        interpreter = str(config.python.absolute()) if config.python else None
        server = SessionServerConfig(
            self._is_isolated,
            interpreter,
            limits,
            config.max_sessions,
            allow_loopback=config.allow_loopback,
            max_tenant_sessions=config.max_tenant_sessions,
            several_tenants=tenants.are_several,
            egress=config.egress.settings(),
        )
        self._has_egress = bool(config.egress.allowed_hosts)
        self._may_share_without_bounds = config.dangerously_share_without_bounds
        self._sessions = MachineSessions(SessionClient(server, max_use_s), kv_store, max_use_s)
        max_memory_bytes = max(config.memory_mib, config.max_memory_mib) * MIB
        hosts = config.egress.settings().rules() if self._has_egress else None
        policy = ContainerPolicy(self._default_settings, max_memory_bytes, self._is_isolated, hosts)
        self._containers = PythonContainers(self._sessions, policy, files, skills)
        self._workspaces = PythonWorkspaces(self._sessions, policy, self._containers, files, skills)

    async def start(self) -> None:
        if self._has_egress and not self._is_isolated:
            raise ConfigError("tool_runtime.egress: only the backend bubblewrap can bound what programs reach.")
        if not self._is_isolated:
            _log.warning("the tool `python` runs programs of models with all the rights of this server")
        await self._sessions.start()

    async def close(self) -> None:
        await self._sessions.close()

    def machine_bound_state(self) -> str | None:
        return (
            "containers and the variables of programs are on the machine that began them; on several, let the proxy "
            "send each client to one"
        )

    def confinement(self) -> str | None:
        if not self._is_isolated:
            return "programs run unconfined, with all the rights of this server"
        if self._sessions.has_cgroup:
            return "programs run in bubblewrap with seccomp; a control group bounds memory and processes"
        return (
            "programs run in bubblewrap with seccomp; memory is measured and bounded for each process, without a "
            f"control group ({_CGROUP_REMEDY})"
        )

    def metrics(self) -> EgressMetrics | None:
        if not self._has_egress:
            return None
        counts = self._sessions.egress_counts
        return EgressMetrics(counts.connections, counts.refusals, counts.sent_bytes, counts.received_bytes)

    def shared_use_risk(self) -> str | None:
        if self._may_share_without_bounds or (self._is_isolated and self._sessions.has_cgroup):
            return None
        if not self._is_isolated:
            return (
                "the backend dangerously_unsandboxed lets each tenant's programs read all of them. Choose the backend "
                "bubblewrap, or set dangerously_share_without_bounds: true."
            )
        return (
            "the Python sandbox cannot make a control group here, so that one tenant's programs can take the memory "
            f"of all. To let it, {_CGROUP_REMEDY}; or set dangerously_share_without_bounds: true."
        )

    def tools(self) -> Sequence[ToolSpec]:
        return (_PYTHON_TOOL,)

    async def call(self, call: ToolCall) -> ToolResult:
        if call.name != _PYTHON_TOOL.name:
            raise ToolFailed("There is no such tool; there is only `python`.")
        try:
            code = _Arguments.model_validate(dict(call.arguments)).code
        except ValidationError as exc:
            fault = exc.errors(include_url=False, include_context=False, include_input=False)[0]["msg"]
            raise ToolFailed(f"Wrong arguments: they must be one text, `code`, of at most 1 MiB ({fault}).") from None
        try:
            if call.session is None:
                outcome = await self._sessions.run_once(call.tenant, code, self._default_settings)
            else:
                outcome = await self._sessions.run(call.tenant, call.session, code, self._default_settings)
        except ToolFailed:
            raise
        except StackError as exc:
            raise ToolFailed(exc.message) from exc
        return _build_result(outcome, call.session)

    def containers(self) -> Containers:
        return self._containers

    def workspaces(self) -> Workspaces:
        return self._workspaces


def _build_result(outcome: RunOutcome, container_id: str | None) -> ToolResult:
    parts: list[str] = []
    if outcome.loss_reason:
        parts.append(f"[this is a new Python session, the earlier one is gone: {outcome.loss_reason}]\n")
    parts.append(outcome.output or ("" if outcome.reason else "[no output]"))
    if outcome.reason:
        loss = "variables and files are gone" if outcome.are_files_lost else "variables are gone; its files are kept"
        rest = f" Its {loss}, and the next call begins a new session" if container_id is not None else ""
        parts.append(f"\n[the Python session was ended: {outcome.reason}.{rest}]")
    if outcome.files:
        parts.append(f"\n[files: {', '.join(name for name, _ in outcome.files)}]")
    if outcome.skipped_names:
        parts.append(f"\n[too many or too large to be given to the user: {', '.join(outcome.skipped_names)}]")
    files = [ToolFile(name, guess_media_type(name), data) for name, data in outcome.files]
    names = [*(name for name, _ in outcome.files), *outcome.skipped_names] if container_id is not None else []
    file_ids = {name_to_path(container_id or "", name): name_to_file_id(container_id or "", name) for name in names}
    data = {"logs": outcome.output, "exit": outcome.exit_status, **({"files": file_ids} if file_ids else {})}
    return ToolResult("".join(parts).strip("\n"), files=files, data=data)
