"""Python's sessions as containers: made, listed and ended by clients, with files put in and taken out."""

import hashlib
import math
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final, TypeVar

from openai.types import FileObject
from openai.types.container_retrieve_response import ExpiresAfter, NetworkPolicy

from apis.containers import Container, ContainerFile, Containers, ContainersPage, MemoryLimit, NewContainer
from apis.errors import InvalidRequest, NotFound, Overloaded, ToolFailed, Unsupported
from apis.files import Files, Page
from apis.tools import ListedNetwork
from providers.tool_runtime.python_files import MAX_FILES_BYTES, is_file_name
from providers.tool_runtime.python_sandbox import FOLDER
from providers.tool_runtime.python_session import FileRefused, Session, SessionOver
from providers.tool_runtime.python_sessions import Kept, Sessions, Terms

Shown = TypeVar("Shown", Container, ContainerFile)
_LIMITS: Final[dict[MemoryLimit, int]] = {"1g": 1 << 30, "4g": 4 << 30, "16g": 16 << 30, "64g": 64 << 30}


@dataclass(frozen=True, slots=True)
class Offer:
    """What containers are made with where nothing else is asked, and the most that may be asked."""

    terms: Terms
    max_memory_bytes: int
    isolated: bool


class PythonContainers(Containers):
    """Over the sessions of one Python runtime; `files` are the uploads that may be copied."""

    def __init__(self, sessions: Sessions, offer: Offer, files: Files | None) -> None:
        self.max_file_bytes = MAX_FILES_BYTES
        self._sessions = sessions
        self._offer = offer
        self._files = files

    async def check(self, new: NewContainer, *, tenant: str) -> None:
        most = self._offer.max_memory_bytes
        if new.memory_limit is not None and _LIMITS[new.memory_limit] > most:
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
        memory = _LIMITS[new.memory_limit] if new.memory_limit else self._offer.terms.memory_bytes
        idle_s = new.expires_after.minutes * 60 if new.expires_after else self._offer.terms.idle_s
        try:
            key = self._sessions.create(tenant, name, Terms(idle_s, memory, new.name))
        except ToolFailed as exc:
            raise Overloaded(exc.message) from exc
        try:
            for file_id in new.file_ids or ():
                await self.copy_file(name, file_id, tenant=tenant)
        except BaseException:
            self._sessions.drop(key)
            raise
        return self.get(name, tenant=tenant)

    def get(self, container_id: str, *, tenant: str) -> Container:
        return self._shown(container_id, self._kept(container_id, tenant))

    def list(self, page: ContainersPage, *, tenant: str) -> Page[Container]:
        kept = sorted(self._sessions.of(tenant).items(), key=lambda each: each[1].created_at)
        return _page([self._shown(*each) for each in kept if page.name in (None, each[1].terms.label)], page)

    def delete(self, container_id: str, *, tenant: str) -> None:
        self._kept(container_id, tenant)
        self._sessions.drop((tenant, container_id, 0))

    async def add_file(self, container_id: str, filename: str, data: bytes, *, tenant: str) -> ContainerFile:
        name = PurePosixPath(filename.replace("\\", "/")).name
        if not is_file_name(name) or name.startswith("."):
            raise InvalidRequest(
                "A file's name must be printable, at most 255 bytes long and not begin with a dot.", param="file"
            )
        if len(data) > MAX_FILES_BYTES:
            raise InvalidRequest("A file of a container must not be larger than 16 MiB.", param="file")
        async with self._using(container_id, tenant) as (session, kept):
            await session.write(name, data)
            kept.given.add(name)
            return await _find(session, kept, container_id, lambda file: file.path == path_of(name))

    async def copy_file(self, container_id: str, file_id: str, *, tenant: str) -> ContainerFile:
        self._kept(container_id, tenant)
        about = await self._small_enough(file_id, "file_id", tenant)
        data = await self._uploads("file_id").read(file_id, tenant=tenant)
        return await self.add_file(container_id, about.filename, data, tenant=tenant)

    async def files(self, container_id: str, page: ContainersPage, *, tenant: str) -> Page[ContainerFile]:
        if self._kept(container_id, tenant).session is None:
            return _page([], page)  # what has no process has no files: no need to start one
        async with self._using(container_id, tenant) as (session, kept):
            found = await _files(session, kept, container_id)
        return _page(sorted(found, key=lambda file: (file.created_at, file.id)), page)

    async def file(self, container_id: str, file_id: str, *, tenant: str) -> ContainerFile:
        async with self._using(container_id, tenant) as (session, kept):
            return await _find(session, kept, container_id, lambda file: file.id == file_id)

    async def content(self, container_id: str, file_id: str, *, tenant: str) -> bytes:
        async with self._using(container_id, tenant) as (session, kept):
            file = await _find(session, kept, container_id, lambda file: file.id == file_id)
            return await session.read(_name(file))

    async def delete_file(self, container_id: str, file_id: str, *, tenant: str) -> None:
        async with self._using(container_id, tenant) as (session, kept):
            file = await _find(session, kept, container_id, lambda file: file.id == file_id)
            await session.delete(_name(file))
            kept.given.discard(_name(file))

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

    def _kept(self, container_id: str, tenant: str) -> Kept:
        kept = self._sessions.of(tenant).get(container_id)
        if kept is None:
            raise NotFound(f"Container with id '{container_id:.256}' not found.")
        return kept

    @asynccontextmanager
    async def _using(self, container_id: str, tenant: str) -> AsyncGenerator[tuple[Session, Kept]]:
        kept = self._kept(container_id, tenant)
        try:
            async with self._sessions.use((tenant, container_id, 0)) as (session, _):
                yield session, kept
        except FileRefused as exc:
            if exc.missing:
                raise _no_file() from None
            raise InvalidRequest(f"The file could not be used: {exc}.") from None
        except SessionOver as exc:
            raise Overloaded(f"The container's programs ended: {exc}. Try again.") from exc
        except ToolFailed as exc:
            raise Overloaded(exc.message) from exc

    def _shown(self, container_id: str, kept: Kept) -> Container:
        terms = kept.terms
        return Container(
            id=container_id,
            object="container",
            created_at=int(kept.created_at),
            name=terms.label,
            status="running",
            last_active_at=int(kept.used_at),
            expires_after=ExpiresAfter(anchor="last_active_at", minutes=math.ceil(terms.idle_s / 60)),
            memory_limit=next((limit for limit, size in _LIMITS.items() if size == terms.memory_bytes), None),
            network_policy=NetworkPolicy(type="disabled") if self._offer.isolated else None,
        )


