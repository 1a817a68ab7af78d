"""Truncating: an Inference that leaves out the oldest turns of a chat that is too long for its model.

A turn is what the user said and all that followed until the user spoke again: a call is never parted from its output,
nor a thought from what it led to. What the system and the developer said always stays, and so does the last turn.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final

from apis.chat import ChatRequest, Message
from apis.deltas import DeltaBatch
from apis.errors import ContextLengthExceeded, StackError
from apis.inference import Inference, Model
from apis.responses import CreateResponse

_INSTRUCTION_ROLES: Final = ("system", "developer")
_MAX_RESERVED_TOKENS: Final = 4096
"""Left for an answer whose length the request does not bound, or an eighth of the context if that is less."""


class TruncatingInference(Inference):
    """Over another Inference, which says what is too long: what fits costs nothing more. Raises as that one does, also
    ContextLengthExceeded where even the last turn is too long."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference

    async def models(self) -> Sequence[Model]:
        return await self._inference.models()

    async def count_tokens(self, request: ChatRequest) -> int:
        return await self._inference.count_tokens(request)

    async def chat(self, request: ChatRequest) -> AsyncGenerator[DeltaBatch]:
        cuts: Sequence[int] | None = None
        dropped, more = 0, 1
        shorter = request
        while True:
            begun = False
            try:
                async with aclosing(self._inference.chat(shorter)) as steps:
                    async for step in steps:
                        begun = True
                        yield step
                return
            except ContextLengthExceeded:
                cuts = find_turn_offsets(request.messages) if cuts is None else cuts
                if begun or dropped >= len(cuts):
                    raise
            if dropped == 0:
                dropped = await self._count_turns_to_drop(request, cuts)
            else:  # the count was no help: each try drops twice as many more
                dropped, more = min(len(cuts), dropped + more), 2 * more
            shorter = drop_messages_before(request, cuts[dropped - 1])

    async def _count_turns_to_drop(self, request: ChatRequest, turn_offsets: Sequence[int]) -> int:
        """How many turns have to go, as far as that can be known beforehand; at least one."""
        try:
            context = next((each.context_tokens for each in await self.models() if each.id == request.model), None)
            if context is None:
                return 1
            room = request.max_completion_tokens or min(_MAX_RESERVED_TOKENS, context // 8)
            low, high = 1, len(turn_offsets)
            while low < high:
                middle = (low + high) // 2
                if await self.count_tokens(drop_messages_before(request, turn_offsets[middle - 1])) + room <= context:
                    high = middle
                else:
                    low = middle + 1
        except StackError:  # nobody says, or counts: it is found by trying
            return 1
        return low


def with_truncation(inference: Inference, request: CreateResponse) -> Inference:
    """What makes the request's chats: it truncates where the request says that it may."""
    return TruncatingInference(inference) if request.truncation == "auto" else inference


def find_turn_offsets(messages: Sequence[Message]) -> list[int]:
    """Where a chat may be cut: the beginnings of its turns, but for the first."""
    cuts: list[int] = []
    before = None
    for at, message in enumerate(messages):
        if message.role in _INSTRUCTION_ROLES:
            continue
        if message.role == "user" and before not in (None, "user"):
            cuts.append(at)
        before = message.role
    return cuts


def drop_messages_before(request: ChatRequest, offset: int) -> ChatRequest:
    """The chat from that message on, and all instructions before it."""
    messages = request.messages
    kept = [message for message in messages[:offset] if message.role in _INSTRUCTION_ROLES]
    return request.model_copy(update={"messages": [*kept, *messages[offset:]]})
