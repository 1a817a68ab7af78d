"""SessionActivity: the events that clients send to a session, and the listings of its turns and items."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import orjson

from apis.agents.sessions import (
    MAX_EVENTS,
    CancelEvent,
    McpApprovalEvent,
    MessageEvent,
    RequestKey,
    SendEvents,
    SessionInput,
    SessionItemListParams,
    ToolResultEvent,
    TurnListParams,
)
from apis.errors import AgentNotFound, Conflict, InvalidRequest
from apis.storage.keys import new_id_key, record_id
from apis.storage.kv_store import Entry
from apis.storage.pages import Page, first_page
from apis.storage.records import decode_record
from providers.agents.records import Action, ActionKind, Json, SessionRef, TurnRecord
from providers.agents.sessions import messages_to_json
from providers.agents.store import SessionStore
from providers.agents.transition import Transition, show_turn
from providers.common.fair_turns import current_turn
from providers.common.state.scan import find_cursor, list_from, skipping_damaged

EndResponse = Callable[[SessionRef, str], Awaitable[None]]
"""Ends the response of this id, if it runs."""
_MAX_DEFERRED: Final = 100
_INPUT_WORK: Final = 400
"""Work of a turn of the event loop on one input of a session."""
_NO_REASON: Final = "The user does not allow it."
_FAILED_CALL: Final = "The call failed."


class SessionActivity:
    """The activity of the sessions of one store."""

    def __init__(
        self, store: SessionStore, cancel_response: EndResponse, end_response: EndResponse, wake: Callable[[], None]
    ) -> None:
        """`end_response` lets a response end after its present round of tools; `wake` has a worker look for turns to
        drive."""
        self._store = store
        self._kv = store.kv
        self._cancel_response = cancel_response
        self._end_response = end_response
        self._wake = wake

    async def send(
        self, session_id: str, request: SendEvents, *, tenant: str, key_id: str, key: RequestKey | None = None
    ) -> None:
        """Take the events of a client, all of them or none; with a key, only if none was taken under it before.

        Raises AgentNotFound; InvalidRequest for an answer to a call that does not wait, and Conflict where too much
        waits already.
        """
        ref = SessionRef(tenant, record_id(session_id))

        async def edit(session: Transition) -> bool:
            for index, event in enumerate(request.events):
                await current_turn().wait(_INPUT_WORK * (len(event.input) if isinstance(event, MessageEvent) else 1))
                _apply(session, event, key_id, f"events[{index}]")
                if session.state.input_next - session.state.input_first > MAX_EVENTS:
                    raise Conflict(f"{MAX_EVENTS} inputs of this session wait already.", param="events")
            return bool(request.events)

        session = await self._store.change(ref, edit, key=key)
        if session is None:
            return
        turn = session.state.turn
        if turn is not None and turn.is_cancelling and turn.response_id:
            await self._cancel_response(ref, turn.response_id)
        elif session.has_unread_input and turn is not None and turn.response_id:
            await self._end_response(ref, turn.response_id)
        self._wake()

    async def get_turn(self, session_id: str, turn_id: str, *, tenant: str) -> Json:
        """Return a turn. Raises AgentNotFound."""
        session = await self._store.load(SessionRef(tenant, record_id(session_id)))
        record = await self._load_turn(session.ref, turn_id)
        return show_turn(session.ref, session.record.agent_id, turn_id, record)

    async def list_turns(self, session_id: str, params: TurnListParams, *, tenant: str) -> Page[Json]:
        """Return a page of turns. Raises AgentNotFound, also for an unknown cursor."""
        session = await self._store.load(SessionRef(tenant, record_id(session_id)))
        prefix = session.ref.prefix("turn")
        cursor = await find_cursor(self._kv, prefix, params.after, _turn_not_found("after"))
        rows = await list_from(self._kv, prefix, TurnRecord, cursor, order=params.order, limit=params.limit + 1)
        agent_id = session.record.agent_id
        turns = [show_turn(session.ref, agent_id, row.key.removeprefix(prefix), row.record) for row in rows]
        return first_page(turns, params.limit)

    async def list_items(
        self, session_id: str, params: SessionItemListParams, *, tenant: str, turn_id: str | None = None
    ) -> Page[Json]:
        """Return a page of the items of a session, or of one of its turns. Raises AgentNotFound, and InvalidRequest for
        an unknown cursor."""
        session = await self._store.load(SessionRef(tenant, record_id(session_id)))
        first, end = 0, session.state.items
        if turn_id is not None:
            record = await self._load_turn(session.ref, turn_id)
            first, end = record.first_item, session.state.items if record.end_item is None else record.end_item
        is_reversed = params.order == "desc"
        if params.after is not None:
            number = await self._find_number(session.ref, params.after)
            if not first <= number < end:
                raise _unknown_cursor()
            first, end = (first, number) if is_reversed else (number + 1, end)
        # one key of a scan is exclusive at each end, and numbers have no gaps
        bounds = session.ref.prefix("item") if not first else session.ref.item_key(first - 1), session.ref.item_key(end)
        items: list[Json] = []
        while len(items) <= params.limit:
            rows = await self._kv.scan(
                session.ref.prefix("item"),
                after=bounds[0],
                before=bounds[1],
                limit=params.limit + 1,
                reverse=is_reversed,
            )
            items += self._decode_items(rows)
            if len(rows) <= params.limit:
                break
            bounds = (bounds[0], rows[-1][0]) if is_reversed else (rows[-1][0], bounds[1])
        return first_page(items, params.limit)

    def _decode_items(self, rows: Sequence[tuple[str, Entry]]) -> list[Json]:
        """Return the items of the rows that can be read."""
        items: list[Json] = []
        for key, entry in rows:
            with skipping_damaged(self._kv, key, "item of a session"):
                item: Any = orjson.loads(entry.value)
                item["id"]
                items.append(item)
        return items

    async def _load_turn(self, ref: SessionRef, turn_id: str) -> TurnRecord:
        entry = await self._kv.get(ref.turn_key(turn_id))
        if entry is None:
            raise _turn_not_found()
        return decode_record(entry, TurnRecord)

    async def _find_number(self, ref: SessionRef, item_id: str) -> int:
        entry = await self._kv.get(ref.item_number_key(item_id))
        if entry is None or not entry.value.isdigit():
            raise _unknown_cursor()
        return int(entry.value)


def _apply(session: Transition, event: SessionInput, key_id: str, param: str) -> None:
    match event:
        case MessageEvent():
            _add_messages(session, messages_to_json(event.input), key_id)
        case CancelEvent():
            _cancel(session)
        case ToolResultEvent():
            _answer_call(session, event, param)
        case McpApprovalEvent():
            action = _require_action(session, "mcp_approval_request", event.request_id, f"{param}.request_id")
            is_approved = event.response.decision == "approve"
            answer = {"type": "mcp_approval_response", "approval_request_id": action.id, "approve": is_approved}
            session.answer_action(action, answer if is_approved else {**answer, "reason": _NO_REASON})


def _add_messages(session: Transition, messages: Sequence[Json], key_id: str) -> None:
    state = session.state
    if state.turn is None:
        session.begin_turn(messages, key_id)
    elif not state.turn.is_cancelling:
        session.add_messages(messages)
    elif len(state.deferred) + len(messages) > _MAX_DEFERRED:
        raise Conflict("Too many messages wait for the end of the turn that is cancelled.", param="events")
    else:
        state.deferred += messages


def _cancel(session: Transition) -> None:
    turn = session.state.turn
    if turn is not None and turn.status == "waiting":
        session.end_turn("cancelled")
    elif turn is not None:
        turn.is_cancelling = True


def _answer_call(session: Transition, event: ToolResultEvent, param: str) -> None:
    action = _require_action(session, "function_call", event.call_id, f"{param}.call_id")
    if session.turn.id != event.turn_id:
        raise _unknown_call(event.call_id, f"{param}.turn_id")
    output: Any = event.output
    if isinstance(output, list):
        output = [part.model_dump() for part in event.output or () if not isinstance(part, str)]
    status = "completed" if event.success else "failed"
    item = {"type": "function_call_output", "call_id": event.call_id, "output": output, "error": event.error}
    session.add_item({"id": f"fco_{new_id_key()}", **item, "status": status})
    text = (output or "") if event.success else (event.error or output or _FAILED_CALL)
    session.answer_action(action, {"type": "function_call_output", "call_id": event.call_id, "output": text})


def _require_action(session: Transition, kind: ActionKind, action_id: str, param: str) -> Action:
    action = session.find_action(kind, action_id)
    if action is not None:
        return action
    if kind == "function_call":
        raise _unknown_call(action_id, param)
    raise InvalidRequest(f"Unknown pending approval request: {action_id}", param=param, code="invalid_request_error")


def _unknown_call(call_id: str, param: str) -> InvalidRequest:
    """Return the error after which the SDK sends a result again: a call may be shown before it waits."""
    return InvalidRequest(f"Unknown pending tool call: {call_id}", param=param, code="invalid_request_error")


def _turn_not_found(param: str = "turn_id") -> AgentNotFound:
    return AgentNotFound("No turn of this session has this id.", param=param)


def _unknown_cursor() -> InvalidRequest:
    return InvalidRequest("No item of this listing has this id.", param="after", code="invalid_value")
