"""Background responses whose worker has to leave between two steps: another goes on, and no client notices."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from providers.responses.background import execution
from providers.responses.background.event_log import event_prefix, reader_key
from providers.responses.run.checkpoint import Checkpoint
from tests.support.sdk.answer_shapes import Script, call
from tests.support.sdk.requests import messages, responses
from tests.support.servers.mcp_server import RealServer
from tests.support.servers.mcp_stack import DONE, Json, offered, playing, with_mcp
from tests.support.servers.serving import Served, scripted, serving
from tests.support.waiting import until

ECHO: Script = [{"reasoning": "I ask."}, call("real__echo", '{"text": "hello"}', id="c1")]
STUCK: Script = [{"wait_s": 30}]
MCP: Json = {"type": "mcp", "server_label": "real", "require_approval": "never"}
BACKGROUND: Json = {"background": {"poll_s": 0.05, "lease_s": 5}}


@asynccontextmanager
async def two(
    path: Path, one: list[Script], other: list[Script], *, is_moderated: bool = False
) -> AsyncGenerator[tuple[Served, Served]]:
    """Two stacks on one store, whose models play these turns; what waits, the first one takes. They may be moderated by
    words."""
    moderation = {"provider": "predicates", "model": "scripted"}
    model = {"provider": "tests.support.models.word_judge:WordJudge"} if is_moderated else {}
    real = RealServer()
    async with real.serving(), AsyncExitStack() as stacks:
        served = [
            await stacks.enter_async_context(
                serving(
                    {**playing(*turns), **model},
                    more={"moderation": moderation} if is_moderated else None,
                    tool_servers=with_mcp(real.url, servers={"real": {"url": real.url}}),
                    kv_store={"provider": "sqlite", "path": str(path / "store.db")},
                    responses=BACKGROUND,
                )
            )
            for turns in (one, other)
        ]
        yield served[0], served[1]


async def leave(served: Served, response_id: str, name: str) -> list[Any]:
    """Drain the stack once the response has sent an event of that name; return the events until then."""
    events: list[Any] = []
    async with asyncio.timeout(10):
        async with await responses(served).retrieve(response_id, stream=True) as response:
            async for event in response:
                events.append(event)
                if event.type == name:
                    break
        await served.stack.responses.drain()
    return events


async def whole(served: Served, response_id: str) -> list[Any]:
    async with asyncio.timeout(10):
        return [event async for event in await responses(served).retrieve(response_id, stream=True)]


async def test_what_was_listed_is_not_listed_again(tmp_path: Path) -> None:
    async with two(tmp_path, [STUCK], [ECHO, DONE]) as (one, other):
        queued = await responses(one).create(model="scripted", input="hi", background=True, tools=[MCP])
        before = await leave(one, queued.id, "response.mcp_list_tools.completed")
        events = await whole(other, queued.id)
        assert events[: len(before)] == before
        assert [item.type for item in events[-1].response.output] == [
            "mcp_list_tools",
            "reasoning",
            "mcp_call",
            "message",
        ]
        assert events[-1].response.output[2].output == "hello"


async def test_a_finished_call_is_not_repeated_and_the_model_gets_its_result(tmp_path: Path) -> None:
    async with two(tmp_path, [ECHO, STUCK], [DONE]) as (one, other):
        queued = await responses(one).create(model="scripted", input="hi", background=True, tools=[MCP])
        before = await leave(one, queued.id, "response.mcp_call.completed")
        events = await whole(other, queued.id)
        assert events[: len(before)] == before
        final = events[-1].response
        assert [item.status for item in final.output[1:]] == ["completed"] * 3
        assert final.usage.output_tokens == 4
        _, question, answer = messages(other)
        assert question["reasoning"] == "I ask."
        assert answer == {"role": "tool", "tool_call_id": "c1", "content": "hello"}
        assert "real__echo" in offered(other)
        following = await responses(other).create(model="scripted", input="and", previous_response_id=queued.id)
        assert following.output_text == "Done."
        assert [each["role"] for each in messages(other)] == ["user", "assistant", "tool", "assistant", "user"]


async def test_what_was_judged_is_not_judged_again(tmp_path: Path) -> None:
    killing: Script = [{"text": "I kill it."}, call("real__echo", '{"text": "hello"}', id="c1")]
    async with two(tmp_path, [killing, STUCK], [DONE], is_moderated=True) as (one, other):
        queued = await responses(one).create(
            model="scripted",
            input="You scum",
            background=True,
            tools=[MCP],
            moderation={"model": "omni-moderation-latest"},
        )
        await leave(one, queued.id, "response.mcp_call.completed")
        events = await whole(other, queued.id)
        judge: Any = other.stack.inference
        judged = [request.input[0].text for request in judge.judged]
    report = events[-1].response.moderation
    assert judged == ["Done."]
    assert report.input.categories["hate"]
    assert report.output.categories["violence"]


async def test_handing_over_is_no_failed_attempt(tmp_path: Path) -> None:
    store = {"provider": "sqlite", "path": str(tmp_path / "store.db")}
    async with AsyncExitStack() as stacks:
        leaving = await stacks.enter_async_context(serving(playing(STUCK), kv_store=store, responses=BACKGROUND))
        queued = await responses(leaving).create(model="scripted", input="hi", background=True)
        for turns in ([STUCK],) * 4 + ([DONE],):
            staying = await stacks.enter_async_context(serving(playing(*turns), kv_store=store, responses=BACKGROUND))
            await leave(leaving, queued.id, "response.in_progress")
            leaving = staying
        events = await whole(leaving, queued.id)
        assert events[-1].response.output_text == "Done."


async def is_known_to_be_read(served: Served, response_id: str) -> bool:
    return await served.stack.kv_store.get(reader_key("default", response_id)) is not None


async def test_the_first_output_is_stored_with_the_note_that_it_may_have_been_read(tmp_path: Path) -> None:
    store = {"provider": "sqlite", "path": str(tmp_path / "store.db")}
    async with serving(scripted([{"text": "one "}, {"wait_s": 30}]), kv_store=store, responses=BACKGROUND) as served:
        read: Json = {"model": "scripted", "input": "hi", "background": True, "stream": True}
        async with asyncio.timeout(10), await responses(served).create(**read) as events:
            response_id = (await anext(events)).response.id
            while (await anext(events)).type != "response.output_text.delta":
                pass
            assert await is_known_to_be_read(served, response_id)
        unread = await responses(served).create(**{**read, "stream": False})
        await until(lambda: has_output(served, unread.id), 10)
        assert not await is_known_to_be_read(served, unread.id)


async def has_output(served: Served, response_id: str) -> bool:
    log = await served.stack.kv_store.scan(event_prefix("default", response_id))
    return any(b"output_text.delta" in entry.value for _, entry in log)


async def test_a_run_without_output_takes_its_readers_along_to_another_worker(tmp_path: Path) -> None:
    store = {"provider": "sqlite", "path": str(tmp_path / "store.db")}
    async with serving(scripted(STUCK), kv_store=store, responses=BACKGROUND) as leaving:
        create: Any = responses(leaving).create
        async with await create(model="scripted", input="hi", background=True, stream=True) as events:
            response_id = (await anext(events)).response.id
            while (await anext(events)).type != "response.in_progress":
                pass
            async with asyncio.timeout(10):
                await leaving.stack.responses.drain()
            assert await is_known_to_be_read(leaving, response_id)


async def test_a_run_that_is_claimed_as_its_worker_leaves_goes_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, drains = execution.load_checkpoints, list[asyncio.Task[None]]()

    async def load_while_draining(*arguments: Any) -> list[Checkpoint]:
        """Start to drain while a worker that resumes a run loads its checkpoints."""
        if not drains:
            drains.append(asyncio.create_task(second.stack.responses.drain()))
            await asyncio.sleep(0)
        return await load(*arguments)

    store = {"provider": "sqlite", "path": str(tmp_path / "store.db")}
    async with AsyncExitStack() as stacks:
        first = await stacks.enter_async_context(serving(playing(STUCK), kv_store=store, responses=BACKGROUND))
        queued = await responses(first).create(model="scripted", input="hi", background=True)
        second = await stacks.enter_async_context(serving(playing(STUCK), kv_store=store, responses=BACKGROUND))
        monkeypatch.setattr(execution, "load_checkpoints", load_while_draining)
        await leave(first, queued.id, "response.in_progress")
        async with asyncio.timeout(10):
            await until(lambda: drains)
            await drains[0]
        third = await stacks.enter_async_context(serving(playing(DONE), kv_store=store, responses=BACKGROUND))
        assert (await whole(third, queued.id))[-1].response.output_text == "Done."


async def test_nothing_of_a_step_is_kept_after_the_end(tmp_path: Path) -> None:
    async with two(tmp_path, [ECHO, DONE], [DONE]) as (one, _):
        queued = await responses(one).create(model="scripted", input="hi", background=True, tools=[MCP])
        await whole(one, queued.id)
        kinds = {key.split("/")[1] for key, _ in await one.stack.kv_store.scan("default/")}
        assert "step" not in kinds
        assert {key.split("/")[1] for key, _ in await one.stack.kv_store.scan("/")} <= {
            "sealing",
            "worker",
            "worker_sign",
        }
