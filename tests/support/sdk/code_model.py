"""A model for the code interpreter: it runs the user's text as code, and answers with the result."""

import json
import os
from collections.abc import AsyncGenerator

from apis.chat import ChatRequest
from apis.deltas import DeltaBatch, Finish, TextDelta, ToolArgumentsDelta, ToolCallStart, Usage
from providers.inference.scripted import Scripted


class Coding(Scripted):
    """Says first which process it is in."""

    class Config(Scripted.Config):
        pass

    async def chat(self, request: ChatRequest) -> AsyncGenerator[DeltaBatch]:
        self.requests.append(request)
        last = request.messages[-1]
        if last.role == "tool":
            yield (TextDelta(f"{os.getpid()} {last.content}"),)
            yield (Finish("stop", Usage(1, 1)),)
        else:
            yield (ToolCallStart("call_1", "python"),)
            yield (ToolArgumentsDelta("call_1", json.dumps({"code": last.content})),)
            yield (Finish("tool_calls", Usage(1, 1)),)
