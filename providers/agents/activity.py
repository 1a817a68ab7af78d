"""SessionActivity: the events that clients send to a session, and the listings of its turns, items and subagents."""

from functools import partial
from typing import Any, Final

from apis.agents.agents import AgentListParams
from apis.agents.sessions import (
    MAX_EVENTS,
    MAX_WAITING_BYTES,
    CancelEvent,
    McpApprovalEvent,
    MessageEvent,
    RequestKey,
    SendEvents,
    ToolResultEvent,
)
from apis.errors import AgentNotFound, Conflict, InvalidRequest, StorageCorrupt
from apis.responses import Responses
from apis.storage.keys import new_id_key, record_id
from apis.storage.pages import Page
from apis.storage.records import decode_record
from apis.wire.base import ListParams
from providers.agents.records import Json, SessionRef, SessionState, StoredSession, TurnRecord
from providers.agents.response_ends import end_responses
from providers.agents.sessions import messages_to_json
from providers.agents.store import SessionStore
from providers.agents.subagents.records import show_subagent
from providers.agents.transition import Transition
from providers.agents.views import show_turn
from providers.common.fair_turns import current_turn
from providers.common.state.scan import list_page, read_page, report_damaged

_INPUT_WORK: Final = 400
"""Work of a turn of the event loop on one input of a session."""
_NO_REASON: Final = "The user does not allow it."
_FAILED_CALL: Final = "The call failed."


class SessionActivity:
    """The activity of the sessions of one store."""

    def __init__(self, store: SessionStore, responses: Responses) -> None:
        self._store = store
        self._responses = responses
        self._kv = store.kv

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
                if isinstance(event, CancelEvent):
                    await self._cancel(session)
                    continue
                _apply(session, event, key_id, f"events[{index}]")
                if session.state.input_next - session.state.input_first > MAX_EVENTS:
                    raise Conflict(f"{MAX_EVENTS} inputs of this session wait already.", param="events")
                waiting = (each.state.input_bytes + each.state.deferred_bytes for each in session.list_written())
                if max(waiting) > MAX_WAITING_BYTES:
                    message = f"At most {MAX_WAITING_BYTES} bytes of input may wait for the model of a session."
                    raise Conflict(message, param=f"events[{index}]")
            return bool(request.events)

        session = await self._store.change(ref, edit, key=key)
        if session is not None:
            await end_responses(self._responses, session)

    async def _cancel(self, session: Transition) -> None:
        """Cancel the turn of the session, and those of its subagents."""
        session.cancel()
        for subagent_id, summary in session.state.subagents.items():
            if not summary.turn_id:
                continue
            try:
                subagent = await self._store.load_subagent(session, subagent_id)
            except (AgentNotFound, StorageCorrupt) as exc:
                report_damaged(self._kv, session.ref.subagent(subagent_id).state_key, SessionState.__name__, exc)
                session.give_up(subagent_id)
            else:
                subagent.touch()
                subagent.cancel()

    async def get_turn(self, session_id: str, turn_id: str, *, tenant: str, subagent_id: str | None = None) -> Json:
        """Return a turn of a session, or of a subagent of it. Raises AgentNotFound."""
        session = await self._store.load(_build_ref(tenant, session_id, subagent_id))
        record = await self._load_turn(session.ref, turn_id)
        return show_turn(session.ref, session.record.agent_id, turn_id, record)

    async def list_turns(
        self, session_id: str, params: ListParams, *, tenant: str, subagent_id: str | None = None
    ) -> Page[Json]:
        """Return a page of turns of a session, or of a subagent of it. Raises AgentNotFound, also for an unknown
        cursor."""
        session = await self._store.load(_build_ref(tenant, session_id, subagent_id))
        prefix = session.ref.prefix("turn")
        show = partial(show_turn, session.ref, session.record.agent_id)
        return await read_page(self._kv, prefix, TurnRecord, params, _turn_not_found("after"), show)

    async def list_items(
        self,
        session_id: str,
        params: AgentListParams,
        *,
        tenant: str,
        turn_id: str | None = None,
        subagent_id: str | None = None,
    ) -> Page[Json]:
        """Return a page of the items of a session, or of a subagent of it, or of one turn. Raises AgentNotFound, and
        InvalidRequest for an unknown cursor."""
        session = await self._store.load(_build_ref(tenant, session_id, subagent_id))
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
        bounds = session.ref.item_key(first - 1) if first else "", session.ref.item_key(end)
        cursor, until = reversed(bounds) if is_reversed else bounds
        prefix = session.ref.prefix("item")
        page = await list_page(self._kv, prefix, Json, cursor, order=params.order, limit=params.limit, until=until)
        return Page([row.record for row in page.data if "id" in row.record], page.has_more)

    async def _load_turn(self, ref: SessionRef, turn_id: str) -> TurnRecord:
        entry = await self._kv.get(ref.turn_key(turn_id))
        if entry is None:
            raise _turn_not_found()
        return decode_record(entry, TurnRecord)

    async def get_subagent(self, session_id: str, subagent_id: str, *, tenant: str) -> Json:
        """Return a subagent. Raises AgentNotFound."""
        subagent = await self._store.load(_build_ref(tenant, session_id, subagent_id))
        return show_subagent(subagent.ref, subagent.record)

    async def list_subagents(self, session_id: str, params: ListParams, *, tenant: str) -> Page[Json]:
        """Return a page of the subagents of a session. Raises AgentNotFound, and InvalidRequest for an unknown
        cursor."""
        session = (await self._store.load(_build_ref(tenant, session_id, None))).ref

        def show(subagent_id: str, record: StoredSession) -> Json:
            return show_subagent(session.subagent(subagent_id), record)

        return await read_page(self._kv, session.subagent_prefix, StoredSession, params, _unknown_cursor(), show)

    async def _find_number(self, ref: SessionRef, item_id: str) -> int:
        entry = await self._kv.get(ref.item_number_key(item_id))
        if entry is None or not entry.value.isdigit():
            raise _unknown_cursor()
        return int(entry.value)


