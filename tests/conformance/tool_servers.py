"""The promises of ToolServers: run each of `LAWS` over a `Subject` with the client under test."""

import asyncio
import dataclasses
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from apis.tool_servers import InvalidDeclaration, ServerTool, ToolServerFailed, ToolServers
from apis.wire.tools import McpTool

NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
MAX_RESULT_BYTES = 1024 * 1024
PATIENCE_S = 10
UNKNOWN = McpTool.model_validate({"type": "mcp", "server_label": "no_such_server"})


@dataclass(frozen=True)
class Subject:
    """A started client, a declared server whose tool `name` takes these arguments and whose tool `endless` never ends;
    `reached` is set when the server runs that one, and `dropped` when it was given up."""

    servers: ToolServers
    declaration: McpTool
    name: str
    arguments: Mapping[str, Any]
    endless: str
    reached: asyncio.Event
    dropped: asyncio.Event

    async def list_tools(self, **fields: Any) -> Mapping[str, ServerTool]:
        declaration = self.declaration.model_copy(update=fields)
        return {tool.name: tool for tool in await self.servers.list_tools(declaration, tenant="t")}

    async def call_good(self) -> str:
        return await self.servers.call_tool(self.declaration, self.name, self.arguments, tenant="t")

    async def call_endless(self) -> str:
        return await self.servers.call_tool(self.declaration, self.endless, {}, tenant="t")

    async def assert_fails(self, name: str, arguments: Mapping[str, Any], **fields: Any) -> None:
        listed_tool: ServerTool | None = fields.pop("listed_tool", None)
        declaration = self.declaration.model_copy(update=fields)
        await _fails_in_words(self.servers.call_tool(declaration, name, arguments, tenant="t", listed_tool=listed_tool))


async def its_tools_can_be_offered_to_a_model(subject: Subject) -> None:
    listing = await subject.servers.list_tools(subject.declaration, tenant="t")
    assert len({tool.name for tool in listing}) == len(listing) > 0
    for tool in listing:
        assert NAME.fullmatch(tool.name)
        assert len(tool.description.encode()) <= 4096
        assert not tool.description or tool.description.isprintable()
        assert tool.input_schema["type"] == "object"
        fields = dataclasses.asdict(tool)
        assert json.loads(json.dumps(fields)) == fields


async def its_tools_stay_the_same(subject: Subject) -> None:
    before = await subject.list_tools()
    await subject.call_good()
    assert await subject.list_tools() == before


async def a_result_is_bounded_text_that_can_be_stored(subject: Subject) -> None:
    text = await subject.call_good()
    assert 0 < len(text.encode()) <= MAX_RESULT_BYTES
    assert "\0" not in text


async def calls_may_run_at_once(subject: Subject) -> None:
    results = await asyncio.gather(*(subject.call_good() for _ in range(8)))
    assert len(set(results)) == 1


async def an_unknown_server_is_an_invalid_declaration(subject: Subject) -> None:
    await subject.servers.check_declaration(subject.declaration, tenant="t")
    with pytest.raises(InvalidDeclaration) as refusal:
        await subject.servers.check_declaration(UNKNOWN, tenant="t")
    assert refusal.value.field_name in McpTool.model_fields
    await _fails_in_words(subject.servers.list_tools(UNKNOWN, tenant="t"))
    await _fails_in_words(subject.servers.call_tool(UNKNOWN, subject.name, subject.arguments, tenant="t"))


async def an_unknown_tool_fails_in_words(subject: Subject) -> None:
    for name in ("no_such_tool", "", "\ud800", "x" * 10_000):
        await subject.assert_fails(name, subject.arguments)


async def a_tool_that_is_not_allowed_is_neither_listed_nor_called(subject: Subject) -> None:
    assert set(await subject.list_tools(allowed_tools=[subject.endless])) == {subject.endless}
    assert subject.name in await subject.list_tools(allowed_tools=[subject.name])
    await subject.assert_fails(subject.name, subject.arguments, allowed_tools=[subject.endless])
    await subject.assert_fails(subject.name, subject.arguments, allowed_tools=[])


async def a_tool_that_has_changed_is_not_called(subject: Subject) -> None:
    listed_tool = (await subject.list_tools())[subject.name]
    changed = dataclasses.replace(listed_tool, description=f"{listed_tool.description} Or not.")
    await subject.assert_fails(subject.name, subject.arguments, listed_tool=changed)
    await subject.servers.call_tool(
        subject.declaration, subject.name, subject.arguments, tenant="t", listed_tool=listed_tool
    )


async def missing_arguments_and_those_of_a_wrong_type_fail_in_words(subject: Subject) -> None:
    before = await subject.call_good()
    await subject.assert_fails(subject.name, {})
    for argument in subject.arguments:
        for wrong in (None, ["a"], {"a": 1}):
            await subject.assert_fails(subject.name, {**subject.arguments, argument: wrong})
    assert await subject.call_good() == before


async def arguments_that_are_no_json_fail_in_words(subject: Subject) -> None:
    for wrong in (float("nan"), {1, 2}, "\ud800", "x" * 2 * 1024 * 1024):
        await subject.assert_fails(subject.name, {**subject.arguments, "more": wrong})


async def a_call_leaves_its_arguments_as_they_were(subject: Subject) -> None:
    before = json.dumps(dict(subject.arguments))
    await subject.call_good()
    assert json.dumps(dict(subject.arguments)) == before


async def an_endless_call_holds_up_no_other(subject: Subject) -> None:
    endless = asyncio.ensure_future(subject.call_endless())
    async with asyncio.timeout(PATIENCE_S):
        await subject.reached.wait()
        await subject.call_good()
        assert not endless.done()
        endless.cancel()
        with pytest.raises(asyncio.CancelledError):
            await endless


async def cancelling_a_call_stops_its_work(subject: Subject) -> None:
    call = asyncio.ensure_future(subject.call_endless())
    async with asyncio.timeout(PATIENCE_S):
        await subject.reached.wait()
        assert not subject.dropped.is_set()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await subject.dropped.wait()
    await subject.call_good()


async def an_endless_call_ends_in_words(subject: Subject) -> None:
    await _fails_in_words(subject.call_endless())
    async with asyncio.timeout(PATIENCE_S):
        await subject.dropped.wait()


async def it_can_be_closed_twice(subject: Subject) -> None:
    await subject.call_good()
    await subject.servers.close()
    await subject.servers.close()


LAWS: tuple[Callable[[Subject], Awaitable[None]], ...] = (
    its_tools_can_be_offered_to_a_model,
    its_tools_stay_the_same,
    a_result_is_bounded_text_that_can_be_stored,
    calls_may_run_at_once,
    an_unknown_server_is_an_invalid_declaration,
    an_unknown_tool_fails_in_words,
    a_tool_that_is_not_allowed_is_neither_listed_nor_called,
    a_tool_that_has_changed_is_not_called,
    missing_arguments_and_those_of_a_wrong_type_fail_in_words,
    arguments_that_are_no_json_fail_in_words,
    a_call_leaves_its_arguments_as_they_were,
    an_endless_call_holds_up_no_other,
    cancelling_a_call_stops_its_work,
    an_endless_call_ends_in_words,
    it_can_be_closed_twice,
)


async def _fails_in_words(call: Awaitable[Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(ToolServerFailed) as failure:
            await call
    assert 0 < len(failure.value.message.encode()) <= 1024
    assert failure.value.message.isprintable()
