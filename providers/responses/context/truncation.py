"""TruncatingInference: leaves out the oldest turns of a chat that is too long for its model.

A turn is a message of the user with everything up to the user's next message: a call stays together with its output,
and reasoning with its answer. System and developer messages always stay, and so does the last turn. Where that turn
alone is too long, the oldest images of its calls are left out: a computer sends a screenshot for each of its steps.
"""

from collections.abc import Sequence
from typing import Final

from apis.chat import ChatRequest, ImagePart, Message, TextPart
from apis.deltas import Delta, DeltaBatch
from apis.errors import ContextLengthExceeded, StackError
from apis.sink import ConvertedSink, Sink
from providers.common.wrapped_inference import WrappedInference

_INSTRUCTION_ROLES: Final = ("system", "developer")
_DROPPED_IMAGE: Final = "[An earlier image was left out here.]"
_MAX_RESERVED_TOKENS: Final = 4096
"""Tokens reserved for an answer without a limit in the request; an eighth of the context if that is less."""


class TruncatingInference(WrappedInference):
    """Wraps an Inference, and shortens only those chats that it refuses as too long. Raises like the wrapped one, also
    ContextLengthExceeded where the last turn alone is too long, with one image of its calls."""

    async def stream(self, request: ChatRequest, sink: Sink[Delta]) -> None:
        offsets: Sequence[int] | None = None
        dropped_count, step = 0, 1
        shortened = request
        begun = False

        def begin(batch: DeltaBatch) -> DeltaBatch:
            nonlocal begun
            begun = True
            return batch

        while True:
            try:
                await self._inference.stream(shortened, ConvertedSink(sink, begin))
                return
            except ContextLengthExceeded:
                offsets = find_turn_offsets(request.messages) if offsets is None else offsets
                if begun:
                    raise
                if dropped_count >= len(offsets):
                    image_count = count_call_images(shortened)
                    if image_count < 2:  # the newest one is what the model acts on
                        raise
                    shortened = drop_call_images(shortened, (image_count + 1) // 2)
                    continue
            if dropped_count == 0:
                dropped_count = await self._count_turns_to_drop(request, offsets)
            else:  # the count was too low: each attempt drops twice as many more turns
                dropped_count, step = min(len(offsets), dropped_count + step), 2 * step
            shortened = drop_messages_before(request, offsets[dropped_count - 1])

    async def _count_turns_to_drop(self, request: ChatRequest, turn_offsets: Sequence[int]) -> int:
        """Return how many turns must be dropped, by binary search; 1 where tokens cannot be counted."""
        try:
            models = await self.models()
            context = next((model.context_tokens for model in models if model.id == request.model), None)
            if context is None:
                return 1
            reserved = request.max_completion_tokens or min(_MAX_RESERVED_TOKENS, context // 8)
            low, high = 1, len(turn_offsets)
            while low < high:
                middle = (low + high) // 2
                shortened = drop_messages_before(request, turn_offsets[middle - 1])
                if await self.count_tokens(shortened) + reserved <= context:
                    high = middle
                else:
                    low = middle + 1
        except StackError:  # the server cannot list its models or count: `chat` tries
            return 1
        return low


def find_turn_offsets(messages: Sequence[Message]) -> list[int]:
    """Return the indexes of the messages that begin a turn, except the first turn."""
    offsets: list[int] = []
    previous_role = None
    for index, message in enumerate(messages):
        if message.role in _INSTRUCTION_ROLES:
            continue
        if message.role == "user" and previous_role not in (None, "user"):
            offsets.append(index)
        previous_role = message.role
    return offsets


def count_call_images(request: ChatRequest) -> int:
    """Return how many outputs of calls hold an image."""
    return sum(map(_has_image, request.messages))


def drop_call_images(request: ChatRequest, count: int) -> ChatRequest:
    """Return the chat without the images of the `count` oldest outputs of calls that hold any."""
    messages = [*request.messages]
    for index in [index for index, message in enumerate(messages) if _has_image(message)][:count]:
        parts = [part for part in messages[index].content or () if not isinstance(part, str | ImagePart)]
        messages[index] = messages[index].model_copy(update={"content": [*parts, TextPart(text=_DROPPED_IMAGE)]})
    return request.model_copy(update={"messages": messages})


def _has_image(message: Message) -> bool:
    return (
        message.role == "tool"
        and isinstance(message.content, list)
        and any(isinstance(part, ImagePart) for part in message.content)
    )


def drop_messages_before(request: ChatRequest, offset: int) -> ChatRequest:
    """Return the chat from that message on, with all instructions before it."""
    messages = request.messages
    instructions = [message for message in messages[:offset] if message.role in _INSTRUCTION_ROLES]
    return request.model_copy(update={"messages": [*instructions, *messages[offset:]]})
