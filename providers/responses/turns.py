"""The inner loop: the model answers, the server runs its own tools, the model goes on, until it wants no more here."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Final, Literal

from openai.types.responses import ResponseOutputItemDoneEvent, ResponseStreamEvent

from apis.errors import UpstreamError
from apis.inference import ChatRequest, Finish, FunctionTool, Inference, Usage
from apis.tool_runtime import Source
from providers.responses.conversation import Conversation
from providers.responses.envelope import add_usage
from providers.responses.history import items_to_json
from providers.responses.hosted.call import HostedCall, HostedTool, Told
from providers.responses.turn import Output, Turn

Events = Sequence[ResponseStreamEvent]
_MAX_REPEATS: Final = 5
_REASONS: Final[Mapping[str, Literal["max_output_tokens", "content_filter"]]] = {
    "length": "max_output_tokens",
    "content_filter": "content_filter",
}


class Turns:
    """The turns of one response. `usage`, `told` and `reason` are right whenever `run` is not running."""

    def __init__(
        self,
        inference: Inference,
        chat: ChatRequest,
        conversation: Conversation,
        output: Output,
        hosted: Mapping[str, HostedTool],
        max_tool_calls: int,
    ) -> None:
        self.usage = Usage()
        self.told: dict[str, Told] = {}
        self.reason: Literal["max_output_tokens", "content_filter"] | None = None
        self._inference = inference
        self.chat = chat
        self._conversation = conversation
        self._output = output
        self._hosted = hosted
        self._calls_left = max_tool_calls
        self._asked: list[tuple[str, str]] = []
        self._turn: Turn | None = None

    async def run(self) -> AsyncGenerator[Events]:
        """The events of all turns, as batches that became ready together."""
        chat: ChatRequest | None = self.chat
        for told in self._conversation.told.values():
            self._output.sources.update(told.sources)
        while chat is not None:
            self._turn = turn = Turn(self._output, self._hosted)
            async with aclosing(self._inference.chat(chat)) as steps:
                async for step in steps:
                    if events := turn.feed(step):
                        yield events
            if turn.finish is None:
                raise UpstreamError("The inference server ended its answer without saying why.")
            self.usage = add_usage(self.usage, turn.finish.usage)
            for call in turn.hosted.values():
                async with aclosing(self._run(call)) as batches:
                    async for events in batches:
                        yield events
            chat = self._next(turn, turn.finish)

    def break_off(self) -> Events:
        """The events that close what is open when the response ends before its end."""
        return self._turn.break_off() if self._turn is not None else ()

    async def _run(self, call: HostedCall) -> AsyncGenerator[Events]:
        if self._calls_left > 0:
            self._calls_left -= 1
            sources: Mapping[int, Source] = self._output.sources
            async with aclosing(call.run(sources)) as batches:
                async for events in batches:
                    self._take(events)
                    yield events
        else:
            events = call.refuse("Not run: no more tool calls are allowed in this response. Answer with what you have.")
            self._take(events)
            yield events
        assert call.told is not None  # run and refuse both tell
        self.told[call.id] = call.told
        self._conversation.told[call.id] = call.told
        self._output.sources.update(call.told.sources)
        self._asked.append((call.told.name, call.told.arguments))

    def _take(self, events: Events) -> None:
        for event in events:
            if isinstance(event, ResponseOutputItemDoneEvent):
                self._output.items[event.output_index] = event.item

    def _next(self, turn: Turn, finish: Finish) -> ChatRequest | None:
        """The chat of the next turn; None when the response is at its end."""
        self.reason = _REASONS.get(finish.reason)
        if self.reason or not turn.hosted or turn.calls:
            return None
        budget = self.chat.max_completion_tokens
        left = None if budget is None else budget - self.usage.output_tokens
        if left is not None and left <= 0:
            self.reason = "max_output_tokens"
            return None
        tools = self.chat.tools
        if self._calls_left <= 0 or self._repeats():
            own = [t for t in tools or () if not (isinstance(t, FunctionTool) and t.name in self._hosted)]
            tools = own or None
        # a forced choice has been obeyed by now, and would never let the model answer
        return self.chat.model_copy(
            update={
                "messages": self._conversation.messages(items_to_json(self._output.finished())),
                "tools": tools,
                "tool_choice": None if tools is None else "auto",
                "max_completion_tokens": left,
            }
        )

    def _repeats(self) -> bool:
        """Whether the model has made one and the same call over and over."""
        last = self._asked[-_MAX_REPEATS:]
        return len(last) == _MAX_REPEATS and len(set(last)) == 1
