"""The records of a session in the KVStore, and their keys.

    TENANT/agent_session/ID              the session as it was created, with its agent
    TENANT/agent_session_state/ID        its state; each change of the session writes it on the condition that it is as
                                         it was read
    TENANT/agent_turn/ID/TURN            a turn
    TENANT/agent_item/ID/NUMBER          an item, as it is shown
    TENANT/agent_item_number/ID/ITEM     the number of an item, by its id
    TENANT/agent_input/ID/NUMBER         an item that a response has not read yet
    TENANT/agent_kept/ID/NUMBER          an item that a lost response has read or said, for the next one
    TENANT/agent_action/ID/NUMBER        a call that waits for the client
    TENANT/agent_event/ID/NUMBER         a batch of events (providers/common/state/event_logs.py)
    TENANT/agent_once/NAME               the session that a request with an Idempotency-Key has reached, and its body
    TENANT/agent_session_end/ID          present after the session was deleted
    TENANT/agent_subagent/ID/SUBAGENT    a subagent of the session, as a session of its own
    /agent_turn/TENANT/ID                present while a worker has to drive the turn of the session
    /agent_turn_lease/TENANT/ID          held by the worker that drives it

A tenant's name has no slash, and neither has an id. Where a key has the ID of a session, one of a subagent has
ID.SUBAGENT; only events are those of the session.
"""

from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from apis.storage.keys import record_id
from providers.agents.work import TURN_PREFIX

Json = dict[str, Any]
SessionStatus = Literal["idle", "in_progress", "requires_action", "failed"]
TurnStatus = Literal["queued", "in_progress", "waiting", "completed", "failed", "cancelled"]
ActionKind = Literal["function_call", "mcp_approval_request", "subagent_call"]


class TokenSums(msgspec.Struct, omit_defaults=True):
    """Tokens of some responses."""

    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0

    def add(self, other: "TokenSums") -> None:
        """Add the tokens of others."""
        self.input += other.input
        self.cached += other.cached
        self.output += other.output
        self.reasoning += other.reasoning

    def show(self) -> Json:
        """Return the sums as the API shows them."""
        return {
            "input_tokens": self.input,
            "input_tokens_details": {"cached_tokens": self.cached},
            "output_tokens": self.output,
            "output_tokens_details": {"reasoning_tokens": self.reasoning},
            "total_tokens": self.input + self.output,
        }


class SubagentDetails(msgspec.Struct):
    """The name of a subagent, the beginning of its task, and when it was closed (Unix time)."""

    name: str | None
    task: str
    closed_at: int | None = None


class StoredSession(msgspec.Struct):
    """A session as it was created or changed by a client; `agent` has the fields of its agent without the secrets of
    MCP servers, and `environment` those of its environment that are visible, None where it has none. One of a subagent
    has its details."""

    agent_id: str
    agent: Json
    conversation_id: str
    metadata: dict[str, str]
    created_at: int
    cache_ttl: str | None = None
    review: str | None = None
    vault_ids: list[str] = []
    environment_id: str = ""
    environment: Json | None = None
    subagent: SubagentDetails | None = None


class OpenCommand(msgspec.Struct, omit_defaults=True):
    """A command that runs: the `position` of it in the call `call_id`, its index in the turn and its number, and the
    index of the output of the call in the response, once that is known."""

    call_id: str
    position: int
    index: int
    number: int
    output_index: int = -1


class Action(msgspec.Struct):
    """A call, by its id, that waits for the client, or one of a subagent, for its answer; `number` is that of its
    record."""

    kind: ActionKind
    id: str
    number: int


class ActiveTurn(msgspec.Struct, omit_defaults=True):
    """The turn of a session that has not ended. `response_id` is that of its present response, chosen at `chosen_at`
    (Unix time), empty between two; `input_end` bounds the inputs that this one reads, which have `read_bytes`, and
    `last_event` is the last event of it that was shown. `outputs` counts the output items of the turn, and
    `next_output` those of the response; `open` has the items that are not done, by their index in the response: their
    index in the turn and their number. `commands` are those that run. `failures` are the responses in a row that were
    lost. `has_commands` is true once commands have run since the workspace was saved, and `has_outputs` once any have
    run in the turn."""

    id: str
    key_id: str
    status: TurnStatus = "queued"
    response_id: str = ""
    chosen_at: int = 0
    is_started: bool = False
    input_end: int = 0
    read_bytes: int = 0
    last_event: int = -1
    outputs: int = 0
    next_output: int = 0
    open: dict[int, tuple[int, int]] = {}
    actions: list[Action] = []
    is_cancelling: bool = False
    failures: int = 0
    commands: list[OpenCommand] = []
    has_commands: bool = False
    has_outputs: bool = False


