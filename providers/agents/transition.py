"""Transition: one change of a session, with the records and events that are written in the same step.

session: idle -> in_progress -> requires_action -> in_progress -> idle, or failed until the next message
turn:    queued -> in_progress -> waiting -> in_progress -> completed, failed or cancelled
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from apis.storage.keys import new_id_key
from apis.storage.kv_store import Delete, Op, Put
from apis.storage.records import encode_record
from providers.agents.descriptions import show_tools
from providers.agents.records import (
    Action,
    ActionKind,
    ActiveTurn,
    Json,
    SessionRef,
    SessionState,
    StoredSession,
    TokenSums,
    TurnRecord,
    TurnStatus,
)
from providers.common.jobs import JobRecord
from providers.common.state.event_logs import batch_key, encode_line

_CANCELLED_CALL: Final = "The call was cancelled before it had a result."
_SESSION: Final = "agent.session"
_TURN: Final = "agent.session.turn"


class Transition:
    """The state of a session while it is changed. `turn_record` is the record of its turn; `actions` are the waiting
    calls, and `open_items` the commands that run, as they are shown, by their numbers."""

    def __init__(
        self,
        ref: SessionRef,
        record: StoredSession,
        state: SessionState,
        version: int,
        turn_record: TurnRecord | None = None,
        actions: Mapping[int, Json] | None = None,
        open_items: Mapping[int, Json] | None = None,
    ) -> None:
        self.ref = ref
        self.record = record
        self.state = state
        self.version = version
        self.now = int(time.time())
        self.turn_record = turn_record
        self.webhooks: list[tuple[str, Json]] = []
        self.has_deliveries = False
        """True once webhooks of the change wait for receivers."""
        self.open_items = dict(open_items or {})
        self._actions = dict(actions or {})
        self._first_event = state.events
        self._lines: list[bytes] = []
        self._ops: dict[str, Op] = {}

    @property
    def turn(self) -> ActiveTurn:
        """The turn that has not ended; there must be one."""
        assert self.state.turn is not None
        return self.state.turn

    @property
    def has_unread_input(self) -> bool:
        """True if input has come that the present response of the turn does not read."""
        turn = self.state.turn
        return turn is not None and bool(turn.response_id) and self.state.input_next > turn.input_end

    @property
    def has_changes(self) -> bool:
        """True once there is something to write."""
        return bool(self._lines or self._ops)

    def touch(self) -> None:
        """Note that the session is active now."""
        self.now = self.state.last_active_at = int(time.time())

    def settle(self, version: int) -> None:
        """Begin another change, after this one was written as that version of the state."""
        self.version, self._first_event = version, self.state.events
        self.webhooks = []
        self._lines = []
        self._ops = {}

    def put(self, key: str, value: bytes, ttl_s: float | None = None, expect: int | None = None) -> None:
        """Write the record with the change; the last of several of one key counts."""
        self._ops[key] = Put(key, value, ttl_s, expect)

    def delete(self, key: str) -> None:
        """Delete the record with the change."""
        self._ops[key] = Delete(key)

    def event_batch(self) -> tuple[int, bytes]:
        """Return the number of the first new event, and the new events as a batch of the log."""
        return self._first_event, b"".join(self._lines)

    def build_ops(self, event_ttl_s: float) -> list[Op]:
        """Return the operations that write the change, on the condition that the state is as it was read."""
        ops: list[Op] = [Put(self.ref.state_key, encode_record(self.state), None, self.version), *self._ops.values()]
        number, batch = self.event_batch()
        if batch:
            ops.append(Put(batch_key(self.ref.event_prefix, number), batch, event_ttl_s))
        return ops

    def emit(self, event_type: str, **fields: Any) -> None:
        """Add an event to the log."""
        number = self.state.events
        self.state.events += 1
        event = {"type": event_type, "event_id": f"{self.ref.id}_event_{number}", "sequence_number": number, **fields}
        self._lines.append(encode_line(event_type, orjson.dumps(event)))

    def emit_of_turn(self, name: str, **fields: Any) -> None:
        """Add an event about the turn to the log."""
        self.emit(f"{_TURN}.{name}", session_id=self.ref.id, turn_id=self.turn.id, **fields)

    def begin_session(self) -> None:
        """Note that the session was created."""
        self._emit_session("created")

    def begin_turn(self, messages: Sequence[Json], key_id: str) -> None:
        """Begin a turn that reads these messages, for the key that sent them."""
        turn = self.state.turn = ActiveTurn(f"turn_{new_id_key()}", key_id)
        first_item, first_event = self.state.items, self.state.events
        self.turn_record = TurnRecord(
            "queued", self.now, first_item, cache_ttl=self.record.cache_ttl, first_event=first_event
        )
        self.state.error = None
        self.emit_of_turn("created", turn=self._show_turn())
        self.add_messages(messages)
        self.turn_record.started_at = self.now
        self._work(turn)

    def _work(self, turn: ActiveTurn) -> None:
        """Let a worker drive the turn from now on."""
        self.state.status = "in_progress"
        self._emit_session("in_progress")
        self._set_turn_status(turn, "in_progress")
        self.emit_of_turn("in_progress", turn=self._show_turn())
        self.put(self.ref.job_key, encode_record(JobRecord()))

    def add_messages(self, messages: Sequence[Json]) -> None:
        """Add messages of the user to the turn."""
        for message in messages:
            fields = {"role": "user", "content": message["content"], "phase": None, "status": "completed"}
            self.add_item({"id": f"msg_{new_id_key()}", "type": "message", **fields})
            self.add_input({"type": "message", "role": "user", "content": message["content"]})

    def add_item(self, item: Json, output_index: int | None = None) -> int:
        """Add an item to the session and return its number; one of the output has an index in the turn."""
        number = self.state.items
        self.state.items += 1
        item = {**item, "turn_id": self.turn.id}
        self.put_item(number, item)
        self.put(self.ref.item_number_key(item["id"]), b"%d" % number)
        self.emit_of_turn("item.added", item=item, output_index=output_index)
        return number

    def put_item(self, number: int, item: Json) -> None:
        """Store the item of that number."""
        self.put(self.ref.item_key(number), orjson.dumps({**item, "turn_id": self.turn.id}))

    def add_input(self, item: Json) -> None:
        """Add an item that the next response reads."""
        self.put(self.ref.input_key(self.state.input_next), orjson.dumps(item))
        self.state.input_next += 1

    def keep_inputs(self, items: Sequence[Json]) -> None:
        """Let the next response read these items instead of those that the present one reads, before the others."""
        for number in range(self.state.input_first, self.turn.input_end):
            self.delete(self.ref.input_key(number))
        self.state.input_first = self.turn.input_end
        for number in range(len(items), self.state.kept_inputs):
            self.delete(self.ref.kept_key(number))
        self.state.kept_inputs = len(items)
        for number, item in enumerate(items):
            self.put(self.ref.kept_key(number), orjson.dumps(item))

    def add_action(self, kind: ActionKind, action_id: str, action: Json) -> None:
        """Add a call that waits for the client."""
        number = self.state.actions
        self.state.actions += 1
        self._actions[number] = {"type": kind, "turn_id": self.turn.id, **action}
        self.put(self.ref.action_key(number), orjson.dumps(self._actions[number]))
        self.turn.actions.append(Action(kind, action_id, number))

    def find_action(self, kind: ActionKind, action_id: str) -> Action | None:
        """Return the waiting call of that id."""
        turn = self.state.turn
        waiting = turn.actions if turn is not None else ()
        return next((each for each in waiting if (each.kind, each.id) == (kind, action_id)), None)

    def answer_action(self, action: Action, item: Json) -> None:
        """Take the answer of a waiting call, `item`, for the next response; the turn goes on after the last one."""
        self.add_input(item)
        self.turn.actions.remove(action)
        self._actions.pop(action.number, None)
        self.delete(self.ref.action_key(action.number))
        if self.turn.status == "waiting" and not self.turn.actions:
            self._work(self.turn)

    def wait(self) -> None:
        """Let the turn wait for the client, without a worker."""
        self.state.status = "requires_action"
        self._set_turn_status(self.turn, "waiting")
        self.delete(self.ref.job_key)
        self._emit_session("requires_action")
        for kind in dict.fromkeys(each.kind for each in self.turn.actions):
            self.webhooks.append((f"{_SESSION}.action_required", {"required_action": {"type": kind}}))

    def end_turn(self, status: TurnStatus, error: Json | None = None) -> None:
        """End the turn. Calls that still wait have no result. Messages that came after a cancellation begin another
        turn."""
        turn, record = self.turn, self.turn_record
        for action in turn.actions:
            self.add_input(_cancelled_answer(action))
            self.delete(self.ref.action_key(action.number))
        turn.actions = []
        self._actions = {}
        assert record is not None  # it was written when the turn began
        record.completed_at, record.end_item, record.error = self.now, self.state.items, error
        self._set_turn_status(turn, status)
        usage = record.usage.show() if record.usage is not None else None
        self.emit_of_turn(status, turn=self._show_turn(), usage=usage)
        self.state.turn, deferred, self.state.deferred = None, self.state.deferred, []
        self.delete(self.ref.job_key)
        if deferred:
            self.begin_turn(deferred, turn.key_id)
            return
        self.state.status = "failed" if status == "failed" else "idle"
        self.state.error = error["message"] if error is not None else None
        self._emit_session(self.state.status)

    def add_usage(self, usage: TokenSums) -> None:
        """Count the tokens of a response."""
        assert self.turn_record is not None
        self.turn_record.usage = self.turn_record.usage or TokenSums()
        self.turn_record.usage.add(usage)
        self.state.usage = self.state.usage or TokenSums()
        self.state.usage.add(usage)

    def show_session(self) -> Json:
        """Return the session as the API shows it."""
        return show_session(self.ref, self.record, self.state, self._actions)

    def _set_turn_status(self, turn: ActiveTurn, status: TurnStatus) -> None:
        assert self.turn_record is not None
        turn.status = self.turn_record.status = status
        self.put(self.ref.turn_key(turn.id), encode_record(self.turn_record))

    def _show_turn(self) -> Json:
        assert self.turn_record is not None
        return show_turn(self.ref, self.record.agent_id, self.turn.id, self.turn_record)

    def _emit_session(self, name: str) -> None:
        self.emit(f"{_SESSION}.{name}", session=self.show_session())
        if name != "requires_action":  # whose webhook names the action
            self.webhooks.append((f"{_SESSION}.{name}", {}))


def show_session(ref: SessionRef, record: StoredSession, state: SessionState, actions: Mapping[int, Json]) -> Json:
    """Return a session as the API shows it; `actions` has those of its waiting calls by number."""
    waiting = state.turn.actions if state.turn is not None and state.status == "requires_action" else ()
    agent = {name: value for name, value in record.agent.items() if name != "metadata"}
    return {
        "id": ref.id,
        "object": "agent.session",
        "agent": {**agent, "id": record.agent_id, "tools": show_tools(agent["tools"], in_session=True)},
        "environment": show_session_environment(record),
        "status": state.status,
        "required_actions": [actions[each.number] for each in waiting if each.number in actions],
        "usage": None if state.usage is None else state.usage.show(),
        "error": state.error,
        "metadata": record.metadata,
        "vault_ids": record.vault_ids,
        "review": record.review,
        "prompt_cache_options": None if record.cache_ttl is None else {"ttl": record.cache_ttl},
        "created_at": record.created_at,
        "last_active_at": state.last_active_at,
    }


def show_session_environment(record: StoredSession) -> Json:
    """Return the environment of a session as the API shows it."""
    return {"type": "none"} if record.environment is None else {**record.environment, "id": record.environment_id}


def show_turn(ref: SessionRef, agent_id: str, turn_id: str, record: TurnRecord) -> Json:
    """Return a turn as the API shows it."""
    return {
        "id": turn_id,
        "object": "agent.session.turn",
        "session_id": ref.id,
        "agent_id": agent_id,
        "subagent_id": None,
        "status": record.status,
        "error": record.error,
        "usage": None if record.usage is None else record.usage.show(),
        "created_at": record.created_at,
        "started_at": record.started_at,
        "completed_at": record.completed_at,
        "sequence_number": record.first_event,
        "prompt_cache_options": None if record.cache_ttl is None else {"ttl": record.cache_ttl},
    }


def _cancelled_answer(action: Action) -> Json:
    if action.kind == "function_call":
        return {"type": "function_call_output", "call_id": action.id, "output": _CANCELLED_CALL}
    return {
        "type": "mcp_approval_response",
        "approval_request_id": action.id,
        "approve": False,
        "reason": _CANCELLED_CALL,
    }
