"""Steering: input for responses that run or wait, and the responses that follow them by themselves, each queued in the
write that stores the end of the one before."""

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import msgspec

from apis.errors import NotFound, SteeringRefused
from apis.responses import CreateResponse, SteerResponse
from apis.steering import Steer
from apis.storage.kv_store import ABSENT, Delete, Entry, KVStore, Op, Put
from apis.storage.lease import LeaseLost
from apis.storage.records import encode_record
from apis.wire.base import value_to_kept_json
from apis.wire.items import Item
from providers.common.state.change import write_prepared
from providers.responses.background.event_log import EventLog
from providers.responses.background.new_run import build_log_op, is_storable
from providers.responses.background.offers import Offers
from providers.responses.background.ranks import request_rank
from providers.responses.background.runs import ResponseRef, Runs, StoredRequest
from providers.responses.background.stored_run import parse_stored_request
from providers.responses.context.conversation import stored_item
from providers.responses.events.ids import ResponseIds, is_response_id
from providers.responses.run.mailbox import (
    Mailbox,
    answered_calls,
    check_input,
    check_steering,
    list_required_input,
    mailbox_key,
    not_active_error,
    read_mailbox,
)
from providers.responses.run.open_mailbox import OpenMailbox, OpenMailboxes
from providers.responses.run.pending_response import PendingResponse
from providers.responses.store.history import History
from providers.responses.store.history_cache import TurnPosition
from providers.responses.store.turn_writer import FinishedResponse, QueuedSuccessor


