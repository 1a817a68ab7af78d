"""LoopSession: the responses of one connection, which remembers those that are not stored."""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, nullcontext
from typing import Final

import msgspec
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseCreatedEvent,
    ResponseIncompleteEvent,
)

from apis.errors import InvalidRequest
from apis.events import EventBatch
from apis.responses import CreateResponse, Session
from apis.wire.items import items_to_json
from providers.responses.context.conversation import HistorySource
from providers.responses.events.ids import ResponseIds
from providers.responses.run.pending_response import (
    PendingResponse,
    assign_sequence_numbers,
    in_progress_event,
    terminal_event,
)
from providers.responses.store.history import (
    History,
    ItemWithToolResult,
    chain_too_long_error,
    extend_history,
)
from providers.responses.store.history_cache import CachedTurn, HistoryCache, LoadedHistory, StoredTurn, TurnPosition

_MAX_RESPONSES: Final = 64
_NO_POSITION: Final = TurnPosition("", 0)

_PrepareResponse = Callable[[CreateResponse, str, ResponseIds, HistorySource], Awaitable[PendingResponse]]
_StreamResponse = Callable[[PendingResponse], AsyncGenerator[EventBatch]]


class LoopSession(Session):
    """Remembers the newest unstored response of each chain, 64 of them at most, and fewer where all sessions together
    hold more than `recents` may."""

    def __init__(
        self,
        tenant: str,
        history: History,
        cache: HistoryCache,
        prepare: _PrepareResponse,
        stream_response: _StreamResponse,
    ) -> None:
        self._tenant = tenant
        self._history = history
        self._session_history = _SessionHistory(history, cache, f"session-{id(self)}")
        self._prepare = prepare
        self._stream_response = stream_response

    async def create(
        self, request: CreateResponse, *, stream_id: str = "", generate: bool = True
    ) -> AsyncGenerator[EventBatch]:
        before = request.previous_response_id
        if before is not None and request.store is not False and self._session_history.has_response(before):
            message = (
                f"'{before}' is not stored, and what follows it cannot be. Send `store: false`, or all of the input."
            )
            raise InvalidRequest(message, param="store", code="invalid_value")
        making = await self._prepare(request, self._tenant, ResponseIds(), self._session_history)
        number = 0
        async with aclosing(self._stream_response(making) if generate else self._stream_input_only(making)) as batches:
            async for events in batches:
                number = assign_sequence_numbers(events, number)
                final = events[-1]
                if request.store is False and isinstance(final, ResponseCompletedEvent | ResponseIncompleteEvent):
                    self._session_history.put(making, final.response, stream_id)
                yield events

    def forget(self, response_id: str, *, stream_id: str = "") -> None:
        self._session_history.forget(response_id, stream_id)

    def close(self) -> None:
        self._session_history.clear()

    async def _stream_input_only(self, pending: PendingResponse) -> AsyncGenerator[EventBatch]:
        """A response that only holds its input."""
        beginning, final = pending.build_initial_response(), pending.build_final_response()
        async with pending.lock or nullcontext():
            await pending.store(final, self._history)
        created = ResponseCreatedEvent(type="response.created", response=beginning, sequence_number=0)
        yield [created, in_progress_event(beginning), terminal_event(final)]


class _SessionHistory(HistorySource):
    """What the connection made and did not store, before what the store knows."""

    def __init__(self, history: History, cache: HistoryCache, cache_key: str) -> None:
        self._history = history
        self._cache = cache
        self._cache_key = cache_key
        self._stream_ids: dict[str, str] = {}

    def has_response(self, response_id: str) -> bool:
        return response_id in self._stream_ids

    async def load_history(self, response_id: str, *, tenant: str) -> LoadedHistory:
        recent = self._cache.get(self._cache_key, response_id)
        if recent is None:
            return await self._history.load_history(response_id, tenant=tenant)
        past = extend_history(recent.previous_history, [recent.turn], _NO_POSITION)
        if past.turn_count > self._history.max_turns:
            raise chain_too_long_error(self._history.max_turns)
        return past

    async def find_item(self, item_id: str, *, tenant: str) -> ItemWithToolResult | None:
        for response_id in self._stream_ids:
            recent = self._cache.get(self._cache_key, response_id)
            past = (
                extend_history(recent.previous_history, [recent.turn], _NO_POSITION)
                if recent is not None
                else LoadedHistory()
            )
            for item in past.items:
                if item.id == item_id:
                    return item, past.tool_results.get(item_id)
        return await self._history.find_item(item_id, tenant=tenant)

    def put(self, pending: PendingResponse, response: Response, stream_id: str) -> None:
        """Remember it in place of the one that it follows, unless it forks off from another lane's chain."""
        if response.previous_response_id is not None:
            self.forget(response.previous_response_id, stream_id)
        given, made = pending.conversation.input_items_to_json(pending.ids), items_to_json(response.output)
        turn = StoredTurn(
            response.id, time.time(), msgspec.Raw(given), msgspec.Raw(made), pending.agent_loop.tool_results
        )
        self._cache.put(self._cache_key, CachedTurn(pending.conversation.history, turn, _NO_POSITION))
        self._stream_ids[response.id] = stream_id
        while len(self._stream_ids) > _MAX_RESPONSES:
            oldest = next(iter(self._stream_ids))
            self.forget(oldest, self._stream_ids[oldest])

    def forget(self, response_id: str, stream_id: str) -> None:
        if self._stream_ids.get(response_id) == stream_id:
            del self._stream_ids[response_id]
            self._cache.discard(self._cache_key, response_id)

    def clear(self) -> None:
        for response_id in self._stream_ids:
            self._cache.discard(self._cache_key, response_id)
        self._stream_ids.clear()
