"""A model for conversations of any length: it calls one tool in each turn, and then says something. It embeds too."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

from apis.chat import ChatRequest
from apis.deltas import DeltaBatch
from providers.inference.scripted import AnyScriptLine, CallTool, Say, Scripted
from tests.support.sdk.file_search_stack import Filing

_SUMMARY_PROMPT: Final = "Stop here and sum up"


class Tireless(Filing):
    """Answers a message with `call`, the result of that with words, and the wish for a summary with a summary."""

    class Config(Filing.Config):
        call: CallTool

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._call = config.call
        self._number = 0

    async def chat(self, request: ChatRequest) -> AsyncGenerator[DeltaBatch]:
        last = request.messages[-1]
        turn: list[AnyScriptLine] = [Say(text="word " * 30)]
        if str(last.content).startswith(_SUMMARY_PROMPT):
            turn = [Say(text="They went on.")]
        elif last.role == "user" and request.tools and str(last.content) == "call":
            self._number += 1
            turn = [self._call.model_copy(update={"id": f"call_{self._number}"})]
        async with aclosing(Scripted(Scripted.Config(turns=[turn])).chat(request)) as steps:
            async for step in steps:
                yield step