def _page(found: Sequence[Shown], page: ContainersPage) -> Page[Shown]:
    """The part of a list, oldest first, that was asked for."""
    ordered = [*found] if page.order == "asc" else [*reversed(found)]
    if page.after is not None:
        ids = [each.id for each in ordered]
        if page.after not in ids:
            raise InvalidRequest("There is nothing with this id.", param="after", code="invalid_value")
        ordered = ordered[ids.index(page.after) + 1 :]
    return Page(ordered[: page.limit], has_more=len(ordered) > page.limit)


async def _files(session: Session, kept: Kept, container_id: str) -> Sequence[ContainerFile]:
    return [
        ContainerFile(
            id=id_of(container_id, name),
            bytes=size,
            container_id=container_id,
            created_at=at,
            object="container.file",
            path=path_of(name),
            source="user" if name in kept.given else "assistant",
        )
        for name, size, at in await session.files()
    ]


async def _find(
    session: Session, kept: Kept, container_id: str, is_meant: Callable[[ContainerFile], bool]
) -> ContainerFile:
    found = next((file for file in await _files(session, kept, container_id) if is_meant(file)), None)
    if found is None:
        raise _no_file()
    return found


def id_of(container_id: str, name: str) -> str:
    """Follows from the name, so that nothing has to be remembered and programs can write files as they like."""
    return f"cfile_{hashlib.sha256(f'{container_id}/{name}'.encode()).hexdigest()[:32]}"


def path_of(name: str) -> str:
    return f"{FOLDER}/{name}"


def _name(file: ContainerFile) -> str:
    return file.path.removeprefix(f"{FOLDER}/")


def _no_file() -> NotFound:
    return NotFound("There is no such file in this container.")
