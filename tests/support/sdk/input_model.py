"""A model that plays what its newest user message says: one stack then serves many tests."""

import json
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing

from pydantic import TypeAdapter

from apis.chat import ChatRequest, TextPart
from apis.deltas import DeltaBatch
from providers.inference.scripted import AnyScriptLine, Scripted
from tests.support.sdk.answer_shapes import Script

MODEL = {"provider": "tests.support.sdk.input_model:Inputs"}
_SUBAGENT = re.compile("subagent_[0-9a-f]{30,}")
_TURNS = TypeAdapter(list[list[AnyScriptLine]])


def play(*turns: Script) -> str:
    """The input of a request whose turns are these, and then one that says that it is done."""
    return json.dumps([*turns, [{"text": "Done."}]])


class Inputs(Scripted):
    """Plays the turn of the newest user message that follows on as many answers to it. In it, `$0` is the id of the
    first subagent that a result names."""

    class Config(Scripted.Config):
        pass

    async def chat(self, request: ChatRequest) -> AsyncGenerator[DeltaBatch]:
        self.requests.append(request)
        start = max(index for index, message in enumerate(request.messages) if message.role == "user")
        content = request.messages[start].content or ""
        texts = (
            [part.text for part in content if isinstance(part, TextPart)] if isinstance(content, list) else [content]
        )
        text = "".join(texts)
        for number, subagent_id in enumerate(dict.fromkeys(_SUBAGENT.findall(str(request.messages)))):
            text = text.replace(f"${number}", subagent_id)
        turns = _TURNS.validate_json(text)
        turn = turns[sum(message.role == "assistant" for message in request.messages[start:])]
        async with aclosing(Scripted(Scripted.Config(turns=[turn])).chat(request)) as steps:
            async for step in steps:
                yield step
