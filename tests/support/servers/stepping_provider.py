"""A scripted model and a search for servers that are processes of their own, which import nothing else of the tests."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from pydantic import TypeAdapter

from apis.chat import ChatRequest
from apis.deltas import DeltaBatch
from apis.provider import Provider
from apis.tool_runtime import Source, ToolCall, ToolResult, ToolRuntime, ToolSpec
from providers.inference.scripted import AnyScriptLine, Scripted

PLAYS: dict[str, list[list[dict[str, Any]]]] = {
    "search": [
        [{"reasoning": ["hm "] * 5}, {"call": "web_search", "arguments": '{"query": "slow"}'}],
        [
            {"wait_s": 0.3},
            {"calls": [{"call": "web_search", "arguments": f'{{"query": "{query}"}}'} for query in ("a", "lazy")]},
        ],
        [{"wait_s": 1}, {"text": ["found "] * 20}, {"wait_s": 0.5}, {"text": "it"}],
    ]
}
PLAYS["meet"] = PLAYS["search"][1:]
PLAYS["wait"] = [[{"call": "web_search", "arguments": '{"query": "a"}'}], [{"wait_s": 2}, {"text": ["found "] * 20}]]
PLAYS["get"] = [[{"text": "one"}, {"wait_s": 0.2}, {"call": "get", "arguments": "{}"}], [{"text": "two"}]]
PLAYS["note"] = [[{"wait_s": 0.2}, {"call": "real__note", "arguments": '{"text": "a"}'}], [{"text": "two"}]]
PLAYS["tell"] = [*PLAYS["wait"][:1], [{"text": ["found "] * 20}, {"wait_s": 2}, {"text": "it"}]]
"""By the first word of the input, whichever process plays it: the turn that follows on as many answers of its own, and
the last one after more of them."""


class Stepping(Scripted):
    """Plays its own turns, and PLAYS where they are asked for."""

    async def chat(self, request: ChatRequest) -> AsyncGenerator[DeltaBatch]:
        model: Scripted = super()
        if play := PLAYS.get(str(request.messages[0].content).partition(" ")[0]):
            turn = play[min(sum(message.role == "assistant" for message in request.messages), len(play) - 1)]
            model = Scripted(Scripted.Config(turns=[TypeAdapter(list[AnyScriptLine]).validate_python(turn)]))
        async with aclosing(model.chat(request)) as steps:
            async for step in steps:
                yield step


class Search(ToolRuntime):
    """Finds a page for every query, and takes `slow_s` for some."""

    class Config(Provider.Config):
        slow_s: float = 0.5

    def __init__(self, config: Config) -> None:
        self._slow_s = config.slow_s

    def tools(self) -> Sequence[ToolSpec]:
        return [ToolSpec("search", "Searches.", {"type": "object", "properties": {"query": {"type": "string"}}})]

    async def call(self, call: ToolCall) -> ToolResult:
        query: str = call.arguments["query"]
        if query in ("slow", "lazy"):
            await asyncio.sleep(self._slow_s)
        return ToolResult("", [Source(f"https://example.com/{query}", query, f"About {query}.")])
