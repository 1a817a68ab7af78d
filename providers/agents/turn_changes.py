"""The changes that a response makes to the session of its turn: its events, its end, and the failure of the turn."""

from collections.abc import Mapping, Sequence
from typing import Final

import orjson

from apis.agents.sessions import MAX_WAITING_BYTES
from apis.events import TERMINAL_EVENTS, LoggedEvent, ResponseEvent
from providers.agents.environments.artifacts import ArtifactRecord, publish
from providers.agents.output import complete_items, show_events
from providers.agents.records import Json, TokenSums
from providers.agents.store import SessionStore
from providers.agents.transition import Transition

_MAX_FAILURES: Final = 2
"""Responses of a turn in a row that may be lost with their server or its upstream until the turn fails."""
_POISON_CODES: Final = frozenset({"invalid_prompt", "context_length_exceeded"})
TURN_CODES: Final = {
    "context_length_exceeded": "context_length_exceeded",
    "rate_limit_exceeded": "rate_limit_exceeded",
    "insufficient_quota": "project_spend_limit_exceeded",
    "api_key_revoked": "authentication_error",
    "invalid_api_key": "authentication_error",
    "model_not_found": "resource_not_found",
    "overloaded": "server_overloaded",
    "server_error": "server_error",
    "storage_unavailable": "server_error",
}
"""Codes of a turn's error by those of responses and requests."""
_LOST_OUTPUT: Final = "The output was lost: the turn that read it failed."


class ShownEvents:
    """Shows a batch of the response's events, unless they have been shown. `final` is the response as the last of all
    events has it."""

    def __init__(self, response_id: str, batch: Sequence[ResponseEvent]) -> None:
        self._response_id = response_id
        self._batch = [event for event in batch if isinstance(event, LoggedEvent)]
        is_end = bool(self._batch) and self._batch[-1].type in TERMINAL_EVENTS
        self.final: Json | None = orjson.loads(self._batch[-1].data)["response"] if is_end else None

    async def __call__(self, session: Transition) -> bool:
        turn = session.state.turn
        if turn is None or turn.response_id != self._response_id:
            return False
        return show_events(session, self._batch)


class TurnFailure:
    """Ends the turn with an error, unless another response of it has begun. Its next one reads `inputs` instead of what
    this one was to read, where they are set."""

    def __init__(self, code: str, message: str, response_id: str | None = None) -> None:
        self._error = {"code": code, "message": message}
        self._response_id = response_id
        self.inputs: list[Json] | None = None

    async def __call__(self, session: Transition) -> bool:
        turn = session.state.turn
        if turn is None or self._response_id not in (None, turn.response_id):
            return False
        if self.inputs is not None:
            session.keep_inputs(self.inputs)
        session.end_turn("failed", self._error)
        return True


class ResponseEnd:
    """Ends the present response of the turn, and decides how the turn goes on."""

    def __init__(
        self,
        store: SessionStore,
        response_id: str,
        final: Json | None,
        copies: Mapping[str, ArtifactRecord],
        last: ShownEvents | None,
    ) -> None:
        """A turn that is completed has the `copies` of its outputs as artifacts. `last` are events to be shown
        before."""
        self._last = last
        self._store = store
        self._copies = copies
        self._response_id = response_id
        self._final = final
        self._items: list[Json] = [] if final is None else final["output"]

    async def __call__(self, session: Transition) -> bool:
        turn, final = session.state.turn, self._final
        if turn is None or turn.response_id != self._response_id:
            return False
        if self._last is not None:
            await self._last(session)
        complete_items(session, self._items)
        if final is not None and final.get("usage") is not None:
            session.add_usage(_sum_usage(final["usage"]))
        if final is not None and final["status"] in ("completed", "incomplete"):
            session.keep_inputs(())
        else:
            await self._keep_inputs(session)
        turn.response_id, turn.has_commands = "", False
        self._go_on(session)
        return True

    def _go_on(self, session: Transition) -> None:
        turn, final = session.turn, self._final
        status = "cancelled" if final is None else final["status"]
        if turn.is_cancelling or status == "cancelled":
            session.end_turn("cancelled")
        elif status == "failed" and (self._error_code() != "server_error" or turn.failures >= _MAX_FAILURES):
            message = (self._get_part("error") or {"message": "The response failed."})["message"]
            session.end_turn(
                "failed", {"code": TURN_CODES.get(self._error_code(), "invalid_request"), "message": message}
            )
        elif status == "incomplete" and self._find_reason() != "steered":
            reason = self._find_reason()
            code = "max_output_tokens" if reason == "max_output_tokens" else "invalid_request"
            session.end_turn("failed", {"code": code, "message": f"The response is incomplete: {reason}."})
        else:
            turn.failures = turn.failures + 1 if status == "failed" else 0
            if any(each.kind == "subagent_call" for each in turn.actions):
                return  # the worker answers these before the turn goes on, or waits
            if turn.actions:
                session.wait()
            elif status == "completed" and session.state.input_first == session.state.input_next:
                publish(session, self._copies)
                session.end_turn("completed")

    def _get_part(self, field: str) -> Json | None:
        return None if self._final is None else self._final.get(field)

    def _find_reason(self) -> str | None:
        """Return why the response is incomplete: `steered` if it has ended because input came for the turn."""
        return (self._get_part("incomplete_details") or {}).get("reason")

    def _error_code(self) -> str:
        return (self._get_part("error") or {"code": "server_error"})["code"]

    async def _keep_inputs(self, session: Transition) -> None:
        """Let the next response read what this one has read, and what it has said until its end, because neither is in
        the conversation. What no model can read is left out."""
        read = await self._store.read_inputs(session)
        if self._error_code() in _POISON_CODES and self._final is not None and self._final["status"] == "failed":
            inputs = list_answers(read)
        else:
            inputs = [*_list_started(self._items), *read, *_list_finished(self._items)]
            if sum(len(orjson.dumps(item)) for item in inputs) > MAX_WAITING_BYTES:
                inputs = list_answers(read)
        session.keep_inputs(inputs)


def _list_finished(items: Sequence[Json]) -> list[Json]:
    """Return the items that are whole, and no call of the shell without its output."""
    finished = [item for item in items if item.get("status") in (None, "completed")]
    answered = {item["call_id"] for item in finished if item["type"] == "shell_call_output"}
    return [item for item in finished if item["type"] != "shell_call" or item["call_id"] in answered]


def _list_started(items: Sequence[Json]) -> list[Json]:
    """Return the approved calls that did not succeed. Before the approval, they keep it from making them again."""
    return [
        item
        for item in items
        if item["type"] == "mcp_call" and item.get("approval_request_id") and item.get("status") != "completed"
    ]


def list_answers(items: Sequence[Json]) -> list[Json]:
    """Return the answers to calls of the conversation, each with a short output."""
    own_calls = {item.get("call_id") for item in items if item["type"] == "function_call"}
    answers: list[Json] = []
    for item in items:
        if item["type"] == "function_call_output" and item["call_id"] not in own_calls:
            answers.append({**item, "output": _LOST_OUTPUT})
        elif item["type"] == "mcp_approval_response":
            answers.append(item)
    return answers


def _sum_usage(usage: Json) -> TokenSums:
    return TokenSums(
        usage["input_tokens"],
        usage["input_tokens_details"]["cached_tokens"],
        usage["output_tokens"],
        usage["output_tokens_details"]["reasoning_tokens"],
    )
