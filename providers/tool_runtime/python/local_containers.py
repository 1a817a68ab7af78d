"""The containers that this process keeps: how they stand, and the files in them."""

import hashlib
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from openai.types.container_retrieve_response import ExpiresAfter, NetworkPolicy

from apis.containers import Container, ContainerFile, ContainersPage, MemoryLimit
from apis.errors import InvalidRequest, NotFound, Overloaded, ToolFailed
from apis.files import Page
from providers.tool_runtime.python.sandbox import FOLDER
from providers.tool_runtime.python.session import FileRefused, Session, SessionOver
from providers.tool_runtime.python.session_router import unknown
from providers.tool_runtime.python.sessions import Kept, Sessions

Shown = TypeVar("Shown", Container, ContainerFile)
LIMITS: Final[dict[MemoryLimit, int]] = {"1g": 1 << 30, "4g": 4 << 30, "16g": 16 << 30, "64g": 64 << 30}


class HeldContainers:
    """Over the sessions of one process. What its methods do and raise is what those of Containers do that are named
    alike; their arguments and results can be sent from process to process."""

    def __init__(self, sessions: Sessions, *, isolated: bool) -> None:
        self._sessions = sessions
        self._isolated = isolated

    async def get(self, container_id: str, *, tenant: str) -> Container:
        return self._shown(container_id, self._kept(container_id, tenant))

    async def all(self, tenant: str) -> Sequence[tuple[float, Container]]:
        """The tenant's containers, with the moment each was made at."""
        kept = self._sessions.of(tenant).items()
        return [(each.created_at, self._shown(container_id, each)) for container_id, each in kept]

    async def delete(self, container_id: str, *, tenant: str) -> None:
        self._kept(container_id, tenant)
        self._sessions.drop((tenant, container_id, 0))

    async def add_file(self, container_id: str, name: str, data: bytes, *, tenant: str) -> ContainerFile:
        """The same, under this very name, which must be a good one."""
        async with self._using(container_id, tenant) as (session, kept):
            await session.write(name, data)
            kept.given.add(name)
            return await _find(session, kept, container_id, lambda file: file.path == path_of(name))

    async def files(self, container_id: str, page: ContainersPage, *, tenant: str) -> Page[ContainerFile]:
        if self._kept(container_id, tenant).session is None:
            return page_of([], page)  # what has no process has no files: no need to start one
        async with self._using(container_id, tenant) as (session, kept):
            found = await _files(session, kept, container_id)
        return page_of(sorted(found, key=lambda file: (file.created_at, file.id)), page)

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

    def _kept(self, container_id: str, tenant: str) -> Kept:
        kept = self._sessions.of(tenant).get(container_id)
        if kept is None:
            raise unknown(container_id)
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
            memory_limit=next((limit for limit, size in LIMITS.items() if size == terms.memory_bytes), None),
            network_policy=NetworkPolicy(type="disabled") if self._isolated else None,
        )


def page_of(found: Sequence[Shown], page: ContainersPage) -> Page[Shown]:
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
