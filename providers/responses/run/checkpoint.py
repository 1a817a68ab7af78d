"""Checkpoints of a background response: the states from which another worker can resume it, stored next to its log.

    TENANT/step/ID/NUMBER        the state after some number of events; NUMBER counts checkpoints from 0

A checkpoint is stored before each turn of the model, and before and between hosted calls. Calls that were running when
their worker died are not repeated, because they may have had their effect: their items fail, and the model reads that
the outcome is unknown. A turn of the model with events in the log is not continued, and only repeated where these
events have had no reader (`event_log.py`).
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import orjson
from openai.types.responses import ResponseOutputItem
from pydantic import TypeAdapter

from apis.deltas import Usage, estimate_tokens
from apis.events import LoggedEvent
from apis.moderation import ModerationScores
from apis.storage.kv_store import KVStore
from apis.storage.records import scan_all
from apis.wire.items import Item, output_to_input
from providers.responses.events.ids import item_number
from providers.responses.events.tool_result import ToolResultRecord
from providers.responses.run.unfinished_log import close_log
from providers.responses.store.history_cache import TurnPosition
from providers.responses.tools.call import HostedCall

LOST_CALL_MESSAGE: Final = (
    "The server that ran this tool stopped before it was done. Nobody knows whether it did what it was to do, nor with "
    "what result."
)
_PAGE_SIZE: Final = 64


class Checkpoint(
    msgspec.Struct,
):
    """State of a running response before the model's turn `turn`: the one that AgentLoop holds, and the one that is
    stored.

    A stored one holds only the `tool_results` since the checkpoint before it, and in `running_indexes` the output
    indexes of calls that were running. `calls_left` and `token_budget` are what hosted calls and the model may still
    use in all; `requested_calls` are the newest hosted calls, as name and arguments; `rejected_calls` were not run,
    each with the length of the output at that time. `unmet_demands` counts turns in a row without a call that
    `tool_choice` requires. `event_count` is how many events came before it. `judged_output` are the scores of the
    output so far, of a response whose output is moderated.
    """

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
    judged_output: ModerationScores | None = None


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Point at which another worker resumes a response. `checkpoint` is the state to start from, with all results of
    hosted calls; `input_items` are the `output_items` in their incoming form; `closing_events` end the items that were
    open; the next event has `next_sequence_number`, and `item_id_count` item ids are in use."""

    checkpoint: Checkpoint
    output_items: Sequence[ResponseOutputItem]
    input_items: Sequence[Item]
    closing_events: Sequence[dict[str, Any]]
    next_sequence_number: int
    item_id_count: int


@dataclass(frozen=True, slots=True)
class AcceptedResponse:
    """A response that was accepted at `created_at`, as a worker finds it: with the scores of its input, if that was
    moderated, the point to resume from, if another worker has begun it, and the position of the turn before it, which
    is kept also where its response was deleted."""

    created_at: int
    judged_input: ModerationScores | None = None
    resume_point: ResumePoint | None = None
    previous: TurnPosition | None = None


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Checkpoint).decode


def checkpoint_key(tenant: str, response_id: str, index: int) -> str:
    """Return the key of a checkpoint; `index` counts the checkpoints of the response from 0."""
    return f"{tenant}/step/{response_id}/{index:08d}"


def encode_checkpoint(checkpoint: Checkpoint) -> bytes:
    return _encode(checkpoint)


async def load_checkpoints(kv: KVStore, tenant: str, response_id: str) -> list[Checkpoint]:
    """Return all checkpoints of a response, oldest first. Raises ValueError where one cannot be decoded."""
    rows = scan_all(kv, checkpoint_key(tenant, response_id, 0)[:-8], page_size=_PAGE_SIZE)
    try:
        return [_decode(entry.value) async for _, entry in rows]
    except msgspec.MsgspecError as exc:
        raise ValueError(f"the steps of {response_id} cannot be read") from exc


def collect_tool_results(checkpoints: Sequence[Checkpoint]) -> dict[str, ToolResultRecord]:
    """Return the results of all hosted calls, by item id."""
    return {item_id: result for checkpoint in checkpoints for item_id, result in checkpoint.tool_results.items()}


def usage_from_log(log: Sequence[LoggedEvent], checkpoints: Sequence[Checkpoint]) -> Usage:
    """Return the usage of a response up to its last checkpoint, and an estimate of the output in the log after that."""
    usage, events = (checkpoints[-1].usage, checkpoints[-1].event_count) if checkpoints else (Usage(), 0)
    deltas = [event for event in log[events:] if event.type.endswith(".delta")]
    texts = [orjson.loads(event.data).get("delta") for event in deltas]
    chars = sum(len(text) for text in texts if isinstance(text, str))
    return usage.plus(Usage(output_tokens=estimate_tokens(len(deltas), chars)))


def find_resume_point(log: Sequence[LoggedEvent], checkpoints: Sequence[Checkpoint]) -> ResumePoint | None:
    """Return the point to resume from; None where the log holds events of a turn that did not end."""
    if not checkpoints:
        return None
    last = checkpoints[-1]
    later_indexes = {orjson.loads(event.data).get("output_index") for event in log[last.event_count :]}
    if last.running_indexes:  # the next turn has a checkpoint before it: items added since are of the running calls
        item_count = sum(event.type == "response.output_item.added" for event in log[: last.event_count])
        later_indexes = {index for index in later_indexes if index is None or index < item_count}
    if not later_indexes <= {*last.running_indexes}:
        return None
    closed = close_log(log, "failed", LOST_CALL_MESSAGE)
    output_items = _output_items_adapter().validate_python(closed.items)
    return ResumePoint(
        msgspec.structs.replace(last, tool_results=collect_tool_results(checkpoints), running_indexes=[]),
        output_items,
        output_to_input(output_items),
        closed.closing_events,
        closed.next_sequence_number,
        item_id_count=1 + max((item_number(item["id"]) for item in closed.items), default=-1),
    )


@functools.cache
def _output_items_adapter() -> TypeAdapter[list[ResponseOutputItem]]:
    return TypeAdapter(list[ResponseOutputItem])  # slow to build, and most workers never need it


def lost_call_result(call: HostedCall, turn: int) -> ToolResultRecord:
    """Return the result that the model reads of a call that was running when its worker stopped."""
    return ToolResultRecord(call.call_id, call.name, call.text, LOST_CALL_MESSAGE, custom=call.is_custom, turn=turn)
