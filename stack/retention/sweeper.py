"""RetentionSweeper: deletes what projects have stored for longer than their retention, and remnants of deleted ones."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final

from apis.accounts.audit import CURRENT_ACTOR, SERVER_ACTOR
from apis.agents.sessions import CancelEvent, SendEvents, SessionListParams
from apis.conversations import ConversationListParams
from apis.documents.files import FileListParams
from apis.documents.vector_store_requests import VectorStoreListParams
from apis.errors import Conflict, NotFound, StackError
from apis.responses import ResponseListParams
from apis.storage.lease import Lease
from providers.agents.kv import StoredAgents
from stack.build import Stack
from stack.retention.erasure import ProjectEraser

if TYPE_CHECKING:
    from providers.accounts.erasure import StoredProjectErasure
    from providers.accounts.project_settings import StoredProjectSettings

_log = logging.getLogger(__name__)
SWEEP_INTERVAL_S: Final = 600.0
"""Seconds between two sweeps, of all workers together: data lives that much longer at most."""
_LEASE_KEY: Final = "/retention_lease"
_PAGE_OBJECTS: Final = 100
_DAY_S: Final = 86_400
_RUNNING: Final = frozenset({"queued", "in_progress"})
_ListPage = Callable[[int], Awaitable[Sequence[tuple[str, float]]]]
"""Returns the ids and the times of creation (Unix time) of the oldest objects of one kind, as many as its argument
says; the id is empty for one that must not be deleted now."""
_DeleteObject = Callable[[str], Awaitable[None]]


class RetentionSweeper:
    """Sweeps the projects of a stack whose accounts are stored, in one worker at a time."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack

    async def run(self) -> None:
        """Sweep at each interval until cancelled."""
        CURRENT_ACTOR.set(SERVER_ACTOR)
        while True:
            try:
                # the lease is not released: no other worker sweeps within the interval
                if await Lease(self._stack.kv_store, _LEASE_KEY, SWEEP_INTERVAL_S - 1).acquire() is not None:
                    await self.sweep()
            except StackError as exc:
                _log.warning("the retention of projects waits: %s", exc.message)
            await asyncio.sleep(SWEEP_INTERVAL_S)

    async def sweep(self) -> None:
        """Delete all that is too old now. A failure in one project does not stop the others."""
        organization = self._stack.organization
        if organization is None:
            return
        await self._erase_remnants(organization.erasure)
        for project_id in await organization.directory.list_project_ids():
            try:
                await self._sweep_project(project_id, organization.settings)
            except StackError as exc:
                _log.warning("what is too old of the project %s stays for now: %s", project_id, exc.message)

    async def _erase_remnants(self, erasure: "StoredProjectErasure") -> None:
        """Delete what requests that were under way have stored after the deletion of their project."""
        eraser = ProjectEraser(self._stack, erasure)
        for project_id in await erasure.list_ended():
            try:
                if await eraser.list_remaining(project_id):
                    await eraser.erase_tenant(project_id)
            except StackError as exc:
                _log.warning("remnants of the deleted project %s stay for now: %s", project_id, exc.message)

    async def _sweep_project(self, project_id: str, settings: "StoredProjectSettings") -> None:
        try:
            days = (await settings.get_settings(project_id)).retention_days
        except NotFound:  # deleted meanwhile
            return
        if days is None:
            return
        count = 0
        for list_page, delete in self._kinds(project_id):
            count += await _delete_older(time.time() - days * _DAY_S, list_page, delete)
        if count:
            _log.info("%d objects of the project %s were older than %g days", count, project_id, days)

    def _kinds(self, tenant: str) -> list[tuple[_ListPage, _DeleteObject]]:
        """Return, for each kind of object, the functions that list the oldest ones and delete one."""
        responses, files, stores = self._stack.responses, self._stack.files, self._stack.vector_stores
        conversations = responses.conversations()

        async def list_responses(count: int) -> Sequence[tuple[str, float]]:
            params = ResponseListParams.model_validate({"order": "asc", "limit": count})
            page = await responses.list_responses(params, tenant=tenant)
            return [("" if row["status"] in _RUNNING else row["id"], row["created_at"]) for row in page.data]

        async def list_conversations(count: int) -> Sequence[tuple[str, float]]:
            params = ConversationListParams.model_validate({"order": "asc", "limit": count})
            return [(row.id, row.created_at) for row in (await conversations.list(params, tenant=tenant)).data]

        kinds: list[tuple[_ListPage, _DeleteObject]] = [
            (list_responses, lambda name: responses.delete(name, tenant=tenant)),
            (list_conversations, lambda name: conversations.delete(name, tenant=tenant)),
        ]
        if (agents := self._stack.agents) is not None:
            # before conversations, of which each session has one
            kinds.insert(0, _session_kind(agents, tenant))
        if stores is not None:

            async def list_stores(count: int) -> Sequence[tuple[str, float]]:
                params = VectorStoreListParams(order="asc", limit=count)
                return [(row.id, row.created_at) for row in (await stores.list(params, tenant=tenant)).data]

            kinds.append((list_stores, lambda name: stores.delete(name, tenant=tenant)))
        if files is not None:

            async def list_files(count: int) -> Sequence[tuple[str, float]]:
                params = FileListParams(order="asc", limit=count)
                return [(row.id, row.created_at) for row in (await files.list(params, tenant=tenant)).data]

            async def delete_file(name: str) -> None:
                await files.delete(name, tenant=tenant)
                if stores is not None:
                    await stores.forget_file(name, tenant=tenant)

            kinds.append((list_files, delete_file))
        return kinds


def _session_kind(agents: StoredAgents, tenant: str) -> tuple[_ListPage, _DeleteObject]:
    """Return the functions that list the oldest sessions and delete one. The turn of a session that has one is
    cancelled, and the session deleted when that has ended."""

    async def list_sessions(count: int) -> Sequence[tuple[str, float]]:
        params = SessionListParams(order="asc", limit=count)
        page = await (await agents.load()).sessions.list(params, tenant=tenant)
        return [(row["id"], row["created_at"]) for row in page.data]

    async def delete_session(session_id: str) -> None:
        live = await agents.load()
        try:
            await live.sessions.delete(session_id, tenant=tenant)
        except Conflict:
            cancel = SendEvents(events=[CancelEvent(type="agent.session.input.cancel")])
            await live.activity.send(session_id, cancel, tenant=tenant, key_id="")

    return list_sessions, delete_session


async def _delete_older(cutoff: float, list_page: _ListPage, delete: _DeleteObject) -> int:
    """Delete the objects that were created before `cutoff`, in seconds of Unix time; return their number. The listings
    begin with the oldest, so a page without an old one ends it, and so does one that deletions have not changed.

    Most sweeps find nothing, so the first page is the oldest object alone."""
    count, handled_ids, page_size = 0, list[str](), 1
    while True:
        old_ids = [name for name, created_at in await list_page(page_size) if created_at < cutoff]
        for name in filter(None, old_ids):
            try:
                await delete(name)
            except NotFound:
                continue
            count += 1
        if not old_ids or old_ids == handled_ids:
            return count
        if page_size == _PAGE_OBJECTS:
            handled_ids = old_ids
        page_size = _PAGE_OBJECTS
