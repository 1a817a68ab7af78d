"""LoopSession: the responses of one connection, which remembers those that are not stored."""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, nullcontext
from typing import Final

import msgspec
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseCreatedEvent,
    ResponseIncompleteEvent,
    ResponseStreamEvent,
)

from apis.errors import InvalidRequest
from apis.responses import CreateResponse, Session
from providers.responses.context.conversation import Known
from providers.responses.events.ids import Ids
from providers.responses.run.pending_response import Making, in_progress, number_on, terminal
from providers.responses.store.history import FoundItem, History, followed, items_to_json, too_many
from providers.responses.store.history_cache import Past, Place, Recent, Recents, Turn

_MAX_RESPONSES: Final = 64
_NOWHERE: Final = Place("", 0)

Events = Sequence[ResponseStreamEvent]
Prepare = Callable[[CreateResponse, str, Ids, Known], Awaitable[Making]]
Live = Callable[[Making], AsyncGenerator[Events]]


class LoopSession(Session):
    """Remembers the newest unstored response of each chain, 64 of them at most, and fewer where all sessions together
    hold more than `recents` may."""

    def __init__(self, tenant: str, history: History, recents: Recents, prepare: Prepare, live: Live) -> None:
        self._tenant = tenant
        self._history = history
        self._memory = _Memory(history, recents, f"session-{id(self)}")
        self._prepare = prepare
        self._live = live

    async def create(self, request: CreateResponse, *, lane: str = "", generate: bool = True) -> AsyncGenerator[Events]:
        before = request.previous_response_id
        if before is not None and request.store is not False and self._memory.holds(before):
            message = (
                f"'{before}' is not stored, and what follows it cannot be. Send `store: false`, or all of the input."
            )
            raise InvalidRequest(message, param="store", code="invalid_value")
        making = await self._prepare(request, self._tenant, Ids(), self._memory)
        number = 0
        async with aclosing(self._live(making) if generate else self._prepared(making)) as batches:
            async for events in batches:
                number = number_on(events, number)
                final = events[-1]
                if request.store is False and isinstance(final, ResponseCompletedEvent | ResponseIncompleteEvent):
                    self._memory.put(making, final.response, lane)
                yield events

    def forget(self, response_id: str, *, lane: str = "") -> None:
        self._memory.forget(response_id, lane)

    def close(self) -> None:
        self._memory.clear()

    async def _prepared(self, making: Making) -> AsyncGenerator[Events]:
        """A response that only holds its input."""
        beginning, final = making.begin(), making.ended()
        async with making.floor or nullcontext():
            await making.keep(final, self._history)
        created = ResponseCreatedEvent(type="response.created", response=beginning, sequence_number=0)
        yield [created, in_progress(beginning), terminal(final)]


class _Memory(Known):
    """What the connection made and did not store, before what the store knows."""

    def __init__(self, history: History, recents: Recents, key: str) -> None:
        self._history = history
        self._recents = recents
        self._key = key
        self._lanes: dict[str, str] = {}

    def holds(self, response_id: str) -> bool:
        return response_id in self._lanes

    async def past(self, response_id: str, *, tenant: str) -> Past:
        recent = self._recents.get(self._key, response_id)
        if recent is None:
            return await self._history.past(response_id, tenant=tenant)
        past = followed(recent.before, [recent.turn], _NOWHERE)
        if past.turns > self._history.max_turns:
            raise too_many(self._history.max_turns)
        return past

    async def item(self, item_id: str, *, tenant: str) -> FoundItem | None:
        for response_id in self._lanes:
            recent = self._recents.get(self._key, response_id)
            past = followed(recent.before, [recent.turn], _NOWHERE) if recent is not None else Past()
            for item in past.items:
                if item.id == item_id:
                    return item, past.told.get(item_id)
        return await self._history.item(item_id, tenant=tenant)

    def put(self, making: Making, final: Response, lane: str) -> None:
        """Remember it in place of the one that it follows, unless it forks off from another lane's chain."""
        if final.previous_response_id is not None:
            self.forget(final.previous_response_id, lane)
        given, made = making.conversation.given_json(making.ids), items_to_json(final.output)
        turn = Turn(final.id, time.time(), msgspec.Raw(given), msgspec.Raw(made), making.turns.told)
        self._recents.put(self._key, Recent(making.conversation.past, turn, _NOWHERE))
        self._lanes[final.id] = lane
        while len(self._lanes) > _MAX_RESPONSES:
            oldest = next(iter(self._lanes))
            self.forget(oldest, self._lanes[oldest])

    def forget(self, response_id: str, lane: str) -> None:
        if self._lanes.get(response_id) == lane:
            del self._lanes[response_id]
            self._recents.discard(self._key, response_id)

    def clear(self) -> None:
        for response_id in self._lanes:
            self._recents.discard(self._key, response_id)
        self._lanes.clear()
