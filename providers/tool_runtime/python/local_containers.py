"""The containers that this process keeps: how they stand, and the files in them."""

import hashlib
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from operator import attrgetter
from typing import Final, TypeVar

from openai.types.container_retrieve_response import ExpiresAfter, NetworkPolicy

from apis.containers import Container, ContainerFile, ContainerListParams, MemoryLimit
from apis.errors import InvalidRequest, NotFound, Overloaded, ToolFailed
from apis.storage.pages import Page, page_after
from providers.tool_runtime.python.sandbox import WORK_FOLDER
from providers.tool_runtime.python.session import FileRefused, PythonSession, SessionEnded
from providers.tool_runtime.python.session_router import container_not_found
from providers.tool_runtime.python.sessions import PythonSessionPool, SessionEntry

ContainerItemT = TypeVar("ContainerItemT", Container, ContainerFile)
MEMORY_LIMITS_BYTES: Final[dict[MemoryLimit, int]] = {"1g": 1 << 30, "4g": 4 << 30, "16g": 16 << 30, "64g": 64 << 30}


class LocalContainers:
    """Over the sessions of one process. What its methods do and raise is what those of Containers do that are named
    alike; their arguments and results can be sent from process to process."""

    def __init__(self, sessions: PythonSessionPool, *, is_isolated: bool) -> None:
        self._sessions = sessions
        self._is_isolated = is_isolated

    async def get(self, container_id: str, *, tenant: str) -> Container:
        return self._build_container(container_id, self._get_entry(container_id, tenant))

    async def all(self, tenant: str) -> Sequence[tuple[float, Container]]:
        """The tenant's containers, with the moment each was made at."""
        kept = self._sessions.list_entries(tenant).items()
        return [(each.created_at, self._build_container(container_id, each)) for container_id, each in kept]

    async def delete(self, container_id: str, *, tenant: str) -> None:
        self._get_entry(container_id, tenant)
        self._sessions.end_session((tenant, container_id, 0))

    async def add_file(self, container_id: str, name: str, data: bytes, *, tenant: str) -> ContainerFile:
        """The same, under this very name, which must be a good one."""
        async with self._use_session(container_id, tenant) as (session, kept):
            await session.write(name, data)
            kept.uploaded_names.add(name)
            return await _find_file(session, kept, container_id, lambda file: file.path == name_to_path(name))

    async def files(self, container_id: str, page: ContainerListParams, *, tenant: str) -> Page[ContainerFile]:
        if self._get_entry(container_id, tenant).session is None:
            return paginate_items([], page)  # what has no process has no files: no need to start one
        async with self._use_session(container_id, tenant) as (session, kept):
            found = await _list_files(session, kept, container_id)
        return paginate_items(sorted(found, key=lambda file: (file.created_at, file.id)), page)

    async def file(self, container_id: str, file_id: str, *, tenant: str) -> ContainerFile:
        async with self._use_session(container_id, tenant) as (session, kept):
            return await _find_file(session, kept, container_id, lambda file: file.id == file_id)

    async def content(self, container_id: str, file_id: str, *, tenant: str) -> bytes:
        async with self._use_session(container_id, tenant) as (session, kept):
            file = await _find_file(session, kept, container_id, lambda file: file.id == file_id)
            return await session.read(_file_to_name(file))

    async def delete_file(self, container_id: str, file_id: str, *, tenant: str) -> None:
        async with self._use_session(container_id, tenant) as (session, kept):
            file = await _find_file(session, kept, container_id, lambda file: file.id == file_id)
            await session.delete(_file_to_name(file))
            kept.uploaded_names.discard(_file_to_name(file))

    def _get_entry(self, container_id: str, tenant: str) -> SessionEntry:
        kept = self._sessions.list_entries(tenant).get(container_id)
        if kept is None:
            raise container_not_found(container_id)
        return kept

    @asynccontextmanager
    async def _use_session(self, container_id: str, tenant: str) -> AsyncGenerator[tuple[PythonSession, SessionEntry]]:
        kept = self._get_entry(container_id, tenant)
        try:
            async with self._sessions.use_session((tenant, container_id, 0)) as (session, _):
                yield session, kept
        except FileRefused as exc:
            if exc.is_missing:
                raise _file_not_found() from None
            raise InvalidRequest(f"The file could not be used: {exc}.") from None
        except SessionEnded as exc:
            raise Overloaded(f"The container's programs ended: {exc}. Try again.") from exc
        except ToolFailed as exc:
            raise Overloaded(exc.message) from exc

    def _build_container(self, container_id: str, entry: SessionEntry) -> Container:
        terms = entry.settings
        return Container(
            id=container_id,
            object="container",
            created_at=int(entry.created_at),
            name=terms.label,
            status="running",
            last_active_at=int(entry.last_used_at),
            expires_after=ExpiresAfter(anchor="last_active_at", minutes=math.ceil(terms.idle_s / 60)),
            memory_limit=next(
                (limit for limit, size in MEMORY_LIMITS_BYTES.items() if size == terms.memory_bytes), None
            ),
            network_policy=NetworkPolicy(type="disabled") if self._is_isolated else None,
        )


def paginate_items(items: Sequence[ContainerItemT], page: ContainerListParams) -> Page[ContainerItemT]:
    """The part of a list, oldest first, that was asked for."""
    ordered = items if page.order == "asc" else items[::-1]
    return page_after(ordered, page, attrgetter("id"), "There is nothing with this id.")


async def _list_files(session: PythonSession, entry: SessionEntry, container_id: str) -> Sequence[ContainerFile]:
    return [
        ContainerFile(
            id=name_to_file_id(container_id, name),
            bytes=size,
            container_id=container_id,
            created_at=at,
            object="container.file",
            path=name_to_path(name),
            source="user" if name in entry.uploaded_names else "assistant",
        )
        for name, size, at in await session.files()
    ]


async def _find_file(
    session: PythonSession, entry: SessionEntry, container_id: str, predicate: Callable[[ContainerFile], bool]
) -> ContainerFile:
    found = next((file for file in await _list_files(session, entry, container_id) if predicate(file)), None)
    if found is None:
        raise _file_not_found()
    return found


def name_to_file_id(container_id: str, name: str) -> str:
    """Follows from the name, so that nothing has to be remembered and programs can write files as they like."""
    return f"cfile_{hashlib.sha256(f'{container_id}/{name}'.encode()).hexdigest()[:32]}"


def name_to_path(name: str) -> str:
    return f"{WORK_FOLDER}/{name}"


def _file_to_name(file: ContainerFile) -> str:
    return file.path.removeprefix(f"{WORK_FOLDER}/")


def _file_not_found() -> NotFound:
    return NotFound("There is no such file in this container.")
