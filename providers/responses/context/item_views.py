"""ItemViews: the part of stored items that one request sees. All is stored; the `include` of each request decides."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, Literal, cast

import orjson
from openai.types.responses import Response, ResponseOutputItem

from apis.events import (
    ITEM_EVENTS,
    RESPONSE_EVENTS,
    TERMINAL_EVENTS,
    EventBatch,
    LoggedEvent,
    ResponseEventBatch,
    ResponseItemEvent,
    ResponseStreamEvent,
)
from apis.responses import CreateResponse
from apis.wire.base import sdk_model_to_json
from apis.wire.item_types import ITEM_TYPES
from providers.responses.context.sealed_content import ENCRYPTED_CONTENT_INCLUDE, SealedContent
from providers.responses.events.ids import response_id_of
from providers.responses.store.history import History
from providers.responses.store.url_files import public_item

Seal = Callable[[str, str], str | None]
"""Returns the token of a reasoning item by its id and text; None where its model is not known any more."""
LOGPROBS_INCLUDE: Final = "message.output_text.logprobs"
_LOGPROBS_MARK: Final = b'"logprobs":[{'
"""Bytes of every JSON that has logprobs; the stack writes all of its JSON without blanks."""
_SHOWN_EVENTS: Final = ITEM_EVENTS | RESPONSE_EVENTS
_LIVE_SHOWN_EVENTS: Final = ITEM_EVENTS | TERMINAL_EVENTS
"""The events of a live stream that have items to show: its first events hold a response without items."""
_CHANGEABLE: Final = {row.name: row for row in ITEM_TYPES.values() if row.included_fields or row.internal_field}
"""Types of items, besides messages and reasoning, that `show_item` may change."""
_NO_VALUES: Final = frozenset[str]()


class ItemView:
    """The view of items that one request gets: all that `include` names, and all that needs no naming; the text of
    reasoning unless `hides_reasoning`."""

    __slots__ = ("_hides_reasoning", "_include", "_seal")

    def __init__(
        self, include: Collection[str] = _NO_VALUES, seal: Seal | None = None, *, hides_reasoning: bool = False
    ) -> None:
        self._include = include
        self._seal = seal
        self._hides_reasoning = hides_reasoning

    def show_item(self, item: dict[str, Any]) -> dict[str, Any]:
        """Change a stored item into what the request sees of it, and return it."""
        kind = item.get("type")
        if kind == "message":
            self._show_parts(item.get("content"))
        elif kind == "reasoning":
            self._show_token(item)
            if self._hides_reasoning and item.get("content"):
                item["content"] = []
        elif (row := _CHANGEABLE.get(kind or "")) is not None:
            item.pop(row.internal_field or "", None)
            for path, hidden_as in row.included_fields.items():
                if f"{kind}.{path}" not in self._include:
                    _hide_field(item, path, hidden_as)
        return item

    def _show_parts(self, content: Any) -> None:
        if LOGPROBS_INCLUDE not in self._include and isinstance(content, list):
            for part in cast(list[Any], content):
                if isinstance(part, dict) and cast(dict[str, Any], part).get("logprobs"):
                    part["logprobs"] = []

    def _show_token(self, item: dict[str, Any]) -> None:
        text = "".join(part.get("text", "") for part in item.get("content") or ())
        if not text:  # a token of the client's is all that there is of the item: without it the item would be lost
            return
        if ENCRYPTED_CONTENT_INCLUDE not in self._include:
            item.pop("encrypted_content", None)
        elif self._seal is not None and not item.get("encrypted_content"):
            token = self._seal(item.get("id", ""), text)
            if token is not None:
                item["encrypted_content"] = token

    def show_response(self, response: Response) -> Response:
        """Return the response as the request sees it."""
        if all(map(self._is_shown_whole, response.output)):
            return response
        return response.model_copy(update={"output": [self._show_model(item) for item in response.output]})

    def _show_model(self, item: ResponseOutputItem) -> ResponseOutputItem:
        if self._is_shown_whole(item):
            return item
        return type(item).model_validate(self.show_item(orjson.loads(sdk_model_to_json(item))))

    def _is_shown_whole(self, item: ResponseOutputItem) -> bool:
        """Return True for an item that `show_item` would not change; most of them are found without their JSON."""
        if item.type == "message":
            return LOGPROBS_INCLUDE in self._include or not any(
                getattr(part, "logprobs", None) for part in item.content
            )
        if item.type == "reasoning":
            is_text_shown = not (self._hides_reasoning and item.content)
            return is_text_shown and self._seal is None and ENCRYPTED_CONTENT_INCLUDE in self._include
        return item.type not in _CHANGEABLE

    def show_events(self, events: ResponseEventBatch) -> ResponseEventBatch:
        """Return live or logged events as the request sees them."""
        return [
            self._show_logged(event) if isinstance(event, LoggedEvent) else self._show_event(event) for event in events
        ]

    def show_live_events(self, events: EventBatch) -> EventBatch:
        """Return live events as the request sees them. Those without items stay the same objects, for one look-up of
        their type each."""
        return [self._show_event(event) if event.type in _LIVE_SHOWN_EVENTS else event for event in events]

    def _show_event(self, event: ResponseStreamEvent) -> ResponseStreamEvent:
        if event.type in ITEM_EVENTS:
            item_event: ResponseItemEvent = event  # pyright: ignore[reportAssignmentType] - the types of events say so
            item = self._show_model(item_event.item)
            return event if item is item_event.item else event.model_copy(update={"item": item})
        response: Response | None = getattr(event, "response", None)
        shown = None if response is None else self.show_response(response)
        return event if shown is response else event.model_copy(update={"response": shown})

    def _show_logged(self, event: LoggedEvent) -> LoggedEvent:
        has_logprobs = _LOGPROBS_MARK in event.data and LOGPROBS_INCLUDE not in self._include
        if not has_logprobs and event.type not in _SHOWN_EVENTS:
            return event
        fields: dict[str, Any] = orjson.loads(event.data)
        for item in (*fields.get("response", {}).get("output", ()), *([fields["item"]] if "item" in fields else ())):
            self.show_item(item)
        if has_logprobs and event.type not in _SHOWN_EVENTS:
            self._show_parts([fields, fields.get("part")])
        return LoggedEvent(event.type, orjson.dumps(fields))


def _hide_field(item: dict[str, Any], path: str, hidden_as: Literal["null", "absent"]) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        if not isinstance(item := item.get(parent) or {}, dict):
            return
    if hidden_as == "absent":
        item.pop(name, None)
    elif item.get(name) is not None:
        item[name] = None


class ItemViews:
    """Makes the views of requests that create items or read stored ones. With `hides_reasoning` none shows the text of
    reasoning."""

    def __init__(self, sealed_content: SealedContent, history: History, *, hides_reasoning: bool = False) -> None:
        self.sealed_content = sealed_content
        self.hides_reasoning = hides_reasoning
        self._history = history
        self._plain_view = self._build_view({ENCRYPTED_CONTENT_INCLUDE})  # of every create that includes nothing

    def _build_view(self, include: Collection[str], seal: Seal | None = None) -> ItemView:
        return ItemView(include, seal, hides_reasoning=self.hides_reasoning)

    def of_create(self, request: CreateResponse) -> ItemView:
        """Return the view of the request that creates a response: also of what it asks for by other fields."""
        if not request.include and not request.top_logprobs:
            return self._plain_view
        include: set[str] = {ENCRYPTED_CONTENT_INCLUDE, *(request.include or ())}  # sealed only where it is to be seen
        return self._build_view(include | {LOGPROBS_INCLUDE} if request.top_logprobs else include)

    async def of_response(self, include: Sequence[str], response: Response, tenant: str) -> ItemView:
        """Return the view of a request for a response, which shows what the end of the response has shown by
        `top_logprobs`. Reasoning that the request includes is sealed for it now."""
        names = [*include, LOGPROBS_INCLUDE] if response.top_logprobs else include
        if ENCRYPTED_CONTENT_INCLUDE not in include:
            return self._build_view(names)
        return self._build_view(names, await self._build_seal(lambda _: response.model, tenant))

    async def show_items(
        self, items: Sequence[dict[str, Any]], include: Sequence[str], tenant: str
    ) -> list[dict[str, Any]]:
        """Return stored items as a request for them sees them. Reasoning is sealed for the model that wrote it, as long
        as its response is stored."""
        seal: Seal | None = None
        if ENCRYPTED_CONTENT_INCLUDE in include:
            owners = {response_id_of(item["id"]) for item in items if item.get("type") == "reasoning"} - {None}
            models = {owner: await self._history.find_model(owner, tenant=tenant) for owner in owners if owner}
            seal = await self._build_seal(lambda item_id: models.get(response_id_of(item_id) or ""), tenant)
        view = self._build_view(include, seal)
        return [view.show_item(public_item(item)) for item in items]

    async def _build_seal(self, find_model: Callable[[str], str | None], tenant: str) -> Seal:
        sealer = await self.sealed_content.load_sealer()
        tokens: dict[str, str] = {}

        def seal(item_id: str, text: str) -> str | None:
            model = find_model(item_id)
            if model is not None and item_id not in tokens:  # one token for all events of a stream
                tokens[item_id] = sealer.seal(text, tenant=tenant, model=model, purpose="reasoning")
            return tokens.get(item_id)

        return seal
