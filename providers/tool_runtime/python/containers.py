"""Containers over the Python sessions of this machine: their settings and limits, and the files in them."""

import hashlib
import math
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Final, TypeVar

from openai.types.container_retrieve_response import ExpiresAfter
from openai.types.container_retrieve_response import NetworkPolicy as ShownNetworkPolicy
from openai.types.file_object import FileObject

from apis.confinement.commands import CommandEvent, CommandsResult, ShellCommand
from apis.containers import (
    Container,
    ContainerFile,
    ContainerListParams,
    Containers,
    CreateContainer,
    MemoryLimit,
    MountedSkill,
)
from apis.documents.files import Files
from apis.errors import InvalidRequest, NotFound, Unsupported
from apis.skills.skills import Skills
from apis.storage.pages import Page, page_after
from apis.wire.tools import NetworkAllowlist, NetworkPolicy, SkillSource
from apis.workspaces import WORKSPACE_FOLDER, WORKSPACE_PREFIX
from providers.tool_runtime.python.egress.rules import HostRules
from providers.tool_runtime.python.egress.settings import NetworkSettings
from providers.tool_runtime.python.files import MAX_FILES_BYTES, is_file_name
from providers.tool_runtime.python.machine_sessions import MachineSessions
from providers.tool_runtime.python.network_policies import (
    build_network_settings,
    check_network_policy,
    list_secrets,
)
from providers.tool_runtime.python.operations import SessionFile, SessionInfo, SessionOperations
from providers.tool_runtime.python.sandbox import WORK_FOLDER
from providers.tool_runtime.python.sessions import SessionContents, SessionSettings
from providers.tool_runtime.python.skill_files import SKILLS_FOLDER

ContainerItemT = TypeVar("ContainerItemT", Container, ContainerFile)

_MEMORY_LIMITS_BYTES: Final[dict[MemoryLimit, int]] = {"1g": 1 << 30, "4g": 4 << 30, "16g": 16 << 30, "64g": 64 << 30}


@dataclass(frozen=True, slots=True)
class ContainerPolicy:
    """Settings of a container whose request has none, and the limits of what a request may ask for."""

    default_settings: SessionSettings
    max_memory_bytes: int
    is_isolated: bool
    reachable_hosts: HostRules | None = None
    """Hosts that the run config opens; None where it opens none."""


