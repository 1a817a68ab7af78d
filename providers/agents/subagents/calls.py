"""SubagentCalls: answers the calls by which an agent directs its subagents."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import orjson
from pydantic import ValidationError

from apis.errors import AgentNotFound, Conflict, InvalidRequest, StorageCorrupt
from apis.responses import Responses
from apis.storage.kv_store import ABSENT
from apis.storage.records import encode_record
from providers.agents.records import Action, Json, SessionState, StoredSession, Subagent, SubagentDetails
from providers.agents.response_ends import end_responses
from providers.agents.store import HeldSession, SessionStore, subagent_not_found
from providers.agents.subagents.records import (
    MAX_PREVIEW_CHARS,
    MAX_REPORT_CHARS,
    MAX_SUBAGENTS,
    MAX_WAITING,
    build_conversation_id,
    new_subagent_id,
    show_subagent,
)
from providers.agents.subagents.tools import (
    CREATE,
    WAIT,
    CreateArguments,
    ListArguments,
    OneArguments,
    SendArguments,
    WaitArguments,
    find_tools,
)
from providers.agents.transition import Transition

_EVENT: Final = "agent.session.subagent"
_INSTRUCTIONS: Final = (
    "You are a subagent: another agent has given you a task. It reads only your last message: let that be your report."
)


class SubagentCalls:
    """The calls of the sessions of one store."""

    def __init__(self, store: SessionStore, responses: Responses) -> None:
        self._store = store
        self._responses = responses
        self._handlers: Mapping[str, Callable[[Transition, Any], Awaitable[Json]]] = {
            CREATE: self._create,
            "send_subagent_input": self._send,
            "interrupt_subagent": self._interrupt,
            "close_subagent": self._close,
            "resume_subagent": self._resume,
            "list_subagents": self._list,
        }

    async def answer_next(self, holder: HeldSession) -> Transition | None:
        """Answer a call of the turn; let the turn wait where all that are left wait for subagents, or the client.
        Return the session as it is then; None if its turn does not work any more."""
        changed = await holder.change(self._answer_next)
        if changed is not None:
            await end_responses(self._responses, changed)
        return changed

    async def _answer_next(self, session: Transition) -> bool:
        turn = session.state.turn
        if turn is None or turn.status != "in_progress" or turn.response_id or turn.is_cancelling:
            return False
        for call in turn.actions:
            action = session.actions[call.number]
            if call.kind == "subagent_call" and ("waits_for" not in action or session.is_due(call)):
                await self._answer(session, call, action)
                return True
        session.wait()
        return True

    async def _answer(self, session: Transition, call: Action, action: Json) -> None:
        tool, status = find_tools(session.record.agent).get(action["name"]), "completed"
        try:
            if tool is None:
                raise InvalidRequest("This function is not offered any more.")
            arguments: Any = tool.arguments.model_validate_json(action["arguments"] or "{}")
            if action["name"] == WAIT:
                result = await self._wait(session, call, arguments)
                if result is None:
                    return
            else:
                result = await self._handlers[action["name"]](session, arguments)
            output = orjson.dumps(result).decode()
            if action["name"] == CREATE:  # a field of ours, by which clients show the work under its call
                item: Json = {**action["item"], "subagent_id": result["subagent_id"]}
                session.put_action(call.number, {**action, "item": item})
        except ValidationError as exc:
            error = exc.errors(include_url=False, include_input=False)[0]
            output, status = f"Error: {'.'.join(map(str, error['loc']))}: {error['msg']}", "failed"
        except (AgentNotFound, Conflict, InvalidRequest, StorageCorrupt) as exc:
            output, status = f"Error: {exc.message}", "failed"
        session.end_call_item(session.actions[call.number], status)
        session.answer_action(call, {"type": "function_call_output", "call_id": call.id, "output": output})

    async def _create(self, session: Transition, arguments: CreateArguments) -> Json:
        summaries = session.state.subagents
        if len(summaries) >= MAX_SUBAGENTS:
            raise Conflict(f"A session has at most {MAX_SUBAGENTS} subagents: send input to one that you have.")
        _require_room(session)
        ref = session.ref.subagent(new_subagent_id())
        record = StoredSession(
            session.record.agent_id,
            _build_agent(session.record.agent, arguments),
            build_conversation_id(ref.subagent_id),
            metadata={},
            created_at=session.now,
            cache_ttl=session.record.cache_ttl,
            vault_ids=session.record.vault_ids,
            environment_id=session.record.environment_id,
            environment=session.record.environment,
            subagent=SubagentDetails(arguments.name, arguments.task[:MAX_PREVIEW_CHARS]),
        )
        subagent = Transition(ref, record, SessionState("idle", session.now), ABSENT, session)
        subagent.put(ref.session_key, encode_record(record), None, ABSENT)
        subagent.touch()
        summaries[ref.subagent_id] = Subagent()
        session.emit(f"{_EVENT}.created", subagent=show_subagent(ref, record))
        subagent.receive(_build_messages(arguments.task), session.turn.key_id)
        return {"subagent_id": ref.subagent_id, "status": "working"}

    async def _send(self, session: Transition, arguments: SendArguments) -> Json:
        subagent = await self._open(session, arguments.subagent_id)
        state = subagent.state
        if session.state.subagents[arguments.subagent_id].is_closed:
            raise Conflict("The subagent is closed: resume it first.")
        if state.turn is None:
            _require_room(session)
        if state.input_next - state.input_first >= MAX_WAITING:
            raise Conflict("The subagent has not read its earlier messages yet: wait for it.")
        subagent.receive(_build_messages(arguments.message), session.turn.key_id)
        return {"subagent_id": arguments.subagent_id, "status": "working"}

    async def _interrupt(self, session: Transition, arguments: OneArguments) -> Json:
        subagent = await self._open(session, arguments.subagent_id)
        subagent.cancel()
        return {"subagent_id": arguments.subagent_id, "status": "interrupted"}

    async def _close(self, session: Transition, arguments: OneArguments) -> Json:
        subagent = await self._open(session, arguments.subagent_id)
        summary = session.state.subagents[arguments.subagent_id]
        if not summary.is_closed:
            summary.is_closed = True
            _set_closed(subagent, session.now, "closed")
            subagent.state.deferred = []
            subagent.cancel()
        return {"subagent_id": arguments.subagent_id, "status": "closed"}

    async def _resume(self, session: Transition, arguments: OneArguments) -> Json:
        subagent = await self._open(session, arguments.subagent_id)
        summary = session.state.subagents[arguments.subagent_id]
        if summary.is_closed:
            summary.is_closed = False
            _set_closed(subagent, None, "active")
        return {"subagent_id": arguments.subagent_id, "status": "active"}

    async def _list(self, session: Transition, _arguments: ListArguments) -> Json:
        return {"subagents": [await self._describe(session, each) for each in session.state.subagents]}

    async def _wait(self, session: Transition, call: Action, arguments: WaitArguments) -> Json | None:
        """Return the reports of the subagents that the call waits for; None if it has to wait."""
        action, summaries = session.actions[call.number], session.state.subagents
        if "waits_for" not in action:
            ids = arguments.subagent_ids or [
                each for each, summary in summaries.items() if summary.turn_id or summary.is_unread
            ]
            if not ids:
                raise Conflict("No subagent works, and all reports were read.")
            if any(each not in summaries for each in ids):
                raise subagent_not_found()
            item: Json = {**action["item"], "recipient_agent_ids": ids}
            action = {**action, "item": item, "waits_for": ids, "return_when": arguments.return_when}
            session.put_action(call.number, action)
        if not session.is_due(call):
            return None
        reports: list[Json] = []
        for subagent_id in dict.fromkeys(action["waits_for"]):
            report, summary = await self._describe(session, subagent_id), summaries[subagent_id]
            if not summary.turn_id and (text := await self._read_answer(session, subagent_id)):
                report["message"] = text
                if summary.is_unread:
                    session.add_agent_message(subagent_id, session.record.agent_id, text)
            if not summary.turn_id:
                summary.is_unread = False
            reports.append(report)
        return {"subagents": reports}

    async def _describe(self, session: Transition, subagent_id: str) -> Json:
        summary = session.state.subagents[subagent_id]
        description: Json = {"subagent_id": subagent_id, "status": "working"}
        try:
            subagent = await self._store.load_subagent(session, subagent_id)
        except (AgentNotFound, StorageCorrupt) as exc:
            return {**description, "status": "failed", "error": exc.message}
        if subagent.record.subagent is not None:
            description["name"] = subagent.record.subagent.name
        if not summary.turn_id:
            description["status"] = subagent.state.last_turn
            if subagent.state.error is not None:
                description["error"] = subagent.state.error
        return {**description, "is_closed": True} if summary.is_closed else description

    async def _read_answer(self, session: Transition, subagent_id: str) -> str:
        """Return the last message of a subagent; an empty one where it has none that can be read."""
        subagent = session.subagents.get(subagent_id)
        number = subagent.state.answer if subagent is not None else None
        entry = None if number is None else await self._store.kv.get(session.ref.subagent(subagent_id).item_key(number))
        try:
            item: Any = orjson.loads(entry.value) if entry is not None else {"content": []}
            text = "".join(part["text"] for part in item["content"])
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return ""
        return text if len(text) <= MAX_REPORT_CHARS else f"{text[:MAX_REPORT_CHARS]}\n[The rest was cut off.]"

    async def _open(self, session: Transition, subagent_id: str) -> Transition:
        """Return a subagent that is to be changed."""
        if subagent_id not in session.state.subagents:
            raise subagent_not_found()
        subagent = await self._store.load_subagent(session, subagent_id)
        subagent.touch()
        return subagent


def _require_room(session: Transition) -> None:
    """Raise Conflict if no more subagents may work at once."""
    limit = session.record.agent["multi_agent"]["max_concurrent_subagents"]
    if sum(bool(each.turn_id) for each in session.state.subagents.values()) >= limit:
        raise Conflict(f"{limit} subagents work already: wait for one, or interrupt one.")


def _set_closed(subagent: Transition, closed_at: int | None, event: str) -> None:
    record = subagent.record
    if record.subagent is not None:
        record.subagent.closed_at = closed_at
    subagent.put(subagent.ref.session_key, encode_record(record))
    subagent.emit(f"{_EVENT}.{event}", subagent=show_subagent(subagent.ref, record))


def _build_agent(agent: Json, arguments: CreateArguments) -> Json:
    """Return the agent of a subagent: the one of its session, with a note, and without subagents of its own."""
    instructions = "\n\n".join(filter(None, (agent["instructions"], _INSTRUCTIONS)))
    effort = arguments.reasoning_effort
    return {
        **agent,
        "model": arguments.model or agent["model"],
        "instructions": instructions,
        "reasoning": agent["reasoning"] if effort is None else {**agent["reasoning"], "effort": effort},
        "text": {**agent["text"], "format": {"type": "text"}},
        "multi_agent": {"enabled": False, "max_concurrent_subagents": None},
    }


def _build_messages(text: str) -> list[Json]:
    return [{"content": [{"type": "input_text", "text": text}]}]
