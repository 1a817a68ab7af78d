"""LoopSession: the responses of one WebSocket connection, with a cache of those that are not stored."""

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Final

import msgspec
from openai.types.responses import Response

from apis.accounts.accounts import Caller
from apis.accounts.charges import Charge
from apis.errors import InvalidRequest, StackError, SteeringRefused
from apis.events import EventBatch, ResponseStreamEvent
from apis.responses import CreateResponse, Session, SteerResponse, Successor
from apis.sink import Sink
from apis.telemetry import agent_traceparent
from apis.wire.items import Item, items_to_json
from providers.responses.context.input_items import HistorySource
from providers.responses.context.item_views import ItemView, ItemViews
from providers.responses.events.ids import ResponseIds
from providers.responses.events.response_events import assign_sequence_numbers
from providers.responses.events.steer_events import failed_event, failed_events, pending_event
from providers.responses.prepare import ResponsePreparer
from providers.responses.prompts.library import PromptLibrary
from providers.responses.run.mailbox import Mailbox, answered_calls, list_required_input
from providers.responses.run.open_mailbox import OpenMailbox, OpenMailboxes
from providers.responses.run.pending_response import PendingResponse
from providers.responses.run.response_runner import Keep, ResponseRunner
from providers.responses.store.history import (
    History,
    chain_too_long_error,
)
from providers.responses.store.history_cache import (
    CachedTurn,
    HistoryCache,
    LoadAllowance,
    LoadedHistory,
    StoredTurn,
    TurnPosition,
    extend_history,
)
from providers.responses.store.item_lookup import FoundItem, decode_item_ids, find_in_turn

_MAX_RESPONSES: Final = 64
"""Unstored responses that one session can continue; the oldest is forgotten first."""
_NO_POSITION: Final = TurnPosition("", 0)


class LoopSession(Session):
    """Caches the newest unstored response of each chain: 64 of them, and fewer where `cache`, which all sessions share,
    is full: then the tenant that uses most of it loses its oldest."""

    def __init__(
        self,
        tenant: str,
        session_history: "SessionHistory",
        preparer: ResponsePreparer,
        prompts: PromptLibrary,
        runner: ResponseRunner,
        views: ItemViews,
        mailboxes: OpenMailboxes,
    ) -> None:
        self._tenant = tenant
        self._preparer = preparer
        self._prompts = prompts
        self._runner = runner
        self._views = views
        self._session_history = session_history
        self._mailboxes = mailboxes
        self._own_mailboxes: dict[str, OpenMailbox] = {}
        self._successors: dict[str, Successor] = {}

    async def respond(
        self,
        request: CreateResponse,
        sink: Sink[ResponseStreamEvent],
        *,
        stream_id: str = "",
        generate: bool = True,
        charge: Charge | None = None,
        caller: Caller | None = None,
        successor_id: str | None = None,
    ) -> None:
        previous_id = request.previous_response_id
        if previous_id is not None and request.store is not False and self._session_history.has_response(previous_id):
            message = (
                f"'{previous_id}' is not stored, and what follows it cannot be. "
                "Send `store: false`, or all of the input."
            )
            raise InvalidRequest(message, param="store", code="invalid_value")
        is_rendered = successor_id is not None  # it has the request of the response that it follows
        with nullcontext(request) if is_rendered else self._prompts.rendering(request) as rendered:
            pending = await self._preparer.prepare(
                rendered,
                self._tenant,
                ResponseIds(successor_id),
                history_source=self._session_history,
                caller=caller,
                count_use=None if charge is None else charge.count_aside,
            )
        pending, view = pending.charged_to(charge), self._views.of_create(request)

        async def keep(response: Response) -> None:
            if request.store is False:
                await self._session_history.put(pending, response, stream_id)

        if not generate or request.is_prewarm:
            await self._runner.run_input_only(pending, sink, view, keep)
        else:
            await self._run_steered(pending, sink, view, keep, stream_id)

    async def _run_steered(
        self, pending: PendingResponse, sink: Sink[ResponseStreamEvent], view: ItemView, keep: Keep, stream_id: str
    ) -> None:
        """Run a response that takes input meanwhile, and note the one that is to follow it."""
        request, response_id, ended = pending.request, pending.ids.response_id, list[Response]()
        end_after_turn = pending.agent_loop.end_after_turn
        mailbox = OpenMailbox(self._mailboxes, request, (self._tenant, response_id), end_after_turn)

        async def keep_end(response: Response) -> None:
            ended.append(response)
            await keep(response)

        self._own_mailboxes[response_id] = mailbox
        try:
            with mailbox:
                open_pending = msgspec.structs.replace(pending, mailbox=mailbox)
                await self._runner.run(open_pending, sink, view, keep_end)
        except StackError as exc:
            if mailbox.mailbox is not None and mailbox.events is not None:
                await mailbox.drop()
                code = "response_not_active"
                await mailbox.events.put(failed_events(mailbox.mailbox.list_posted(), response_id, exc, code))
            raise
        finally:
            del self._own_mailboxes[response_id]
            if mailbox.events is not None and mailbox.events.has_begun:
                self._session_history.sent.pop(request.previous_response_id or "", None)
        if mailbox.mailbox is not None:
            await self._follow(request, ended[0], mailbox, mailbox.mailbox, stream_id)

    async def _follow(
        self, request: CreateResponse, response: Response, open_mailbox: OpenMailbox, mailbox: Mailbox, stream_id: str
    ) -> None:
        """Note the response that is to follow one, or report that its input waits for the client."""
        if not open_mailbox.is_stored:
            self._session_history.sent[response.id] = mailbox.read_items()
        assert open_mailbox.events is not None
        if required := list_required_input(response, answered_calls(mailbox.read_items())):
            events = [pending_event(posted.id, response.id, required) for posted in mailbox.posted]
            await open_mailbox.events.put(events)
            return
        request = request.model_copy(update={"previous_response_id": response.id, "input": None})
        number, posted = open_mailbox.events.next_number, mailbox.list_posted()
        self._successors[stream_id] = Successor(mailbox.successor_id, response.id, request, posted, number)

    async def steer(self, request: SteerResponse) -> bool:
        response_id = request.previous_response_id
        mailbox = self._own_mailboxes.get(response_id)
        if mailbox is None and self._session_history.has_response(response_id):
            message = f"The response '{response_id}' has ended: continue it with a request."
            raise SteeringRefused(message, param="previous_response_id", code="response_already_completed")
        if mailbox is None:
            return False
        try:
            await mailbox.post(request, is_announced=True)
        except StackError as exc:
            value = request.model_dump(mode="json", by_alias=True, exclude_none=True)["input"]
            mailbox.write_event(failed_event(exc, exc.code or exc.failure_code, value, response_id))
        return True

    def take_successor(self, *, stream_id: str = "") -> Successor | None:
        return self._successors.pop(stream_id, None)

    async def fail_successor(self, successor: Successor, error: StackError) -> EventBatch:
        response_id = successor.previous_response_id
        self._session_history.sent.pop(response_id, None)
        await self._mailboxes.delete(self._tenant, response_id)
        events = failed_events(successor.posted, response_id, error, "successor_creation_failed")
        assign_sequence_numbers(events, successor.next_number)
        return events

    def forget(self, response_id: str, *, stream_id: str = "") -> None:
        self._session_history.forget(response_id, stream_id)

    def close(self) -> None:
        self._session_history.clear()


