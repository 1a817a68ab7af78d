"""Python's sessions as containers: made, listed and ended by clients, with files put in and taken out, from any process
of the deployment."""

import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePosixPath

from openai.types import FileObject

from apis.containers import Container, ContainerFile, Containers, ContainersPage, NewContainer
from apis.errors import InvalidRequest, NotFound, Overloaded, ToolFailed, Unsupported
from apis.files import Files, Page
from apis.wire.tools import ListedNetwork
from providers.tool_runtime.python.files import MAX_FILES_BYTES, is_file_name
from providers.tool_runtime.python.local_containers import LIMITS, HeldContainers, page_of
from providers.tool_runtime.python.session_router import Deployment
from providers.tool_runtime.python.sessions import Terms


@dataclass(frozen=True, slots=True)
class Offer:
    """What containers are made with where nothing else is asked, and the most that may be asked."""

    terms: Terms
    max_memory_bytes: int
    isolated: bool


class PythonContainers(Containers):
    """Over the sessions of all processes; `held` are this one's, and `files` the uploads that may be copied."""

    def __init__(self, deployment: Deployment, held: HeldContainers, offer: Offer, files: Files | None) -> None:
        self.max_file_bytes = MAX_FILES_BYTES
        self._deployment = deployment
        self._held = held
        self._offer = offer
        self._files = files

    async def check(self, new: NewContainer, *, tenant: str) -> None:
        most = self._offer.max_memory_bytes
        if new.memory_limit is not None and LIMITS[new.memory_limit] > most:
            raise Unsupported(
                f"A container has at most {most >> 20} MiB here: raise `max_memory_mib` of the tool runtime.",
                param="memory_limit",
                code="unsupported_value",
            )
        if isinstance(new.network_policy, ListedNetwork):
            message = "A container has no network here: use the policy 'disabled'."
            raise Unsupported(message, param="network_policy", code="unsupported_value")
        if new.network_policy is not None and not self._offer.isolated:
            message = "The network of a container cannot be turned off here: its backend is not a sandbox."
            raise Unsupported(message, param="network_policy", code="unsupported_value")
        if new.skills:
            raise Unsupported("Skills are not offered by this server.", param="skills")
        if new.file_ids:
            self._uploads("file_ids")
        for at, file_id in enumerate(new.file_ids or ()):
            try:
                await self._small_enough(file_id, "file_ids", tenant)
            except (InvalidRequest, NotFound) as exc:
                exc.param = f"file_ids[{at}]"
                raise

    async def create(self, new: NewContainer, *, tenant: str, container_id: str | None = None) -> Container:
        await self.check(new, tenant=tenant)
        name = container_id or f"cntr_{secrets.token_hex(16)}"
        memory = LIMITS[new.memory_limit] if new.memory_limit else self._offer.terms.memory_bytes
        idle_s = new.expires_after.minutes * 60 if new.expires_after else self._offer.terms.idle_s
        try:
            made = await self._deployment.make(tenant, name, Terms(idle_s, memory, new.name))
        except ToolFailed as exc:
            raise Overloaded(exc.message) from exc
        try:
            for file_id in new.file_ids or ():
                await self.copy_file(name, file_id, tenant=tenant)
        except BaseException:
            if made:
                with suppress(NotFound):
                    await self._held.delete(name, tenant=tenant)
            raise
        return await self.get(name, tenant=tenant)

    async def get(self, container_id: str, *, tenant: str) -> Container:
        return await self._deployment.do(tenant, container_id, self._held.get, container_id, tenant=tenant)

    async def list(self, page: ContainersPage, *, tenant: str) -> Page[Container]:
        some = await self._deployment.everywhere(tenant, self._held.all, tenant)
        made = sorted((each for all_of_one in some for each in all_of_one), key=lambda each: (each[0], each[1].id))
        return page_of([container for _, container in made if page.name in (None, container.name)], page)

    async def delete(self, container_id: str, *, tenant: str) -> None:
        await self._deployment.do(tenant, container_id, self._held.delete, container_id, tenant=tenant)

    async def add_file(self, container_id: str, filename: str, data: bytes, *, tenant: str) -> ContainerFile:
        name = PurePosixPath(filename.replace("\\", "/")).name
        if not is_file_name(name) or name.startswith("."):
            raise InvalidRequest(
                "A file's name must be printable, at most 255 bytes long and not begin with a dot.", param="file"
            )
        if len(data) > MAX_FILES_BYTES:
            raise InvalidRequest("A file of a container must not be larger than 16 MiB.", param="file")
        add = self._held.add_file
        return await self._deployment.do(tenant, container_id, add, container_id, name, data, tenant=tenant)

    async def copy_file(self, container_id: str, file_id: str, *, tenant: str) -> ContainerFile:
        await self.get(container_id, tenant=tenant)
        about = await self._small_enough(file_id, "file_id", tenant)
        data = await self._uploads("file_id").read(file_id, tenant=tenant)
        return await self.add_file(container_id, about.filename, data, tenant=tenant)

    async def files(self, container_id: str, page: ContainersPage, *, tenant: str) -> Page[ContainerFile]:
        return await self._deployment.do(tenant, container_id, self._held.files, container_id, page, tenant=tenant)

    async def file(self, container_id: str, file_id: str, *, tenant: str) -> ContainerFile:
        return await self._deployment.do(tenant, container_id, self._held.file, container_id, file_id, tenant=tenant)

    async def content(self, container_id: str, file_id: str, *, tenant: str) -> bytes:
        return await self._deployment.do(tenant, container_id, self._held.content, container_id, file_id, tenant=tenant)

    async def delete_file(self, container_id: str, file_id: str, *, tenant: str) -> None:
        delete = self._held.delete_file
        await self._deployment.do(tenant, container_id, delete, container_id, file_id, tenant=tenant)

    async def _small_enough(self, file_id: str, param: str, tenant: str) -> FileObject:
        """An uploaded file that a container has room for."""
        about = await self._uploads(param).get(file_id, tenant=tenant)
        if about.bytes > MAX_FILES_BYTES:
            raise InvalidRequest("A file of a container must not be larger than 16 MiB.", param=param)
        return about

    def _uploads(self, param: str) -> Files:
        if self._files is None:
            raise Unsupported("Files cannot be uploaded to this server.", param=param)
        return self._files
