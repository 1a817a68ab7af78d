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
from apis.wire.items import Item
from providers.responses.context.conversation import Conversation
from providers.responses.events.ids import number_of
from providers.responses.events.response_object import add_usage
from providers.responses.events.tool_result import Told
from providers.responses.run.unfinished_log import close_log
from providers.responses.store.history import ITEMS, items_to_json
from providers.responses.tools.call import HostedCall

LOST: Final = (
    "The server that ran this tool stopped before it was done. Nobody knows whether it did what it was to do, nor with "
    "what result."
)
_PAGE: Final = 64


class Step(msgspec.Struct):
    """How things stand before the model's turn `turn`. `told` is what hosted calls gave since the step before; those
    at the indexes `running` had not ended, and will not. `unmet`, the model was asked in vain for a call that is
    demanded. `events` are those before it."""

    turn: int
    usage: Usage
    budget: int | None
    told: dict[str, Told]
    running: list[int]
    calls_left: int
    asked: list[tuple[str, str]]
    rejected: list[tuple[int, Told]]
    rejected_turns: int
    unmet: int = 0
    events: int = 0


@dataclass(frozen=True, slots=True)
class SoFar:
    """What a response has put out, finished by `closing`, and where it goes on: the number of the next event, and how
    many item ids there are."""

    step: Step
    told: Mapping[str, Told]
    items: Sequence[ResponseOutputItem]
    closing: Sequence[dict[str, Any]]
    number: int
    minted: int

    def seen_after(self, conversation: Conversation) -> Conversation:
        """The conversation as its tools are to see it: with all this in it. What they told becomes part of it."""
        conversation.told.update(self.told)
        made: list[Item] = ITEMS.validate_json(items_to_json(self.items))
        return replace(conversation, given=[*conversation.given, *made])


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Step).decode


def step_key(tenant: str, response_id: str, number: int) -> str:
    """Of the step that was noted after so many others."""
    return f"{tenant}/step/{response_id}/{number:08d}"


def write_step(step: Step) -> bytes:
    return _encode(step)


async def read_steps(kv: KVStore, tenant: str, response_id: str) -> list[Step]:
    """All steps of a response. Raises ValueError where they cannot be read."""
    steps: list[Step] = []
    prefix, after = step_key(tenant, response_id, 0)[:-8], ""
    while rows := await kv.scan(prefix, after=after, limit=_PAGE):
        after = rows[-1][0]
        try:
            steps += [_decode(entry.value) for _, entry in rows]
        except msgspec.MsgspecError as exc:
            raise ValueError(f"the steps up to {after} cannot be read") from exc
    return steps


def told_by(steps: Sequence[Step]) -> dict[str, Told]:
    """What all hosted calls gave."""
    return {identity: told for step in steps for identity, told in step.told.items()}


def used_by(log: Sequence[LoggedEvent], steps: Sequence[Step]) -> Usage:
    """What a response had used up to its last step; each delta that it told after that counts as a token."""
    usage, events = (steps[-1].usage, steps[-1].events) if steps else (Usage(), 0)
    deltas = sum(event.type.endswith(".delta") for event in log[events:])
    return add_usage(usage, Usage(output_tokens=deltas))


def go_on_from(log: Sequence[LoggedEvent], steps: Sequence[Step]) -> SoFar | None:
    """Where to go on from; None where the log tells of a turn that was not done."""
    if not steps:
        return None
    last = steps[-1]
    told_of = {orjson.loads(event.data).get("output_index") for event in log[last.events :]}
    if not told_of <= {*last.running}:
        return None
    broken = close_log(log, "failed", LOST)
    items = _output().validate_python(broken.items)
    minted = 1 + max((number_of(item["id"]) for item in broken.items), default=-1)
    return SoFar(last, told_by(steps), items, broken.closing, broken.number, minted)


@functools.cache
def _output() -> TypeAdapter[list[ResponseOutputItem]]:
    return TypeAdapter(list[ResponseOutputItem])  # takes its time, and most workers never need it


def lost(call: HostedCall, turn: int) -> Told:
    """What the model is to be told of a call of which nobody knows the end."""
    return Told(call.call_id, call.name, call.text, LOST, custom=call.custom, turn=turn)