class PythonContainers(Containers):
    """Containers, each of which is a session; `files` are the uploads that may be copied into them."""

    def __init__(self, sessions: MachineSessions, policy: ContainerPolicy, files: Files | None, skills: Skills) -> None:
        self.max_file_bytes = MAX_FILES_BYTES
        self._sessions = sessions
        self._policy = policy
        self._files = files
        self._skills = skills

    async def check(self, request: CreateContainer, *, tenant: str) -> None:
        max_bytes = self._policy.max_memory_bytes
        if request.memory_limit is not None and _MEMORY_LIMITS_BYTES[request.memory_limit] > max_bytes:
            raise Unsupported(
                f"A container has at most {max_bytes >> 20} MiB here: raise `max_memory_mib` of the tool runtime.",
                param="memory_limit",
                code="unsupported_value",
            )
        if request.network_policy is not None and not self._policy.is_isolated:
            message = "The network of a container cannot be turned off here: its backend is not a sandbox."
            raise Unsupported(message, param="network_policy", code="unsupported_value")
        if isinstance(request.network_policy, NetworkAllowlist):
            check_network_policy(request.network_policy, self._policy.reachable_hosts)
        if request.skills and not self._policy.is_isolated:
            raise Unsupported("Skills cannot be read-only here: the backend is not a sandbox.", param="skills")
        await self._skills.load(request.skills or (), tenant=tenant)
        if request.file_ids:
            self._require_files("file_ids")
        for index, file_id in enumerate(request.file_ids or ()):
            try:
                await self._get_small_upload(file_id, "file_ids", tenant)
            except (InvalidRequest, NotFound) as exc:
                exc.param = f"file_ids[{index}]"
                raise

    async def list_skills(self, skills: Sequence[SkillSource], *, tenant: str) -> Sequence[MountedSkill]:
        bundles = await self._skills.load(skills, tenant=tenant)
        return [MountedSkill(each.name, each.description, f"{SKILLS_FOLDER}/{each.name}") for each in bundles]

    async def create(self, request: CreateContainer, *, tenant: str, container_id: str | None = None) -> Container:
        await self.check(request, tenant=tenant)
        default = self._policy.default_settings
        settings = SessionSettings(
            request.expires_after.minutes * 60 if request.expires_after else default.idle_s,
            _MEMORY_LIMITS_BYTES[request.memory_limit] if request.memory_limit else default.memory_bytes,
            request.name,
            build_network_settings(request.network_policy),
        )
        name = container_id or f"cntr_{secrets.token_hex(16)}"
        bundles = await self._skills.load(request.skills or (), tenant=tenant)
        skill_files = [replace(file, path=f"{each.name}/{file.path}") for each in bundles for file in each.files]
        contents = SessionContents(skill_files, list_secrets(request.network_policy))
        is_created = await self._sessions.create(tenant, name, settings, contents, is_new_name=container_id is None)
        try:
            for file_id in request.file_ids or ():
                await self.copy_file(name, file_id, tenant=tenant)
        except BaseException:
            if is_created:
                with suppress(NotFound):
                    await self.delete(name, tenant=tenant)
            raise
        return await self.get(name, tenant=tenant)

    async def get(self, container_id: str, *, tenant: str) -> Container:
        return self._build_container(await self._sessions.call(SessionOperations.get, tenant, container_id))

    async def list(self, params: ContainerListParams, *, tenant: str) -> Page[Container]:
        infos = await self._sessions.list_sessions(tenant)
        return _paginate(
            [self._build_container(info) for info in infos if params.name in (None, info.settings.label)], params
        )

    async def update_secrets(self, container_id: str, policy: NetworkPolicy, *, tenant: str) -> None:
        secrets = list_secrets(policy)
        await self._sessions.call(SessionOperations.update_secrets, tenant, container_id, secrets)

    async def delete(self, container_id: str, *, tenant: str) -> None:
        await self._sessions.end(tenant, container_id)

    async def run_commands(
        self,
        container_id: str,
        commands: Sequence[ShellCommand],
        on_event: Callable[[CommandEvent], None],
        *,
        tenant: str,
    ) -> CommandsResult:
        outcome = await self._sessions.run_commands(tenant, container_id, [*commands], on_event)
        files = {name_to_path(container_id, name): name_to_file_id(container_id, name) for name in outcome.filenames}
        return CommandsResult(files, outcome.loss_reason)

    async def add_file(self, container_id: str, filename: str, data: bytes, *, tenant: str) -> ContainerFile:
        name = PurePosixPath(filename.replace("\\", "/")).name
        if not is_file_name(name) or name.startswith("."):
            raise InvalidRequest(
                "A file's name must be printable, at most 255 bytes long and not begin with a dot.", param="file"
            )
        if len(data) > MAX_FILES_BYTES:
            raise InvalidRequest("A file of a container must not be larger than 16 MiB.", param="file")
        files = await self._sessions.call(SessionOperations.write_file, tenant, container_id, name, data)
        return _build_file(container_id, _find_file(files, container_id, name_to_file_id(container_id, name)))

    async def copy_file(self, container_id: str, file_id: str, *, tenant: str) -> ContainerFile:
        await self.get(container_id, tenant=tenant)
        upload = await self._get_small_upload(file_id, "file_id", tenant)
        data = await self._require_files("file_id").read(file_id, tenant=tenant)
        return await self.add_file(container_id, upload.filename, data, tenant=tenant)

    async def list_files(self, container_id: str, params: ContainerListParams, *, tenant: str) -> Page[ContainerFile]:
        session_files = await self._sessions.call(SessionOperations.list_files, tenant, container_id)
        files = [_build_file(container_id, file) for file in session_files]
        return _paginate(sorted(files, key=lambda file: (file.created_at, file.id)), params)

    async def get_file(self, container_id: str, file_id: str, *, tenant: str) -> ContainerFile:
        return _build_file(container_id, await self._get_file(container_id, file_id, tenant))

    async def content(self, container_id: str, file_id: str, *, tenant: str) -> bytes:
        file = await self._get_file(container_id, file_id, tenant)
        return await self._sessions.call(SessionOperations.read_file, tenant, container_id, file.name)

    async def delete_file(self, container_id: str, file_id: str, *, tenant: str) -> None:
        file = await self._get_file(container_id, file_id, tenant)
        await self._sessions.call(SessionOperations.delete_file, tenant, container_id, file.name)

    async def _get_file(self, container_id: str, file_id: str, tenant: str) -> SessionFile:
        files = await self._sessions.call(SessionOperations.list_files, tenant, container_id)
        return _find_file(files, container_id, file_id)

    async def _get_small_upload(self, file_id: str, param: str, tenant: str) -> FileObject:
        """Return an uploaded file that fits into a container."""
        upload = await self._require_files(param).get(file_id, tenant=tenant)
        if upload.bytes > MAX_FILES_BYTES:
            raise InvalidRequest("A file of a container must not be larger than 16 MiB.", param=param)
        return upload

    def _require_files(self, param: str) -> Files:
        if self._files is None:
            raise Unsupported("Files cannot be uploaded to this server.", param=param)
        return self._files

    def _build_container(self, info: SessionInfo) -> Container:
        settings = info.settings
        return Container(
            id=info.name,
            object="container",
            created_at=int(info.created_at),
            name=settings.label,
            status="running",
            last_active_at=int(info.last_used_at),
            expires_after=ExpiresAfter(anchor="last_active_at", minutes=math.ceil(settings.idle_s / 60)),
            memory_limit=next(
                (limit for limit, size in _MEMORY_LIMITS_BYTES.items() if size == settings.memory_bytes), None
            ),
            network_policy=self._build_network_policy(settings.network),
        )

    def _build_network_policy(self, network: NetworkSettings | None) -> ShownNetworkPolicy | None:
        if network is not None:
            return ShownNetworkPolicy(type="allowlist", allowed_domains=[*network.allowed_domains])
        return ShownNetworkPolicy(type="disabled") if self._policy.is_isolated else None


