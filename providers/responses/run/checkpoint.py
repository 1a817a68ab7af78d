"""Steps: where the turns of a background response can be gone on from by another worker. They are kept beside its log.

    TENANT/step/ID/NUMBER        how things stood after so many events; the next one tells what came after it

A step is noted before each turn of the model, and before and between the calls that run here. A worker that dies while
calls run leaves them broken off: their items fail, and the model is told that nobody knows what became of them. They
are not made again, for they may have done what they do. A turn of the model's that has told anything is neither made
again nor gone on with: what was told is not taken back, and only an item that fails can stand unfinished before others.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
import orjson
from openai.types.responses import ResponseOutputItem
from pydantic import TypeAdapter

from apis.deltas import Usage
from apis.events import LoggedEvent
from apis.storage.kv_store import KVStore
from apis.storage.records import scan_all
from apis.wire.items import Item
from providers.responses.context.conversation import Conversation
from providers.responses.events.ids import item_number
from providers.responses.events.response_object import add_usage
from providers.responses.events.tool_result import ToolResultRecord
from providers.responses.run.unfinished_log import close_log
from providers.responses.store.history import ITEM_LIST_ADAPTER, items_to_json
from providers.responses.tools.call import HostedCall

LOST_CALL_MESSAGE: Final = (
    "The server that ran this tool stopped before it was done. Nobody knows whether it did what it was to do, nor with "
    "what result."
)
_PAGE_SIZE: Final = 64


class Checkpoint(
    msgspec.Struct,
    rename={
        "token_budget": "budget",
        "tool_results": "told",
        "running_indexes": "running",
        "requested_calls": "asked",
        "rejected_calls": "rejected",
        "rejected_turn_count": "rejected_turns",
        "unmet_demands": "unmet",
        "event_count": "events",
    },
):
    """How things stand before the model's turn `turn`. `told` is what hosted calls gave since the step before; those
    at the indexes `running` had not ended, and will not. `unmet`, the model was asked in vain for a call that is
    demanded. `events` are those before it."""

    turn: int
    usage: Usage
    token_budget: int | None
    tool_results: dict[str, ToolResultRecord]
    running_indexes: list[int]
    calls_left: int
    requested_calls: list[tuple[str, str]]
    rejected_calls: list[tuple[int, ToolResultRecord]]
    rejected_turn_count: int
    unmet_demands: int = 0
    event_count: int = 0


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """What a response has put out, finished by `closing`, and where it goes on: the number of the next event, and how
    many item ids there are."""

    checkpoint: Checkpoint
    tool_results: Mapping[str, ToolResultRecord]
    output_items: Sequence[ResponseOutputItem]
    closing_events: Sequence[dict[str, Any]]
    next_sequence_number: int
    item_id_count: int

    def extend_conversation(self, conversation: Conversation) -> Conversation:
        """The conversation as its tools are to see it: with all this in it. What they told becomes part of it."""
        conversation.tool_results.update(self.tool_results)
        made: list[Item] = ITEM_LIST_ADAPTER.validate_json(items_to_json(self.output_items))
        return replace(conversation, input_items=[*conversation.input_items, *made])


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Checkpoint).decode


def checkpoint_key(tenant: str, response_id: str, index: int) -> str:
    """Of the step that was noted after so many others."""
    return f"{tenant}/step/{response_id}/{index:08d}"


def encode_checkpoint(checkpoint: Checkpoint) -> bytes:
    return _encode(checkpoint)


async def load_checkpoints(kv: KVStore, tenant: str, response_id: str) -> list[Checkpoint]:
    """All steps of a response. Raises ValueError where they cannot be read."""
    rows = scan_all(kv, checkpoint_key(tenant, response_id, 0)[:-8], page_size=_PAGE_SIZE)
    try:
        return [_decode(entry.value) async for _, entry in rows]
    except msgspec.MsgspecError as exc:
        raise ValueError(f"the steps of {response_id} cannot be read") from exc


def collect_tool_results(checkpoints: Sequence[Checkpoint]) -> dict[str, ToolResultRecord]:
    """What all hosted calls gave."""
    return {identity: told for step in checkpoints for identity, told in step.tool_results.items()}


def usage_from_log(log: Sequence[LoggedEvent], checkpoints: Sequence[Checkpoint]) -> Usage:
    """What a response had used up to its last step; each delta that it told after that counts as a token."""
    usage, events = (checkpoints[-1].usage, checkpoints[-1].event_count) if checkpoints else (Usage(), 0)
    deltas = sum(event.type.endswith(".delta") for event in log[events:])
    return add_usage(usage, Usage(output_tokens=deltas))


def find_resume_point(log: Sequence[LoggedEvent], checkpoints: Sequence[Checkpoint]) -> ResumePoint | None:
    """Where to go on from; None where the log tells of a turn that was not done."""
    if not checkpoints:
        return None
    last = checkpoints[-1]
    told_of = {orjson.loads(event.data).get("output_index") for event in log[last.event_count :]}
    if not told_of <= {*last.running_indexes}:
        return None
    broken = close_log(log, "failed", LOST_CALL_MESSAGE)
    items = _output_items_adapter().validate_python(broken.items)
    minted = 1 + max((item_number(item["id"]) for item in broken.items), default=-1)
    return ResumePoint(
        last, collect_tool_results(checkpoints), items, broken.closing_events, broken.next_sequence_number, minted
    )


@functools.cache
def _output_items_adapter() -> TypeAdapter[list[ResponseOutputItem]]:
    return TypeAdapter(list[ResponseOutputItem])  # takes its time, and most workers never need it


def lost_call_result(call: HostedCall, turn: int) -> ToolResultRecord:
    """What the model is to be told of a call of which nobody knows the end."""
    return ToolResultRecord(call.call_id, call.name, call.text, LOST_CALL_MESSAGE, custom=call.is_custom, turn=turn)
