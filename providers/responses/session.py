"""LoopSession: the responses of one WebSocket connection, with a cache of those that are not stored."""

import time
from collections.abc import Mapping
from typing import Final

import msgspec
from openai.types.responses import Response, ResponseStreamEvent

from apis.accounts.accounts import Caller
from apis.accounts.charges import Charge
from apis.errors import InvalidRequest
from apis.responses import CreateResponse, Session
from apis.sink import Sink
from apis.telemetry import agent_traceparent
from apis.wire.items import items_to_json
from providers.responses.context.input_items import HistorySource
from providers.responses.context.item_views import ItemViews
from providers.responses.events.ids import ResponseIds
from providers.responses.prepare import ResponsePreparer
from providers.responses.run.pending_response import PendingResponse
from providers.responses.run.response_runner import ResponseRunner
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
        history: History,
        cache: HistoryCache,
        preparer: ResponsePreparer,
        runner: ResponseRunner,
        views: ItemViews,
    ) -> None:
        self._tenant = tenant
        self._preparer = preparer
        self._runner = runner
        self._views = views
        self._session_history = _SessionHistory(history, cache, tenant, f"{id(self)}/")

    async def respond(
        self,
        request: CreateResponse,
        sink: Sink[ResponseStreamEvent],
        *,
        stream_id: str = "",
        generate: bool = True,
        charge: Charge | None = None,
        caller: Caller | None = None,
    ) -> None:
        previous_id = request.previous_response_id
        if previous_id is not None and request.store is not False and self._session_history.has_response(previous_id):
            message = (
                f"'{previous_id}' is not stored, and what follows it cannot be. "
                "Send `store: false`, or all of the input."
            )
            raise InvalidRequest(message, param="store", code="invalid_value")
        pending = await self._preparer.prepare(
            request, self._tenant, ResponseIds(), history_source=self._session_history, caller=caller
        )
        pending = pending.charged_to(charge)
        is_input_only = not generate or request.is_prewarm
        run = self._runner.run_input_only if is_input_only else self._runner.run

        def keep(response: Response) -> None:
            if request.store is False:
                self._session_history.put(pending, response, stream_id)

        await run(pending, sink, self._views.of_create(request), keep)

    def forget(self, response_id: str, *, stream_id: str = "") -> None:
        self._session_history.forget(response_id, stream_id)

    def close(self) -> None:
        self._session_history.clear()


class _SessionHistory(HistorySource):
    """History of one connection: its unstored responses, then the stored ones."""

    def __init__(self, history: History, cache: HistoryCache, tenant: str, key_prefix: str) -> None:
        self._history = history
        self._cache = cache
        self._tenant = tenant
        self._key_prefix = key_prefix
        self._stream_ids: dict[str, str] = {}
        self._item_ids: dict[str, frozenset[str]] = {}
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
        return history

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

    def put(self, pending: PendingResponse, response: Response, stream_id: str) -> None:
        """Cache a response in place of the one that it follows; that one stays where it belongs to another stream."""
        if response.previous_response_id is not None:
            self.forget(response.previous_response_id, stream_id)
        turn = StoredTurn(
            response.id,
            time.time(),
            msgspec.Raw(pending.conversation.input_items_to_json(pending.ids)),
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
            self._cache.discard(self._tenant, self._key_prefix + response_id)

    def clear(self) -> None:
        for response_id in self._stream_ids:
            self._cache.discard(self._tenant, self._key_prefix + response_id)
        self._stream_ids.clear()
        self._item_ids.clear()