def name_to_file_id(container_id: str, name: str) -> str:
    """Return a file's id, which follows from its name: nothing is stored, and programs write files as they like."""
    return f"cfile_{hashlib.sha256(f'{container_id}/{name}'.encode()).hexdigest()[:32]}"


def name_to_path(container_id: str, name: str) -> str:
    """Return a file's path as programs see it."""
    folder = WORKSPACE_FOLDER if container_id.startswith(WORKSPACE_PREFIX) else WORK_FOLDER
    return f"{folder}/{name}"


def _find_file(files: Sequence[SessionFile], container_id: str, file_id: str) -> SessionFile:
    file = next((file for file in files if name_to_file_id(container_id, file.name) == file_id), None)
    if file is None:
        raise NotFound("There is no such file in this container.")
    return file


def _build_file(container_id: str, file: SessionFile) -> ContainerFile:
    return ContainerFile(
        id=name_to_file_id(container_id, file.name),
        bytes=file.size_bytes,
        container_id=container_id,
        created_at=file.modified_at,
        object="container.file",
        path=name_to_path(container_id, file.name),
        source="user" if file.is_uploaded else "assistant",
    )


def _paginate(items: Sequence[ContainerItemT], params: ContainerListParams) -> Page[ContainerItemT]:
    """Return one page of a list that is sorted oldest first."""
    ordered = items if params.order == "asc" else items[::-1]
    return page_after(ordered, params, lambda item: item.id, "There is nothing with this id.")