class Subagent(msgspec.Struct, omit_defaults=True):
    """A subagent as its session knows it: the id of its turn that has not ended, whether that has calls that a client
    answers, whether its agent has not read the end of its last turn, and whether it is closed."""

    turn_id: str = ""
    has_actions: bool = False
    is_unread: bool = False
    is_closed: bool = False


class SessionState(msgspec.Struct, omit_defaults=True):
    """All of a session that changes as it works. `deferred` are the messages that came while its turn was cancelled:
    they begin the next one. `message_end` is the number after that of the last message among the inputs. `last_turn`
    is the end of the last turn, and `answer` the number of the last message of the agent. `input_bytes` and
    `deferred_bytes` are the bytes of the inputs that are not read to their end, and of `deferred`."""

    status: SessionStatus
    last_active_at: int
    events: int = 0
    items: int = 0
    actions: int = 0
    input_first: int = 0
    input_next: int = 0
    kept_inputs: int = 0
    input_bytes: int = 0
    deferred_bytes: int = 0
    turn: ActiveTurn | None = None
    deferred: list[Json] = []
    usage: TokenSums | None = None
    error: str | None = None
    message_end: int = 0
    last_turn: TurnStatus | None = None
    answer: int | None = None
    subagents: dict[str, Subagent] = {}


class TurnRecord(msgspec.Struct, omit_defaults=True):
    """A turn; its items are those from `first_item` to `end_item`, None while it has not ended. `first_event` is the
    number of its first event."""

    status: TurnStatus
    created_at: int
    first_item: int
    started_at: int | None = None
    completed_at: int | None = None
    end_item: int | None = None
    error: Json | None = None
    usage: TokenSums | None = None
    cache_ttl: str | None = None
    first_event: int | None = None


@dataclass(frozen=True, slots=True)
class SessionRef:
    """The tenant and id of a session, or of a subagent of it, and the keys of its records."""

    tenant: str
    id: str
    subagent_id: str = ""

    @classmethod
    def parse(cls, tenant: str, name: str) -> "SessionRef":
        """Return the ref of that name."""
        session_id, _, subagent_id = name.partition(".")
        return cls(tenant, session_id, subagent_id)

    @property
    def name(self) -> str:
        """The part of keys that stands for the session, or for the subagent."""
        return f"{self.id}.{self.subagent_id}" if self.subagent_id else self.id

    def subagent(self, subagent_id: str) -> "SessionRef":
        """Return the ref of a subagent of the session."""
        return SessionRef(self.tenant, self.id, subagent_id)

    @property
    def session_key(self) -> str:
        if self.subagent_id:
            return f"{self.subagent_prefix}{self.subagent_id}"
        return f"{self.tenant}/agent_session/{self.id}"

    @property
    def subagent_prefix(self) -> str:
        return f"{self.tenant}/agent_subagent/{self.id}/"

    @property
    def state_key(self) -> str:
        return f"{self.tenant}/agent_session_state/{self.name}"

    @property
    def end_key(self) -> str:
        return f"{self.tenant}/agent_session_end/{self.id}"

    @property
    def job_key(self) -> str:
        return f"{TURN_PREFIX}{self.tenant}/{self.name}"

    @property
    def lease_key(self) -> str:
        return f"/agent_turn_lease/{self.tenant}/{self.name}"

    @property
    def event_prefix(self) -> str:
        return f"{self.tenant}/agent_event/{self.id}/"

    def prefix(self, kind: str) -> str:
        """Return the prefix of the keys of one kind of parts."""
        return f"{self.tenant}/agent_{kind}/{self.name}/"

    def turn_key(self, turn_id: str) -> str:
        return f"{self.prefix('turn')}{record_id(turn_id)}"

    def item_key(self, number: int) -> str:
        return f"{self.prefix('item')}{number:010d}"

    def item_number_key(self, item_id: str) -> str:
        return f"{self.prefix('item_number')}{record_id(item_id)}"

    def input_key(self, number: int) -> str:
        return f"{self.prefix('input')}{number:010d}"

    def kept_key(self, number: int) -> str:
        return f"{self.prefix('kept')}{number:010d}"

    def action_key(self, number: int) -> str:
        return f"{self.prefix('action')}{number:010d}"


PART_KINDS: Final = ("turn", "item", "item_number", "input", "kept", "action", "artifact", "output")
"""Kinds of keys below a session, and below a subagent."""


def once_key(tenant: str, name: str) -> str:
    """Return the key that is present once a request with an Idempotency-Key has been written."""
    return f"{tenant}/agent_once/{name}"