class SessionHistory(HistorySource):
    """History of one connection: its unstored responses, then the stored ones."""

    def __init__(self, history: History, cache: HistoryCache, tenant: str) -> None:
        self._history = history
        self._cache = cache
        self._tenant = tenant
        self._key_prefix = f"{id(self)}/"
        self._stream_ids: dict[str, str] = {}
        self._item_ids: dict[str, frozenset[str]] = {}
        self.sent: dict[str, Sequence[Item]] = {}
        """Input that waits for the response that continues an unstored one, by the id of that."""
        self.max_bytes = history.max_bytes

    def has_response(self, response_id: str) -> bool:
        return response_id in self._stream_ids

    async def load_history(self, response_id: str, *, tenant: str, allowance: LoadAllowance) -> LoadedHistory:
        cached = self._cache.get(self._tenant, self._key_prefix + response_id)
        if cached is None:
            return await self._history.load_history(response_id, tenant=tenant, allowance=allowance)
        history = await extend_history(cached.previous_history, [cached.turn], _NO_POSITION)
        if history.turn_count > self._history.max_turns:
            raise chain_too_long_error(self._history.max_turns)
        allowance.take_history(history.size_bytes, "previous_response_id")
        sent = self.sent.get(response_id)
        return history if sent is None else msgspec.structs.replace(history, sent_items=sent)

    async def find_items(
        self, params_by_id: Mapping[str, str], *, tenant: str, allowance: LoadAllowance
    ) -> dict[str, FoundItem]:
        found_items: dict[str, FoundItem] = {}
        missing = {*params_by_id}
        for response_id, item_ids in self._item_ids.items():
            if not missing:
                break
            cached = self._cache.get(self._tenant, self._key_prefix + response_id)
            if cached is None:
                continue
            if not missing.isdisjoint(item_ids):
                found_items |= find_in_turn(cached.turn, missing)
            history = cached.previous_history
            for item in history.items:
                if item.id in missing:
                    item_json = item.model_dump_json(exclude_none=True, by_alias=True).encode()
                    found_items[item.id] = FoundItem(item_json, history.tool_results.get(item.id))
            missing -= found_items.keys()
        stored = {item_id: param for item_id, param in params_by_id.items() if item_id in missing}
        return found_items | await self._history.find_items(stored, tenant=tenant, allowance=allowance)

    async def put(self, pending: PendingResponse, response: Response, stream_id: str) -> None:
        """Cache a response in place of the one that it follows; that one stays where it belongs to another stream."""
        if response.previous_response_id is not None:
            self.forget(response.previous_response_id, stream_id)
        turn = StoredTurn(
            response.id,
            time.time(),
            msgspec.Raw(await pending.conversation.store_input_items(pending.ids)),
            msgspec.Raw(items_to_json(response.output)),
            pending.agent_loop.state.tool_results,
            traceparent=agent_traceparent() or msgspec.UNSET,
            root=pending.conversation.root,
        )
        self._cache.put(
            self._tenant, self._key_prefix + response.id, CachedTurn(pending.conversation.history, turn, _NO_POSITION)
        )
        self._stream_ids[response.id] = stream_id
        own_items = (*decode_item_ids(turn.input_items), *decode_item_ids(turn.output_items))
        self._item_ids[response.id] = frozenset(item.id for item in own_items if item.id)
        while len(self._stream_ids) > _MAX_RESPONSES:
            oldest = next(iter(self._stream_ids))
            self.forget(oldest, self._stream_ids[oldest])

    def forget(self, response_id: str, stream_id: str) -> None:
        if self._stream_ids.get(response_id) == stream_id:
            del self._stream_ids[response_id], self._item_ids[response_id]
            self.sent.pop(response_id, None)
            self._cache.discard(self._tenant, self._key_prefix + response_id)

    def clear(self) -> None:
        for response_id in self._stream_ids:
            self._cache.discard(self._tenant, self._key_prefix + response_id)
        self._stream_ids.clear()
        self.sent.clear()
        self._item_ids.clear()