class Steering:
    """The mailboxes of background responses of one store. `wake` lets the workers of this process look for runs."""

    def __init__(
        self,
        kv: KVStore,
        history: History,
        runs: Runs,
        event_log: EventLog,
        *,
        wake: Callable[[], None],
        has_others: Callable[[], Awaitable[bool]],
        poll_s: float,
    ) -> None:
        """`has_others` and `poll_s` are those of `Offers`."""
        self._kv = kv
        self._history = history
        self._runs = runs
        self._event_log = event_log
        self.wake = wake
        self.mailboxes = OpenMailboxes(kv, history.retention_s)
        self.offers = Offers(kv, self.mailboxes, has_others, poll_s)

    async def post(self, request: SteerResponse, *, tenant: str) -> Steer:
        """Store input for a response that has not ended, whichever process executes it. Raises SteeringRefused."""
        open_mailbox = self.mailboxes.find(tenant, request.previous_response_id)
        if open_mailbox is not None:
            return await open_mailbox.post(request)
        check_input(request)
        ref = ResponseRef(tenant, request.previous_response_id)
        key, steer = mailbox_key(tenant, ref.id), None

        async def prepare() -> Sequence[Op] | None:
            nonlocal steer
            stored_run = await self._runs.get(ref)
            run_entry, entry = await self._kv.get_many([ref.run_key, key])
            if stored_run is None or run_entry is None:
                return None
            run, stored_request = stored_run
            running = parse_stored_request(stored_request, ref.id)
            if not run.is_portable:
                message = "A response cannot be steered that holds what is not stored, such as an MCP server's headers."
                raise SteeringRefused(message, param="previous_response_id")
            check_steering(running)
            mailbox, _ = read_mailbox(self._kv, key, entry)
            steer = mailbox.add(request)
            life_s = self._runs.retention_s + running.window_s
            version = ABSENT if entry is None else entry.version
            return [
                Put(key, encode_record(mailbox), life_s, version),
                # the run has not ended: its end deletes the record
                Put(ref.run_key, run_entry.value, life_s, run_entry.version),
            ]

        await write_prepared(self._kv, prepare)
        return steer or await self._offer(request, ref)

    async def end_after_turn(self, ref: ResponseRef) -> None:
        """Put an empty mailbox before a response that has not ended: it ends as one that was steered, and no other one
        follows it."""
        key = mailbox_key(ref.tenant, ref.id)

        async def prepare() -> Sequence[Op] | None:
            stored_run = await self._runs.get(ref)
            run_entry, entry = await self._kv.get_many([ref.run_key, key])
            if stored_run is None or run_entry is None or entry is not None:
                return None
            life_s = self._runs.retention_s + parse_stored_request(stored_run[1], ref.id).window_s
            # the run has not ended: its end deletes the record
            kept_run = Put(ref.run_key, run_entry.value, life_s, run_entry.version)
            return [Put(key, encode_record(Mailbox()), life_s, ABSENT), kept_run]

        await write_prepared(self._kv, prepare)

    async def _offer(self, request: SteerResponse, ref: ResponseRef) -> Steer:
        """Send input to a response that no background run makes: another process may run it. Raises
        SteeringRefused."""
        try:
            raise not_active_error(await self._history.load_response(ref.id, tenant=ref.tenant))
        except NotFound as exc:
            steer = await self.offers.send(request, tenant=ref.tenant) if is_response_id(ref.id) else None
            if steer is None:
                raise SteeringRefused(exc.message, param="previous_response_id", code="response_not_found") from None
            return steer

    def drop_op(self, ref: ResponseRef) -> Delete:
        """Return the write that drops what was sent to a response which has failed or was cancelled."""
        return Delete(mailbox_key(ref.tenant, ref.id))

    async def store_end(
        self,
        store: Callable[[FinishedResponse], Awaitable[None]],
        finished: FinishedResponse,
        request: CreateResponse,
        ref: ResponseRef,
        key_id: str,
        *,
        has_mail: bool,
    ) -> None:
        """Store the end of a response by `store`, and with it the one that reads what was sent. `has_mail` says that
        something may have been sent; more may come until the write. Raises LeaseLost, as `store` does."""
        key = mailbox_key(ref.tenant, ref.id)
        entry = await self._kv.get(key) if has_mail else None
        while True:
            version = ABSENT if entry is None else entry.version
            successor, has_mailbox = self._follow(finished, request, ref, key_id, entry)
            end_ops = [] if has_mailbox else [Delete(key, version)]
            ending = msgspec.structs.replace(
                finished, extra_ops=[*finished.extra_ops, *end_ops], successor=successor, has_mailbox=has_mailbox
            )
            try:
                await store(ending)
            except LeaseLost:
                entry = await self._kv.get(key)
                if (ABSENT if entry is None else entry.version) == version:
                    raise
                continue  # more was sent before this write
            if successor is not None:
                self.wake()
            return

    def create_mailbox(self, pending: PendingResponse, find_key: Callable[[], Awaitable[str]]) -> OpenMailbox:
        """Return the mailbox of a response that its request runs. `find_key` returns the id of the key that sent the
        request. Where the mailbox has had input, call `wake` after the response."""
        return OpenMailbox(
            self.mailboxes,
            pending.request,
            (pending.tenant, pending.ids.response_id),
            pending.agent_loop.end_after_turn,
            partial(self._follow_request, pending, find_key),
        )

    async def _follow_request(
        self,
        pending: PendingResponse,
        find_key: Callable[[], Awaitable[str]],
        finished: FinishedResponse,
        mailbox: Mailbox,
    ) -> FinishedResponse:
        """Return the end of a response that its request has run, with the one that follows it by itself, or with a
        mailbox that stays."""
        ref, items = ResponseRef(pending.tenant, pending.ids.response_id), mailbox.read_items()
        successor = None
        if not list_required_input(finished.response, answered_calls(items)):
            successor = self._build_successor(pending.request, ref, mailbox.successor_id, items, await find_key())
        return msgspec.structs.replace(finished, successor=successor, has_mailbox=successor is None)

    def _follow(
        self,
        finished: FinishedResponse,
        request: CreateResponse,
        ref: ResponseRef,
        key_id: str,
        entry: Entry | None,
    ) -> tuple[QueuedSuccessor | None, bool]:
        """Return the response that reads the mailbox, if it can be queued; and True if the mailbox is to stay."""
        response = finished.response
        mailbox, items = read_mailbox(self._kv, mailbox_key(ref.tenant, ref.id), entry)
        if not mailbox.posted or response.status not in ("completed", "incomplete"):
            return None, False
        if list_required_input(response, answered_calls(items)):
            return None, True
        successor = self._build_successor(request, ref, mailbox.successor_id, items, key_id)
        return successor, successor is None

    def _build_successor(
        self, request: CreateResponse, ref: ResponseRef, successor_id: str, items: Sequence[Item], key_id: str
    ) -> QueuedSuccessor | None:
        """Return the response that follows the one of `ref` with its settings and these items; None where its request
        holds what is not stored."""
        update = {"previous_response_id": ref.id, "input": [*items], "background": True}
        request = request.model_copy(update=update)
        request_json = request.model_dump_json(by_alias=True, exclude_none=True).encode()
        if not is_storable(request, request_json):
            return None
        successor, ids, created_at = ResponseRef(ref.tenant, successor_id), ResponseIds(successor_id), int(time.time())
        items_json = value_to_kept_json([stored_item(item, ids) for item in items])
        stored_request = StoredRequest(
            msgspec.Raw(request_json),
            msgspec.Raw(items_json),
            ids.item_id_count,
            created_at,
            key_id=key_id,
            is_uncharged=True,
        )
        rank = request_rank(request)
        log_op = build_log_op(request, successor, created_at, self._event_log)

        def build_ops(position: TurnPosition) -> Sequence[Op]:
            stored_request.previous = position
            return [*self._runs.queue_ops(successor, rank, stored_request), log_op]

        return QueuedSuccessor(successor_id, self._runs.retention_s + rank.window_s, build_ops)
