"""Python's sessions as containers: made, listed and ended by clients, with files put in and taken out, from any process
of the deployment."""

import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePosixPath

from openai.types import FileObject

from apis.containers import Container, ContainerFile, ContainerListParams, Containers, CreateContainer
from apis.errors import InvalidRequest, NotFound, Overloaded, ToolFailed, Unsupported
from apis.files import Files
from apis.storage.pages import Page
from apis.wire.tools import NetworkAllowlist
from providers.tool_runtime.python.files import MAX_FILES_BYTES, is_file_name
from providers.tool_runtime.python.local_containers import MEMORY_LIMITS_BYTES, LocalContainers, paginate_items
from providers.tool_runtime.python.session_router import SessionRouter
from providers.tool_runtime.python.sessions import SessionSettings


@dataclass(frozen=True, slots=True)
class ContainerPolicy:
    """What containers are made with where nothing else is asked, and the most that may be asked."""

    default_settings: SessionSettings
    max_memory_bytes: int
    is_isolated: bool


class PythonContainers(Containers):
    """Over the sessions of all processes; `held` are this one's, and `files` the uploads that may be copied."""

    def __init__(
        self, router: SessionRouter, local_containers: LocalContainers, policy: ContainerPolicy, files: Files | None
    ) -> None:
        self.max_file_bytes = MAX_FILES_BYTES
        self._router = router
        self._local_containers = local_containers
        self._policy = policy
        self._files = files

    async def check(self, request: CreateContainer, *, tenant: str) -> None:
        most = self._policy.max_memory_bytes
        if request.memory_limit is not None and MEMORY_LIMITS_BYTES[request.memory_limit] > most:
            raise Unsupported(
                f"A container has at most {most >> 20} MiB here: raise `max_memory_mib` of the tool runtime.",
                param="memory_limit",
                code="unsupported_value",
            )
        if isinstance(request.network_policy, NetworkAllowlist):
            message = "A container has no network here: use the policy 'disabled'."
            raise Unsupported(message, param="network_policy", code="unsupported_value")
        if request.network_policy is not None and not self._policy.is_isolated:
            message = "The network of a container cannot be turned off here: its backend is not a sandbox."
            raise Unsupported(message, param="network_policy", code="unsupported_value")
        if request.skills:
            raise Unsupported("Skills are not offered by this server.", param="skills")
        if request.file_ids:
            self._require_files("file_ids")
        for at, file_id in enumerate(request.file_ids or ()):
            try:
                await self._get_small_upload(file_id, "file_ids", tenant)
            except (InvalidRequest, NotFound) as exc:
                exc.param = f"file_ids[{at}]"
                raise

    async def create(self, request: CreateContainer, *, tenant: str, container_id: str | None = None) -> Container:
        await self.check(request, tenant=tenant)
        name = container_id or f"cntr_{secrets.token_hex(16)}"
        memory = (
            MEMORY_LIMITS_BYTES[request.memory_limit]
            if request.memory_limit
            else self._policy.default_settings.memory_bytes
        )
        idle_s = request.expires_after.minutes * 60 if request.expires_after else self._policy.default_settings.idle_s
        try:
            made = await self._router.create_session(tenant, name, SessionSettings(idle_s, memory, request.name))
        except ToolFailed as exc:
            raise Overloaded(exc.message) from exc
        try:
            for file_id in request.file_ids or ():
                await self.copy_file(name, file_id, tenant=tenant)
        except BaseException:
            if made:
                with suppress(NotFound):
                    await self._local_containers.delete(name, tenant=tenant)
            raise
        return await self.get(name, tenant=tenant)

    async def get(self, container_id: str, *, tenant: str) -> Container:
        return await self._router.call(tenant, container_id, self._local_containers.get, container_id, tenant=tenant)

    async def list(self, params: ContainerListParams, *, tenant: str) -> Page[Container]:
        some = await self._router.call_all(tenant, self._local_containers.all, tenant)
        made = sorted((each for all_of_one in some for each in all_of_one), key=lambda each: (each[0], each[1].id))
        return paginate_items([container for _, container in made if params.name in (None, container.name)], params)

    async def delete(self, container_id: str, *, tenant: str) -> None:
        await self._router.call(tenant, container_id, self._local_containers.delete, container_id, tenant=tenant)

    async def add_file(self, container_id: str, filename: str, data: bytes, *, tenant: str) -> ContainerFile:
        name = PurePosixPath(filename.replace("\\", "/")).name
        if not is_file_name(name) or name.startswith("."):
            raise InvalidRequest(
                "A file's name must be printable, at most 255 bytes long and not begin with a dot.", param="file"
            )
        if len(data) > MAX_FILES_BYTES:
            raise InvalidRequest("A file of a container must not be larger than 16 MiB.", param="file")
        add = self._local_containers.add_file
        return await self._router.call(tenant, container_id, add, container_id, name, data, tenant=tenant)

    async def copy_file(self, container_id: str, file_id: str, *, tenant: str) -> ContainerFile:
        await self.get(container_id, tenant=tenant)
        about = await self._get_small_upload(file_id, "file_id", tenant)
        data = await self._require_files("file_id").read(file_id, tenant=tenant)
        return await self.add_file(container_id, about.filename, data, tenant=tenant)

    async def list_files(self, container_id: str, params: ContainerListParams, *, tenant: str) -> Page[ContainerFile]:
        return await self._router.call(
            tenant, container_id, self._local_containers.files, container_id, params, tenant=tenant
        )

    async def get_file(self, container_id: str, file_id: str, *, tenant: str) -> ContainerFile:
        return await self._router.call(
            tenant, container_id, self._local_containers.file, container_id, file_id, tenant=tenant
        )

    async def content(self, container_id: str, file_id: str, *, tenant: str) -> bytes:
        return await self._router.call(
            tenant, container_id, self._local_containers.content, container_id, file_id, tenant=tenant
        )

    async def delete_file(self, container_id: str, file_id: str, *, tenant: str) -> None:
        delete = self._local_containers.delete_file
        await self._router.call(tenant, container_id, delete, container_id, file_id, tenant=tenant)

    async def _get_small_upload(self, file_id: str, param: str, tenant: str) -> FileObject:
        """An uploaded file that a container has room for."""
        about = await self._require_files(param).get(file_id, tenant=tenant)
        if about.bytes > MAX_FILES_BYTES:
            raise InvalidRequest("A file of a container must not be larger than 16 MiB.", param=param)
        return about

    def _require_files(self, param: str) -> Files:
        if self._files is None:
            raise Unsupported("Files cannot be uploaded to this server.", param=param)
        return self._files
