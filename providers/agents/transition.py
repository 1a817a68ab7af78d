"""Transition: one change of a session, with the records and events that are written in the same step.

session: idle -> in_progress -> requires_action -> in_progress -> idle, or failed until the next message
turn:    queued -> in_progress -> waiting -> in_progress -> completed, failed or cancelled

A change of a subagent is one of its session: the session has the log of all, and its state is the condition of both.
"""

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import orjson

from apis.errors import Conflict
from apis.storage.keys import new_id_key
from apis.storage.kv_store import Delete, Op, Put
from apis.storage.records import encode_record
from providers.agents.records import (
    Action,
    ActionKind,
    ActiveTurn,
    Json,
    SessionRef,
    SessionState,
    SessionStatus,
    StoredSession,
    Subagent,
    TokenSums,
    TurnRecord,
    TurnStatus,
)
from providers.agents.views import show_session, show_turn
from providers.agents.work import TURN_PREFIX
from providers.common.jobs import JobRecord
from providers.common.state.event_logs import batch_key, encode_line

_CANCELLED_CALL: Final = "The call was cancelled before it had a result."
_SESSION: Final = "agent.session"
_TURN: Final = "agent.session.turn"
_MAX_DEFERRED: Final = 100


class Transition:
    """The state of a session, or of a subagent, while it is changed. `turn_record` is the record of its turn; `actions`
    are the waiting calls, and `open_items` the commands that run, as they are shown, by their numbers. `root` is the
    session itself, and `subagents` has those of it that were loaded. `ops` write its parts, and `lines` are events."""

    def __init__(
        self,
        ref: SessionRef,
        record: StoredSession,
        state: SessionState,
        version: int,
        root: "Transition | None" = None,
        *,
        holds_root: bool = False,
    ) -> None:
        """A subagent lives as long as its `root`; with `holds_root`, the root as long as the subagent does. Either one
        refers weakly to the other: a cycle would keep their records until a full collection of garbage."""
        self.ref = ref
        self.record = record
        self.state = state
        self.version = version
        self.now = int(time.time())
        self.turn_record: TurnRecord | None = None
        self.webhooks: list[tuple[str, Json]] = []
        self.open_items: dict[int, Json] = {}
        self.actions: dict[int, Json] = {}
        self._find_root: Callable[[], Transition | None] = lambda: None
        self._members: dict[str, Callable[[], Transition | None]] = {}
        self._first_event = state.events
        self.lines: list[bytes] = []
        self.ops: dict[str, Op] = {}
        self.is_touched = False
        if root is not None:
            self._find_root = (lambda: root) if holds_root else weakref.ref(root)
            root._members[ref.subagent_id] = weakref.ref(self) if holds_root else (lambda: self)

    @property
    def root(self) -> "Transition":
        """The session."""
        root = self._find_root() if self.ref.subagent_id else self
        assert root is not None  # the code that changes a subagent has its session
        return root

    @property
    def subagents(self) -> "Mapping[str, Transition]":
        """The subagents of the session that were loaded, by their ids."""
        members = ((subagent_id, find()) for subagent_id, find in self._members.items())
        return {subagent_id: member for subagent_id, member in members if member is not None}

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
        return bool(self.lines or self.ops)

    @property
    def goes_on(self) -> bool:
        """True if the change lets a turn of the session begin or go on."""
        return self.root is self and isinstance(self.ops.get(self.ref.job_key), Put)

    @property
    def has_work(self) -> bool:
        """True if a worker has something to do after the change."""
        jobs = [op for key, op in self.ops.items() if key.startswith(TURN_PREFIX)]
        return any(isinstance(op, Put) for op in jobs) or any(each.has_work for each in self.subagents.values())

    @property
    def needs_worker(self) -> bool:
        """True while a worker drives the turn."""
        turn = self.state.turn
        return turn is not None and turn.status == "in_progress"

    @property
    def is_working(self) -> bool:
        """True while the session has a turn, or a subagent of it has one, that has not ended."""
        return self.state.turn is not None or any(each.turn_id for each in self.state.subagents.values())

    def touch(self) -> None:
        """Note that the session is active now."""
        self.now = self.root.now = int(time.time())
        self.state.last_active_at = self.root.state.last_active_at = self.now
        self.is_touched = True

    def settle(self, versions: Sequence[int]) -> None:
        """Begin another change of the session, after this one was written with these versions, in their order."""
        for each, version in zip(self.list_written(), versions, strict=False):
            each.version, each.is_touched = version, False
            each.webhooks, each.lines, each.ops = [], [], {}
        self._first_event = self.state.events

    def put(self, key: str, value: bytes, ttl_s: float | None = None, expect: int | None = None) -> None:
        """Write the record with the change; the last of several of one key counts."""
        self.ops[key] = Put(key, value, ttl_s, expect)

    def delete(self, key: str) -> None:
        """Delete the record with the change."""
        self.ops[key] = Delete(key)

    def list_written(self) -> "Sequence[Transition]":
        """Return the session, and its subagents that the change writes."""
        return [self, *(each for each in self.subagents.values() if each.is_touched)]

    def event_batch(self) -> tuple[int, bytes]:
        """Return the number of the first new event, and the new events as a batch of the log."""
        return self._first_event, b"".join(self.lines)

    def build_ops(self, event_ttl_s: float) -> list[Op]:
        """Return the operations that write the change of a session, and of its subagents that are touched, on the
        condition that the state is as it was read."""
        written = self.list_written()
        ops: list[Op] = [Put(each.ref.state_key, encode_record(each.state), None, each.version) for each in written]
        ops += [op for each in written for op in each.ops.values()]
        number, batch = self.event_batch()
        if batch:
            ops.append(Put(batch_key(self.ref.event_prefix, number), batch, event_ttl_s))
        return ops

    def emit(self, event_type: str, **fields: Any) -> None:
        """Add an event to the log of the session."""
        state = self.root.state
        number = state.events
        state.events += 1
        event = {"type": event_type, "event_id": f"{self.ref.id}_event_{number}", "sequence_number": number, **fields}
        self.root.lines.append(encode_line(event_type, orjson.dumps(event)))

    def emit_of_turn(self, name: str, **fields: Any) -> None:
        """Add an event about the turn to the log."""
        self.emit(f"{_TURN}.{name}", session_id=self.ref.id, turn_id=self.turn.id, **fields)

    def begin_session(self) -> None:
        """Note that the session was created."""
        self._emit_session("created")

    def receive(self, messages: Sequence[Json], key_id: str) -> None:
        """Take messages: for a new turn, or for the one that works, which goes on with the rights of their key. Raises
        Conflict where too many wait for the end of one that is cancelled."""
        turn = self.state.turn
        if turn is None:
            self.begin_turn(messages, key_id)
            return
        turn.key_id = key_id
        if not turn.is_cancelling:
            self.add_messages(messages)
            self.go_on()
        elif len(self.state.deferred) + len(messages) > _MAX_DEFERRED:
            raise Conflict("Too many messages wait for the end of the turn that is cancelled.", param="events")
        else:
            self.state.deferred += messages
            self.state.deferred_bytes += len(orjson.dumps(messages))

    def cancel(self) -> None:
        """Cancel the turn, if there is one: at once where it waits, else as soon as its worker sees that."""
        turn = self.state.turn
        if turn is not None and turn.status == "waiting":
            self.end_turn("cancelled")
        elif turn is not None:
            turn.is_cancelling = True

    def begin_turn(self, messages: Sequence[Json], key_id: str) -> None:
        """Begin a turn that reads these messages, for the key that sent them."""
        turn = self.state.turn = ActiveTurn(f"turn_{new_id_key()}", key_id)
        first_item, first_event = self.state.items, self.root.state.events
        self.turn_record = TurnRecord(
            "queued", self.now, first_item, cache_ttl=self.record.cache_ttl, first_event=first_event
        )
        self.state.error = self.state.answer = None
        self.emit_of_turn("created", turn=self._show_turn())
        self.add_messages(messages)
        self.turn_record.started_at = self.now
        self._work(turn)

    def _work(self, turn: ActiveTurn) -> None:
        """Let a worker drive the turn from now on."""
        self._set_turn_status(turn, "in_progress")
        self.root.update_status()
        self.emit_of_turn("in_progress", turn=self._show_turn())
        self.put(self.ref.job_key, encode_record(JobRecord()))

    def add_messages(self, messages: Sequence[Json]) -> None:
        """Add messages to the turn: of the user, or for a subagent, of the agent of its session."""
        for message in messages:
            content = message["content"]
            if self.root is self:
                fields = {"role": "user", "content": content, "phase": None, "status": "completed"}
                self.add_item({"id": f"msg_{new_id_key()}", "type": "message", **fields})
            else:
                self.add_agent_message(self.record.agent_id, self.ref.subagent_id, content[0]["text"])
            self.add_input({"type": "message", "role": "user", "content": content})
            self.state.message_end = self.state.input_next

    def add_agent_message(self, sender_id: str, recipient_id: str, text: str) -> None:
        """Show a message between two agents in the turn."""
        ids = {"sender_agent_id": sender_id, "recipient_agent_id": recipient_id}
        content = [{"type": "output_text", "text": text}]
        self.add_item({"id": f"msg_{new_id_key()}", "type": "agent_message", **ids, "content": content})

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
        data = orjson.dumps(item)
        self.put(self.ref.input_key(self.state.input_next), data)
        self.state.input_next += 1
        self.state.input_bytes += len(data)

    def choose_response(self, response_id: str) -> None:
        """Begin a response of the turn, which reads all inputs that wait now."""
        turn, state = self.turn, self.state
        turn.response_id, turn.is_started, turn.chosen_at = response_id, False, self.now
        turn.input_end, turn.read_bytes = state.input_next, state.input_bytes
        turn.last_event, turn.next_output, turn.open = -1, 0, {}

    def keep_inputs(self, items: Sequence[Json]) -> None:
        """Let the next response read these items instead of those that the present one reads, before the others."""
        for number in range(self.state.input_first, self.turn.input_end):
            self.delete(self.ref.input_key(number))
        turn, state = self.turn, self.state
        state.input_first = max(state.input_first, turn.input_end)
        state.input_bytes, turn.read_bytes = state.input_bytes - turn.read_bytes, 0
        for number in range(len(items), state.kept_inputs):
            self.delete(self.ref.kept_key(number))
        state.kept_inputs = len(items)
        for number, item in enumerate(items):
            self.put(self.ref.kept_key(number), orjson.dumps(item))

    def add_action(self, kind: ActionKind, action_id: str, action: Json) -> None:
        """Add a call that waits for its answer."""
        number = self.state.actions
        self.state.actions += 1
        self.turn.actions.append(Action(kind, action_id, number))
        self.put_action(number, {"type": kind, "turn_id": self.turn.id, **action})
        self._update_root()

    def put_action(self, number: int, action: Json) -> None:
        """Store the waiting call of that number."""
        self.actions[number] = action
        self.put(self.ref.action_key(number), orjson.dumps(action))

    def find_action(
        self, kind: ActionKind, action_id: str, turn_id: str | None = None
    ) -> "tuple[Transition, Action] | None":
        """Return the waiting call of that id, and whose it is: of the session, or of a subagent. With `turn_id`, it is
        one of that turn."""
        for each in (self, *self.subagents.values()):
            turn = each.state.turn
            if turn is not None and turn_id in (None, turn.id):
                for action in turn.actions:
                    if (action.kind, action.id) == (kind, action_id):
                        return each, action
        return None

    def answer_action(self, action: Action, item: Json) -> None:
        """Take the answer of a waiting call, `item`, for the next response; the turn goes on after the last one."""
        self.add_input(item)
        self.turn.actions.remove(action)
        self.actions.pop(action.number, None)
        self.delete(self.ref.action_key(action.number))
        self._update_root()
        self.go_on()

    def go_on(self) -> None:
        """Let a turn go on that waits, if it need not wait any longer."""
        turn = self.state.turn
        if turn is None or turn.status != "waiting":
            return
        if any(each.kind != "subagent_call" or not self.is_due(each) for each in turn.actions):
            self.root.update_status()
        else:
            self._work(turn)

    def is_due(self, call: Action) -> bool:
        """Return True for a call to wait for subagents whose answer is there, or that a new message ends."""
        state, action = self.state, self.actions[call.number]
        ids: list[str] = action.get("waits_for", [])
        ended = [each not in state.subagents or not state.subagents[each].turn_id for each in ids]
        is_there = any(ended) if action.get("return_when") == "any" else all(ended)
        return is_there or state.message_end > state.input_first

    def wait(self) -> None:
        """Let the turn wait, without a worker: for the client, or for subagents."""
        self._set_turn_status(self.turn, "waiting")
        self.delete(self.ref.job_key)
        kinds = [each.kind for each in self.turn.actions if each.kind != "subagent_call"]
        self.root.update_status(is_repeated=bool(kinds))
        for kind in dict.fromkeys(kinds):
            self.root.webhooks.append((f"{_SESSION}.action_required", {"required_action": {"type": kind}}))

    def update_status(self, *, is_repeated: bool = False) -> None:
        """Give the session the status that its turn and its subagents have together. A status that is as it was is
        shown only if it `is_repeated`."""
        status: SessionStatus = "in_progress" if self.is_working else "idle" if self.state.error is None else "failed"
        if self._list_required():
            status = "requires_action"
        if status != self.state.status or is_repeated:
            self.state.status = status
            self._emit_session(status)

    def end_turn(self, status: TurnStatus, error: Json | None = None) -> None:
        """End the turn. Calls that still wait have no result. Messages that came after a cancellation begin another
        turn."""
        turn, record = self.turn, self.turn_record
        for action in turn.actions:
            self.add_input(_cancelled_answer(action))
            self.delete(self.ref.action_key(action.number))
            if action.kind == "subagent_call":
                self.end_call_item(self.actions[action.number], "incomplete")
        turn.actions = []
        self.actions = {}
        assert record is not None  # it was written when the turn began
        record.completed_at, record.end_item, record.error = self.now, self.state.items, error
        self._set_turn_status(turn, status)
        usage = record.usage.show() if record.usage is not None else None
        self.emit_of_turn(status, turn=self._show_turn(), usage=usage)
        self.state.turn, deferred, self.state.deferred = None, self.state.deferred, []
        self.state.deferred_bytes = 0
        self.state.last_turn, self.state.error = status, error["message"] if error is not None else None
        self._update_root()
        self.delete(self.ref.job_key)
        if deferred:
            self.begin_turn(deferred, turn.key_id)
            return
        self.root.update_status()
        if self.root is not self:
            self.root.go_on()

    def give_up(self, subagent_id: str) -> None:
        """End the work of a subagent whose records are damaged, as far as its session has noted it."""
        summary = self.state.subagents[subagent_id]
        summary.turn_id, summary.has_actions, summary.is_unread = "", False, True
        self.update_status()
        self.go_on()

    def end_call_item(self, action: Json, status: str) -> None:
        """Show the end of a call of a subagent, if the call is shown."""
        if action["item"] is not None:
            item = {**action["item"], "turn_id": self.turn.id, "status": status}
            self.put_item(action["item_number"], item)
            self.emit_of_turn("item.done", item=item, output_index=action["output_index"])

    def add_usage(self, usage: TokenSums) -> None:
        """Count the tokens of a response, for the turn and for the session."""
        assert self.turn_record is not None
        self.turn_record.usage = self.turn_record.usage or TokenSums()
        self.turn_record.usage.add(usage)
        self.put(self.ref.turn_key(self.turn.id), encode_record(self.turn_record))
        state = self.root.state
        state.usage = state.usage or TokenSums()
        state.usage.add(usage)

    def show_session(self) -> Json:
        """Return the session as the API shows it."""
        required = self._list_required() if self.state.status == "requires_action" else []
        return show_session(self.ref, self.record, self.state, required)

    def _list_required(self) -> list[Json]:
        """Return the calls that wait for the client."""
        required: list[Json] = []
        for each in (self, *self.subagents.values()):
            turn = each.state.turn
            if turn is not None and turn.status == "waiting":
                required += [each.actions[call.number] for call in turn.actions if call.kind != "subagent_call"]
        return required

    def _set_turn_status(self, turn: ActiveTurn, status: TurnStatus) -> None:
        assert self.turn_record is not None
        turn.status = self.turn_record.status = status
        self.put(self.ref.turn_key(turn.id), encode_record(self.turn_record))
        self._update_root()

    def _update_root(self) -> None:
        """Note in the state of the session how the turn of a subagent is."""
        if self.root is not self:
            turn, summaries = self.state.turn, self.root.state.subagents
            summary = summaries.setdefault(self.ref.subagent_id, Subagent())
            summary.turn_id = "" if turn is None else turn.id
            summary.has_actions = turn is not None and bool(turn.actions)
            summary.is_unread = turn is None

    def _show_turn(self) -> Json:
        assert self.turn_record is not None
        return show_turn(self.ref, self.record.agent_id, self.turn.id, self.turn_record)

    def _emit_session(self, name: str) -> None:
        session = self.show_session()
        self.emit(f"{_SESSION}.{name}", session=session)
        if name != "requires_action":  # whose webhook names the action
            environment: Json = session["environment"]
            ids = {"environment_id": environment["id"]} if "id" in environment else {}
            self.webhooks.append((f"{_SESSION}.{name}", {"environment_type": environment["type"], **ids}))


def _cancelled_answer(action: Action) -> Json:
    if action.kind != "mcp_approval_request":
        return {"type": "function_call_output", "call_id": action.id, "output": _CANCELLED_CALL}
    return {
        "type": "mcp_approval_response",
        "approval_request_id": action.id,
        "approve": False,
        "reason": _CANCELLED_CALL,
    }
