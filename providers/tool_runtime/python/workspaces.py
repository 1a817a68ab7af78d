"""Workspaces over the Python sessions of this machine."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from apis.containers import Containers, CreateContainer
from apis.documents.files import Files
from apis.errors import InvalidRequest, NotFound, Unsupported
from apis.skills.skills import Skills
from apis.wire.tools import NetworkPolicy
from apis.workspaces import (
    OUTPUTS_FOLDER,
    WORKSPACE_FOLDER,
    Restore,
    WorkspaceContents,
    WorkspaceFile,
    WorkspaceRequest,
    Workspaces,
)
from providers.tool_runtime.python.containers import ContainerPolicy
from providers.tool_runtime.python.egress.environment import NETWORK_VARIABLES
from providers.tool_runtime.python.files import MAX_FILES_BYTES
from providers.tool_runtime.python.machine_sessions import MachineSessions
from providers.tool_runtime.python.network_policies import build_network_settings, list_secrets
from providers.tool_runtime.python.operations import SessionOperations
from providers.tool_runtime.python.sandbox import ENVIRONMENT
from providers.tool_runtime.python.sessions import SessionContents, SessionSettings

_VARIABLE_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_RESERVED_NAMES: Final = frozenset(name.upper() for name in (*ENVIRONMENT, *NETWORK_VARIABLES))


class PythonWorkspaces(Workspaces):
    """Workspaces, each of which is a session whose work folder is /workspace."""

    def __init__(
        self,
        sessions: MachineSessions,
        policy: ContainerPolicy,
        containers: Containers,
        files: Files | None,
        skills: Skills,
    ) -> None:
        self.max_file_bytes = MAX_FILES_BYTES
        self._sessions = sessions
        self._policy = policy
        self._containers = containers
        self.files = files
        self.skills = skills

    def restore_with(self, restore: Restore) -> None:
        self._sessions.restore = restore

    def open_hosts(self) -> Sequence[str]:
        hosts = self._policy.reachable_hosts
        return hosts.list_domains() if hosts is not None else ()

    async def check(self, request: WorkspaceRequest, *, tenant: str) -> None:
        if not self._policy.is_isolated:
            raise Unsupported("This server has no workspaces: its backend is not a sandbox.", param="type")
        _check_variables(request.variables)
        container = CreateContainer(
            name=request.name, network_policy=request.network_policy, skills=[*request.skills] or None
        )
        try:
            await self._containers.check(container, tenant=tenant)
        except (InvalidRequest, NotFound, Unsupported) as exc:
            exc.param = (exc.param or "").replace("network_policy", "network") or None
            raise

    async def create(
        self, workspace_id: str, request: WorkspaceRequest, contents: WorkspaceContents, *, tenant: str
    ) -> bool:
        bundles = await self.skills.load(request.skills, tenant=tenant)
        filled = SessionContents(
            [replace(file, path=f"{each.name}/{file.path}") for each in bundles for file in each.files],
            list_secrets(request.network_policy),
            request.variables,
            [(_name(path), data) for path, data in contents.files],
            contents.archive,
        )
        settings = SessionSettings(
            request.idle_minutes * 60.0,
            self._policy.default_settings.memory_bytes,
            request.name,
            build_network_settings(request.network_policy),
            is_workspace=True,
        )
        if not await self._sessions.create(tenant, workspace_id, settings, filled, loss_reason=contents.notice):
            return False
        try:  # it starts now, so that contents that do not fit are an error here
            await self.list_files(workspace_id, OUTPUTS_FOLDER, tenant=tenant)
        except BaseException:
            with suppress(NotFound):
                await self._sessions.end(tenant, workspace_id)
            raise
        return True

    async def update_secrets(self, workspace_id: str, policy: NetworkPolicy, *, tenant: str) -> None:
        await self._containers.update_secrets(workspace_id, policy, tenant=tenant)

    async def end(self, workspace_id: str, *, tenant: str) -> None:
        with suppress(NotFound):
            await self._sessions.end(tenant, workspace_id)

    async def exists(self, workspace_id: str, *, tenant: str) -> bool:
        return await self._sessions.exists(tenant, workspace_id)

    async def pack(self, workspace_id: str, *, tenant: str) -> bytes:
        return await self._sessions.call(SessionOperations.pack, tenant, workspace_id)

    async def list_files(self, workspace_id: str, folder: str, *, tenant: str) -> Sequence[WorkspaceFile]:
        name = _name(folder) if folder != WORKSPACE_FOLDER else ""
        files = await self._sessions.call(SessionOperations.list_folder, tenant, workspace_id, name)
        return [WorkspaceFile(f"{WORKSPACE_FOLDER}/{file.name}", file.size_bytes) for file in files]

    async def read_file(self, workspace_id: str, path: str, *, tenant: str) -> bytes:
        return await self._sessions.call(SessionOperations.read_file, tenant, workspace_id, _name(path))

    async def write_file(self, workspace_id: str, path: str, data: bytes, *, tenant: str) -> None:
        await self._sessions.call(SessionOperations.write_file, tenant, workspace_id, _name(path), data)


def _name(path: str) -> str:
    return path.removeprefix(f"{WORKSPACE_FOLDER}/")


def _check_variables(variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        if not _VARIABLE_NAME.fullmatch(name) or name.upper() in _RESERVED_NAMES:
            message = "A variable has a name of letters, digits and underscores that the container does not use itself."
            raise InvalidRequest(message, param=f"env.{name[:128]}", code="invalid_value")
        if "\0" in value or _has_surrogates(value):
            raise InvalidRequest("A variable is text without NUL.", param=f"env.{name}", code="invalid_value")


def _has_surrogates(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