def _build_ref(tenant: str, session_id: str, subagent_id: str | None) -> SessionRef:
    return SessionRef(tenant, record_id(session_id), "" if subagent_id is None else record_id(subagent_id))


def _apply(
    session: Transition, event: MessageEvent | ToolResultEvent | McpApprovalEvent, key_id: str, param: str
) -> None:
    match event:
        case MessageEvent():
            session.receive(messages_to_json(event.input), key_id)
        case ToolResultEvent():
            _answer_call(session, event, param)
        case McpApprovalEvent():
            pending = session.find_action("mcp_approval_request", event.request_id)
            if pending is None:
                message = f"Unknown pending approval request: {event.request_id}"
                raise InvalidRequest(message, param=f"{param}.request_id", code="invalid_request_error")
            owner, action = pending
            is_approved = event.response.decision == "approve"
            answer = {"type": "mcp_approval_response", "approval_request_id": action.id, "approve": is_approved}
            owner.touch()
            owner.answer_action(action, answer if is_approved else {**answer, "reason": _NO_REASON})


def _answer_call(session: Transition, event: ToolResultEvent, param: str) -> None:
    pending = session.find_action("function_call", event.call_id, event.turn_id)
    if pending is None:
        is_known = session.find_action("function_call", event.call_id) is not None
        raise _unknown_call(event.call_id, f"{param}.turn_id" if is_known else f"{param}.call_id")
    owner, action = pending
    output: Any = event.output
    if isinstance(output, list):
        output = [part.model_dump() for part in event.output or () if not isinstance(part, str)]
    status = "completed" if event.success else "failed"
    item = {"type": "function_call_output", "call_id": event.call_id, "output": output, "error": event.error}
    owner.touch()
    owner.add_item({"id": f"fco_{new_id_key()}", **item, "status": status})
    text = (output or "") if event.success else (event.error or output or _FAILED_CALL)
    owner.answer_action(action, {"type": "function_call_output", "call_id": event.call_id, "output": text})


def _unknown_call(call_id: str, param: str) -> InvalidRequest:
    """Return the error after which the SDK sends a result again: a call may be shown before it waits."""
    return InvalidRequest(f"Unknown pending tool call: {call_id}", param=param, code="invalid_request_error")


def _turn_not_found(param: str = "turn_id") -> AgentNotFound:
    return AgentNotFound("No turn of this session has this id.", param=param)


def _unknown_cursor() -> InvalidRequest:
    return InvalidRequest("Nothing in this listing has this id.", param="after", code="invalid_value")
