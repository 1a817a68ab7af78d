"""ProjectEraser: deletes all that a project owns, and proves that nothing of it is in the store any more.

What lies outside of the store (containers, the chunks in a vector index, files in an object store) is deleted through
its own API first, and so are automations, whose due rows are sorted by time. The rest follows from the form of the
keys: those of a tenant are `TENANT/...`, and those that providers write about a tenant's work are `/KIND/TENANT/...` or
`~KIND/TENANT/...`; accounts are `/accounts/KIND/PROJECT`.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from apis.accounts.accounts import MAX_KEY_AGE_S
from apis.accounts.directory import Project
from apis.containers import ContainerListParams
from apis.errors import InvalidRequest, NotFound, Overloaded
from apis.storage.kv_store import Delete, KVStore
from apis.storage.records import delete_all, scan_groups
from stack.build import Stack

if TYPE_CHECKING:
    from providers.accounts.erasure import StoredProjectErasure

_ROUNDS: Final = 5
_PAUSE_S: Final = 0.5
"""Seconds between two rounds: a worker that has lost its lease writes nothing after this time."""
_BATCH_KEYS: Final = 500
_ACCOUNTS: Final = "accounts"
_STAYING_ACCOUNTS: Final = frozenset({"audit", "deleted", "projects", "usage"})
"""Accounts records that a deletion leaves: the log and the sums, and the project itself, which goes last."""


@dataclass(frozen=True, slots=True)
class ErasedProject:
    """The outcome of a deletion: the number of entries of the store that were deleted."""

    project_id: str
    entry_count: int


class ProjectEraser:
    """Deletes the projects of a stack. A deletion that broke off is repeated from its beginning."""

    def __init__(self, stack: Stack, erasure: "StoredProjectErasure") -> None:
        self._stack = stack
        self._kv = stack.kv_store
        self._erasure = erasure

    async def delete_project(self, project: Project) -> ErasedProject:
        """Delete an archived project with all it owns. Returns when nothing of it is left in the store.

        Raises InvalidRequest if it is not archived, and Overloaded if something goes on writing.
        """
        if project.archived_at is None:
            raise InvalidRequest(
                f"The project '{project.id}' is active: archive it first, so that its keys are refused.",
                param="project_id",
                code="project_active",
            )
        # from then on no worker admits a request of it
        await asyncio.sleep(max(0.0, project.archived_at + 1 + MAX_KEY_AGE_S - time.time()))
        count = await self.erase_tenant(project.id)
        await self._erasure.end_project(project.id)
        return ErasedProject(project.id, count)

    async def erase_tenant(self, tenant: str) -> int:
        """Delete everything of the tenant, and return the number of entries of the store. Raises Overloaded if there
        are still new ones after several rounds."""
        count = 0
        for number in range(_ROUNDS):
            await self._delete_outside_of_store(tenant)
            count += await self._erasure.delete_keys(tenant)
            async for prefix in _tenant_prefixes(self._kv, tenant):
                count += await _delete_prefix(self._kv, prefix)
            if not await self.list_remaining(tenant):
                return count
            await asyncio.sleep(_PAUSE_S * (number + 1))
        remaining = ", ".join(await self.list_remaining(tenant))
        raise Overloaded(f"The project is still being written to: {remaining}. Try again.", retry_after_s=5)

    async def list_remaining(self, tenant: str) -> list[str]:
        """Return some of the keys that the store has of the tenant; none proves that the deletion is complete."""
        remaining: list[str] = []
        async for prefix in _tenant_prefixes(self._kv, tenant):
            remaining += [key for key, _ in await self._kv.scan(prefix, limit=3)]
        return remaining

    async def _delete_outside_of_store(self, tenant: str) -> None:
        runtime, stores = self._stack.tool_runtime, self._stack.vector_stores
        containers = runtime.containers() if runtime is not None else None
        if containers is not None:
            while page := (await containers.list(ContainerListParams(limit=100), tenant=tenant)).data:
                for container in page:
                    await _ignore_absence(containers.delete(container.id, tenant=tenant))
        if stores is not None:
            await stores.delete_all(tenant=tenant)
        if self._stack.agents is not None:
            agents = await self._stack.agents.load()
            await agents.automations.delete_all(tenant=tenant)
            if agents.environments is not None:
                await agents.environments.delete_all(tenant=tenant)
        if self._stack.files is not None:
            await self._stack.files.delete_outside_of_store(tenant=tenant)


async def _tenant_prefixes(kv: KVStore, tenant: str) -> AsyncGenerator[str]:
    """Yield the prefixes of all keys of the tenant, found by the kinds that the store has. A prefix that ends with the
    tenant's name is a whole key."""
    yield f"{tenant}/"
    for root in ("/", "~"):
        async for kind, _ in scan_groups(kv, root, limit=1):
            if (root, kind) != ("/", _ACCOUNTS):
                yield f"{root}{kind}/{tenant}/"
                yield f"{root}{kind}/{tenant}~"
    async for kind, _ in scan_groups(kv, f"/{_ACCOUNTS}/", limit=1):
        if kind not in _STAYING_ACCOUNTS:
            yield f"/{_ACCOUNTS}/{kind}/{tenant}/"
            if await kv.get(f"/{_ACCOUNTS}/{kind}/{tenant}") is not None:
                yield f"/{_ACCOUNTS}/{kind}/{tenant}"


async def _delete_prefix(kv: KVStore, prefix: str) -> int:
    if prefix.endswith(("/", "~")):
        return await delete_all(kv, prefix, page_size=_BATCH_KEYS, durable=True)
    await kv.write([Delete(prefix)])
    return 1


async def _ignore_absence(deletion: Awaitable[None]) -> None:
    with suppress(NotFound):
        await deletion
