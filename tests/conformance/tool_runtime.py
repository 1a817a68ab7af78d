"""The laws of every ToolRuntime: run each of `LAWS` over a `Subject` made of the runtime under test."""

import asyncio
import dataclasses
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest

from apis.errors import ToolFailed
from apis.tool_runtime import ToolCall, ToolRuntime

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
MAX_RESULT_BYTES = 1024 * 1024
PATIENCE_S = 10


@dataclass(frozen=True)
class Subject:
    """A started runtime, a call that it can run, one that never ends, and how the world sees that it was given up."""

    runtime: ToolRuntime
    good: ToolCall
    endless: ToolCall
    reached: asyncio.Event
    dropped: asyncio.Event


async def its_tools_can_be_described_to_a_model(subject: Subject) -> None:
    tools = subject.runtime.tools()
    assert tools
    assert len({tool.name for tool in tools}) == len(tools)
    for tool in tools:
        assert NAME.fullmatch(tool.name)
        assert 0 < len(tool.description.encode()) <= 4096
        assert tool.description.isprintable()
        assert tool.parameters["type"] == "object"
        assert set(tool.parameters.get("required", ())) <= set(tool.parameters.get("properties", {}))
        assert json.loads(json.dumps(tool.parameters)) == tool.parameters


async def its_tools_stay_the_same(subject: Subject) -> None:
    before = list(subject.runtime.tools())
    await subject.runtime.call(subject.good)
    assert list(subject.runtime.tools()) == before


async def a_result_is_bounded_text_that_can_be_stored(subject: Subject) -> None:
    result = await subject.runtime.call(subject.good)
    assert 0 < len(result.text.encode()) <= MAX_RESULT_BYTES
    assert "\0" not in result.text
    assert sum(len(source.text.encode()) for source in result.sources) <= MAX_RESULT_BYTES
    assert len({file.name for file in result.files}) == len(result.files)
    for source in result.sources:
        assert re.match(r"https?://[^\s/]+", source.url)
        assert source.title
        json.dumps([source.url, source.title, source.text]).encode()


async def calls_may_run_at_once(subject: Subject) -> None:
    results = await asyncio.gather(*(subject.runtime.call(subject.good) for _ in range(8)))
    assert all(result == results[0] for result in results)


async def a_tool_it_has_not_fails_in_words(subject: Subject) -> None:
    for name in ("no_such_tool", "", "\ud800", "x" * 10_000):
        await _fails_in_words(subject, dataclasses.replace(subject.good, name=name))


async def missing_and_unknown_arguments_fail_in_words(subject: Subject) -> None:
    by_name = {tool.name: tool for tool in subject.runtime.tools()}
    if by_name[subject.good.name].parameters.get("required"):
        await _fails_in_words(subject, dataclasses.replace(subject.good, arguments={}))
    extra = {**subject.good.arguments, "no_such_argument": "x" * 10_000}
    await _fails_in_words(subject, dataclasses.replace(subject.good, arguments=extra))


async def arguments_of_a_wrong_type_fail_in_words(subject: Subject) -> None:
    for name in subject.good.arguments:
        for wrong in (None, ["a"], {"a": 1}):
            arguments = {**subject.good.arguments, name: wrong}
            await _fails_in_words(subject, dataclasses.replace(subject.good, arguments=arguments))


async def a_failure_leaves_it_usable(subject: Subject) -> None:
    before = await subject.runtime.call(subject.good)
    await _fails_in_words(subject, dataclasses.replace(subject.good, arguments={"no_such_argument": 1}))
    assert await subject.runtime.call(subject.good) == before


async def options_that_are_none_of_its_own_change_nothing(subject: Subject) -> None:
    options = {**subject.good.options, "no_such_option": "x" * 10_000}
    before = await subject.runtime.call(subject.good)
    assert await subject.runtime.call(dataclasses.replace(subject.good, options=options)) == before


async def a_call_leaves_what_it_was_given_as_it_was(subject: Subject) -> None:
    arguments, options = json.dumps(dict(subject.good.arguments)), json.dumps(dict(subject.good.options))
    await subject.runtime.call(subject.good)
    assert (arguments, options) == (json.dumps(dict(subject.good.arguments)), json.dumps(dict(subject.good.options)))


async def an_endless_call_holds_up_no_other(subject: Subject) -> None:
    endless = asyncio.ensure_future(subject.runtime.call(subject.endless))
    async with asyncio.timeout(PATIENCE_S):
        await subject.reached.wait()
        await subject.runtime.call(subject.good)
        assert not endless.done()
        endless.cancel()
        with pytest.raises(asyncio.CancelledError):
            await endless


async def cancelling_a_call_stops_its_work(subject: Subject) -> None:
    call = asyncio.ensure_future(subject.runtime.call(subject.endless))
    async with asyncio.timeout(PATIENCE_S):
        await subject.reached.wait()
        assert not subject.dropped.is_set()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await subject.dropped.wait()
    await subject.runtime.call(subject.good)


async def an_endless_call_ends_in_words(subject: Subject) -> None:
    await _fails_in_words(subject, subject.endless)
    async with asyncio.timeout(PATIENCE_S):
        await subject.dropped.wait()


async def it_can_be_closed_twice(subject: Subject) -> None:
    await subject.runtime.close()
    await subject.runtime.close()


LAWS: tuple[Callable[[Subject], Awaitable[None]], ...] = (
    its_tools_can_be_described_to_a_model,
    its_tools_stay_the_same,
    a_result_is_bounded_text_that_can_be_stored,
    calls_may_run_at_once,
    a_tool_it_has_not_fails_in_words,
    missing_and_unknown_arguments_fail_in_words,
    arguments_of_a_wrong_type_fail_in_words,
    a_failure_leaves_it_usable,
    options_that_are_none_of_its_own_change_nothing,
    a_call_leaves_what_it_was_given_as_it_was,
    an_endless_call_holds_up_no_other,
    cancelling_a_call_stops_its_work,
    an_endless_call_ends_in_words,
    it_can_be_closed_twice,
)


async def _fails_in_words(subject: Subject, call: ToolCall) -> None:
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(ToolFailed) as failure:
            await subject.runtime.call(call)
    assert 0 < len(failure.value.message.encode()) <= 1024
    assert failure.value.message.isprintable()
