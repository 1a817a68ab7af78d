"""The hosted code interpreter, over Python in bubblewrap."""

import asyncio
import base64
import json
import shutil
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from apis.inference import Model
from providers.inference.scripted import Scripted
from tests.providers.tool_runtime.python.test_python import ENDLESS, SessionLog, session_log
from tests.support.sdk.answer_shapes import Script, call, function
from tests.support.sdk.client import sdk_client
from tests.support.sdk.requests import chat_requests, create, messages, refusal, stream
from tests.support.servers.normal_user import SHARED_PYTHON
from tests.support.servers.serving import Served, serving

__all__ = ["session_log"]
pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")

Json = dict[str, Any]
TOOL: Json = {"type": "code_interpreter", "container": {"type": "auto"}}
OUTPUTS = ["code_interpreter_call.outputs"]
DONE: Script = [{"text": "Done."}]
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


class Native(Scripted):
    """A scripted model that was trained on a Python tool of its own."""

    class Config(Scripted.Config):
        pass

    async def models(self) -> Sequence[Model]:
        (one,) = await super().models()
        return [Model(id=one.id, owned_by=one.owned_by, created=one.created, native_tools=frozenset({"python"}))]


def code(*lines: str, **fields: Any) -> Json:
    return call("python", json.dumps({"code": "\n".join(lines)}), **fields)


@asynccontextmanager
async def interpreting(*turns: Script, native: bool = False, **sections: Any) -> AsyncGenerator[Served]:
    """A stack whose model plays `turns` and may run Python."""
    inference = {
        "provider": "tests.spec.tools.test_code_interpreter:Native" if native else "scripted",
        "turns": [*turns],
    }
    tools = {"provider": "python", "timeout_s": 5, **SHARED_PYTHON, **sections.pop("python", {})}
    async with serving(inference, tool_runtime=tools, **sections) as served:
        yield served


async def test_the_code_is_run_and_its_item_comes_before_the_answer() -> None:
    async with interpreting([code("print(6 * 7)", id="c1")], DONE) as served:
        response = await create(served, tools=[TOOL])
        _, called, answer = messages(served)
    item, message = response.output
    assert (item.type, item.status, item.id[:3]) == ("code_interpreter_call", "completed", "ci_")
    assert (item.code, item.container_id[:5], item.outputs) == ("print(6 * 7)", "cntr_", None)
    assert message.content[0].text == "Done."
    assert called["tool_calls"][0]["function"] == {"name": "python", "arguments": '{"code": "print(6 * 7)"}'}
    assert answer == {"role": "tool", "tool_call_id": "c1", "content": "42"}


async def test_code_is_streamed_as_it_is_written_and_events_go_through_the_stages_in_order() -> None:
    pieces = ['{"co', 'de": "a = ', "1\\", 'nprint(\\"\\ud83d', '\\ude00\\")', '"}']
    async with interpreting([call("python", *pieces)], DONE) as served:
        events = await stream(served, tools=[TOOL])
    stages = [(event.type.removeprefix("response."), getattr(event, "delta", "")) for event in events][2:12]
    assert stages == [
        ("output_item.added", ""),
        ("code_interpreter_call.in_progress", ""),
        ("code_interpreter_call_code.delta", "a = 1"[:4]),
        ("code_interpreter_call_code.delta", "1"),
        ("code_interpreter_call_code.delta", '\nprint("'),
        ("code_interpreter_call_code.delta", '\U0001f600")'),
        ("code_interpreter_call_code.done", ""),
        ("code_interpreter_call.interpreting", ""),
        ("code_interpreter_call.completed", ""),
        ("output_item.done", ""),
    ]
    assert events[8].code == 'a = 1\nprint("\U0001f600")'
    assert events[2].item.container_id == events[11].item.container_id


async def test_raw_code_of_a_model_with_a_python_of_its_own_is_streamed_unchanged() -> None:
    turn = [call("python", "print('a", "\\n')", "\n", custom=True, id="c1")]
    async with interpreting(turn, DONE, DONE, native=True) as served:
        events = await stream(served, tools=[TOOL], include=OUTPUTS)
        offered = [tool.model_dump() for tool in chat_requests(served)[0].tools or ()]
        before = messages(served)
        await create(served, previous_response_id=events[-1].response.id, tools=[TOOL])
        assert messages(served)[: len(before)] == before
    deltas = [event.delta for event in events if event.type == "response.code_interpreter_call_code.delta"]
    assert deltas == ["print('a", "\\n')", "\n"]
    assert offered == [{"type": "python"}]
    assert before[1]["tool_calls"][0]["custom"] == {"name": "python", "input": "print('a\\n')\n"}
    assert events[-1].response.output[0].outputs[0].logs == "a\n\n"


async def test_raw_code_in_a_functions_place_is_run_and_enters_the_history_as_json() -> None:
    async with interpreting([call("python", "print(", "1)")], DONE) as served:
        response = await create(served, tools=[TOOL])
        called = messages(served)[1]["tool_calls"][0]["function"]
    assert response.output[0].code == "print(1)"
    assert called["arguments"] == '{"code":"print(1)"}'


async def test_outputs_are_shown_to_those_who_ask() -> None:
    lines = ("import base64", f"open('p.png', 'wb').write(base64.b64decode('{PIXEL}'))", "print('text')")
    async with interpreting([code(*lines)], DONE) as served:
        item = (await create(served, tools=[TOOL], include=OUTPUTS)).output[0]
        assert "[files: p.png]" in messages(served)[-1]["content"]
        (file,) = (await served.client.containers.files.list(item.container_id)).data
        data = await served.client.containers.files.content.retrieve(file.id, container_id=item.container_id)
    logs, image = item.outputs
    assert (logs.type, logs.logs) == ("logs", "text\n")
    assert (image.type, image.url) == ("image", f"data:image/png;base64,{PIXEL}")
    assert (file.path, file.source, data.content) == ("/mnt/data/p.png", "assistant", base64.b64decode(PIXEL))


async def test_a_program_that_fails_is_an_outcome_like_others() -> None:
    async with interpreting([code("1 / 0")], DONE) as served:
        item = (await create(served, tools=[TOOL], include=OUTPUTS)).output[0]
        tool_text = messages(served)[-1]["content"]
    assert item.status == "completed"
    assert item.outputs[0].logs.endswith("ZeroDivisionError: division by zero\n")
    assert tool_text.endswith("ZeroDivisionError: division by zero")


async def test_the_result_for_the_model_is_bounded() -> None:
    async with interpreting([code("print('x' * 100_000)")], DONE, responses={"max_tool_output_chars": 1000}) as served:
        item = (await create(served, tools=[TOOL], include=OUTPUTS)).output[0]
        tool_text = messages(served)[-1]["content"]
    assert len(tool_text) <= 1000
    assert "left out" in tool_text
    assert len(item.outputs[0].logs) <= 1000


@pytest.mark.parametrize("how", ["chained", "sent back", "referred to", "by id"])
async def test_variables_live_along_a_conversation(how: str) -> None:
    async with interpreting([code("x = 1")], DONE, [code("x + 1")], DONE) as served:
        first = await create(served, tools=[TOOL])
        container = first.output[0].container_id
        match how:
            case "chained":
                fields: Json = {"tools": [TOOL], "previous_response_id": first.id}
            case "sent back":
                fields = {"tools": [TOOL], "input": [*first.output, {"role": "user", "content": "Go on."}]}
            case "referred to":
                items = [{"type": "item_reference", "id": item.id} for item in first.output]
                fields = {"tools": [TOOL], "input": [*items, {"role": "user", "content": "Go on."}]}
            case _:
                fields = {"tools": [{**TOOL, "container": container}]}
        second = await create(served, **fields)
        tool_text = messages(served)[-1]["content"]
    assert second.output[0].container_id == container
    assert tool_text == "2"


async def test_conversations_share_nothing() -> None:
    async with interpreting([code("x = 1")], DONE, [code("x")], DONE) as served:
        first, second = [(await create(served, tools=[TOOL])).output[0].container_id for _ in range(2)]
        assert "NameError" in messages(served)[-1]["content"]
    assert first != second


async def test_calls_of_one_turn_share_one_container() -> None:
    calls: Script = [{"calls": [code("x = 1; print(x)", id="c1"), code("y = 2; print(y)", id="c2")]}]
    async with interpreting(calls, [code("x + y")], DONE) as served:
        response = await create(served, tools=[TOOL])
        tool_texts = [message["content"] for message in messages(served) if message["role"] == "tool"]
        containers = await served.client.containers.list()
    assert tool_texts == ["1", "2", "3"]
    assert {item.container_id for item in response.output[:3]} == {containers.data[0].id}
    assert len(containers.data) == 1


async def test_a_container_is_made_only_for_code_that_runs() -> None:
    async with interpreting(DONE) as served:
        await create(served, tools=[TOOL])
        assert (await served.client.containers.list()).data == []


async def test_a_container_that_is_gone_is_replaced_and_the_model_gets_a_note(session_log: SessionLog) -> None:
    async with interpreting([code("x = 1")], DONE, [code("x")], DONE, python={"idle_timeout_s": 0.3}) as served:
        first = await create(served, tools=[TOOL])
        async with asyncio.timeout(10):
            await session_log.ended.wait()
        old = {**TOOL, "container": first.output[0].container_id}
        error = await refusal(served, 404, tools=[old])
        second = await create(served, tools=[TOOL], previous_response_id=first.id)
        answer = messages(served)[-1]["content"]
    assert (error["param"], old["container"] in error["message"]) == ("tools[0].container", True)
    assert second.output[0].container_id != first.output[0].container_id
    assert answer.startswith("[this is a new Python session: the variables and files of the earlier calls are gone]")
    assert "NameError" in answer


async def test_a_container_that_is_deleted_between_two_calls_is_replaced(session_log: SessionLog) -> None:
    turns: list[Script] = [[code("x = 1", *ENDLESS.splitlines())], [code("x")], DONE]
    async with interpreting(*turns, python={"timeout_s": 60, "cpu_s": 60}) as served:
        asking = asyncio.create_task(create(served, tools=[TOOL]))
        async with asyncio.timeout(20):
            await session_log.begun.wait()
            (container,) = (await served.client.containers.list()).data
            await served.client.containers.delete(container.id)
            response = await asking
        answer = messages(served)[-1]["content"]
    assert {item.container_id for item in response.output[:2]} == {container.id}
    assert answer.startswith("[this is a new Python session: the variables and files of the earlier calls are gone]")
    assert "NameError" in answer


@pytest.mark.parametrize("crash", ["import os; os._exit(3)", "import os; os.kill(os.getpid(), 9)", "while True: pass"])
async def test_a_crash_is_an_outcome_and_the_next_call_works(crash: str) -> None:
    async with interpreting(
        [code("print('before', flush=True)", crash)], [code("1 + 1")], DONE, python={"cpu_s": 0.5}
    ) as served:
        response = await create(served, tools=[TOOL], include=OUTPUTS)
        ended, after = (message["content"] for message in messages(served) if message["role"] == "tool")
    first, second, _ = response.output
    assert (first.status, second.status, after) == ("completed", "completed", "2")
    assert first.container_id == second.container_id
    assert ended.startswith("before\n")
    assert "the Python session was ended" in ended
    assert first.outputs[0].logs == ended


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_program_without_end_is_stopped_when_the_client_leaves(session_log: SessionLog, streamed: bool) -> None:
    async with interpreting([code(*ENDLESS.splitlines())], DONE, python={"timeout_s": 60, "cpu_s": 60}) as served:
        async with asyncio.timeout(20):
            if streamed:
                events = await create(served, tools=[TOOL], stream=True)
                async for event in events:
                    if event.type == "response.code_interpreter_call.interpreting":
                        break
                await session_log.begun.wait()
                await events.close()
            else:
                asking = asyncio.create_task(create(served, tools=[TOOL]))
                await session_log.begun.wait()
                asking.cancel()
                await asyncio.wait([asking])
            await session_log.ended.wait()


async def test_a_call_without_room_for_its_container_fails_and_the_model_answers(session_log: SessionLog) -> None:
    turns: list[Script] = [[code(*ENDLESS.splitlines())], [code("1")], DONE]
    async with interpreting(*turns, python={"max_sessions": 1, "timeout_s": 60}) as served:
        busy = asyncio.create_task(create(served, tools=[TOOL]))
        async with asyncio.timeout(20):
            await session_log.begun.wait()
        response = await create(served, tools=[TOOL])
        answer = messages(served)[-1]["content"]
        busy.cancel()
        await asyncio.wait([busy])
    assert [item.status for item in response.output] == ["failed", "completed"]
    assert "in use" in answer


async def test_arguments_that_are_no_program_are_an_error_for_the_model() -> None:
    argument_texts = ("{oops", "{}", '{"code": ""}', '{"code": 5}', "", '{"code": "x')
    calls: list[Script] = [[{"call": "python", "arguments": [*arguments]}] for arguments in argument_texts]
    async with interpreting(*(turn for each in calls for turn in (each, DONE, each, DONE))) as served:
        for arguments in argument_texts:
            response = await create(served, tools=[TOOL])
            assert response.output[0].status == "failed", arguments
            await stream(served, tools=[TOOL])
            assert "python" in messages(served)[-1]["content"], arguments
            assert (await served.client.containers.list()).data == [], arguments


async def test_code_that_was_cut_is_not_run() -> None:
    turns: list[Script] = [[call("python", '{"code": "print(', "1", ')"}'), {"finish": "length"}]]
    async with interpreting(*turns) as served:
        response = (await stream(served, tools=[TOOL]))[-1].response
        assert (await served.client.containers.list()).data == []
    assert (response.status, response.output[0].status) == ("incomplete", "incomplete")
    assert response.output[0].code == "print(1)"


async def test_another_tenants_container_is_an_unknown_one() -> None:
    keys = [{"key": "key-of-a", "tenant": "a"}, {"key": "key-of-a2", "tenant": "a"}, {"key": "key-of-b", "tenant": "b"}]
    turns: list[Script] = [[code("x = 7")], DONE, [code("x")], DONE, [code("x")], DONE]
    async with interpreting(*turns, server={"api_keys": keys}) as served:
        first = await create(served, tools=[TOOL])
        named = {**TOOL, "container": first.output[0].container_id}
        errors: list[Json] = []
        for key in ("key-of-b", "key-of-a2"):
            async with sdk_client(served.url, key) as client:
                client_of = Served(client, served.url, served.app, served.streams)
                if key == "key-of-b":
                    unknown = {**TOOL, "container": "cntr_" + "0" * 32}
                    errors = [await refusal(client_of, 404, tools=[each]) for each in (named, unknown)]
                    items = [*first.output, {"role": "user", "content": "Go on."}]
                    theirs = await create(client_of, tools=[TOOL], input=items)
                    assert "NameError" in messages(served)[-1]["content"]
                    assert theirs.output[0].container_id != named["container"]
                else:
                    await create(client_of, tools=[named])
                    assert messages(served)[-1]["content"] == "7"
    assert errors[0]["message"].replace(named["container"], "") == errors[1]["message"].replace("cntr_" + "0" * 32, "")


async def test_what_a_container_cannot_have_is_refused_by_name() -> None:
    wishes: Json = {
        "memory_limit": "4g",
        "file_ids": ["file-1"],
        "network_policy": {"type": "allowlist", "allowed_domains": ["a.example"]},
    }
    async with interpreting(DONE) as served:
        for name, value in wishes.items():
            container = {"type": "auto", name: value}
            error = await refusal(served, tools=[function(), {**TOOL, "container": container}])
            assert error["param"] == f"tools[1].container.{name}"


async def test_a_missing_uploaded_file_is_refused_by_its_field() -> None:
    more = {"files": {"provider": "kv"}}
    keys = [{"key": "key-of-a", "tenant": "a"}, {"key": "key-of-b", "tenant": "b"}]
    async with interpreting(DONE, more=more, server={"api_keys": keys}) as served:
        file_id = (await served.client.files.create(file=("a.txt", b"one"), purpose="user_data")).id
        large = (await served.client.files.create(file=("b.txt", b"x" * (17 << 20)), purpose="user_data")).id

        def declared(*ids: str) -> list[Json]:
            return [{**TOOL, "container": {"type": "auto", "file_ids": [file_id, *ids]}}]

        unknown = await refusal(served, 404, tools=declared("file-none"))
        too_large = await refusal(served, 400, tools=declared(large))
        served.client.api_key = "key-of-b"
        foreign = await refusal(served, 404, tools=declared())
        assert chat_requests(served) == []
    assert unknown["param"] == too_large["param"] == "tools[0].container.file_ids[1]"
    assert foreign["param"] == "tools[0].container.file_ids[0]"


async def test_a_later_turns_files_come_into_the_chains_container() -> None:
    both = "[open(name).read() for name in ('a.txt', 'b.txt')]"
    turns: list[Script] = [[code("open('a.txt', 'a').write('!')")], DONE, [code(both)], DONE]
    async with interpreting(*turns, more={"files": {"provider": "kv"}}) as served:
        ids = [
            (await served.client.files.create(file=(name, data), purpose="user_data")).id
            for name, data in (("a.txt", b"one"), ("b.txt", b"two"))
        ]
        first = await create(served, tools=[{**TOOL, "container": {"type": "auto", "file_ids": ids[:1]}}])
        tools = [{**TOOL, "container": {"type": "auto", "file_ids": ids}}]
        second = await create(served, tools=tools, previous_response_id=first.id, input="Go on.")
        assert messages(served)[-1]["content"] == "['one!', 'two']"
    assert first.output[0].container_id == second.output[0].container_id


async def test_what_a_container_can_have_it_has() -> None:
    declared = {"type": "auto", "memory_limit": "1g", "network_policy": {"type": "disabled"}}
    async with interpreting([code("len(bytearray(600 << 20))")], DONE) as served:
        await create(served, tools=[{**TOOL, "container": declared}])
        assert messages(served)[-1]["content"] == "629145600"
        (container,) = (await served.client.containers.list()).data
    assert (container.memory_limit, container.network_policy) == ("1g", container.network_policy)
    assert container.network_policy is not None
    assert container.network_policy.type == "disabled"


async def test_without_a_python_tool_the_interpreter_is_refused() -> None:
    async with serving() as served:
        error = await refusal(served, tools=[function(), TOOL])
    assert error["param"] == "tools[1].type"
    assert "tool_runtime" in error["message"]


async def test_a_forced_interpreter_is_forced_once() -> None:
    async with interpreting([code("1")], DONE) as served:
        await create(served, tools=[TOOL, function()], tool_choice={"type": "code_interpreter"})
        first, second = (chat.tool_choice for chat in chat_requests(served))
    assert not isinstance(first, str)
    assert first is not None
    assert first.model_dump() == {"type": "function", "function": {"name": "python"}}
    assert second == "auto"


async def test_the_interpreter_and_functions_of_one_turn_both_have_their_way() -> None:
    turns: list[Script] = [[{"calls": [code("41 + 1", id="c1"), call("get", "{}", id="c2")]}], DONE]
    async with interpreting(*turns) as served:
        first = await create(served, tools=[TOOL, function("get")])
        output = {"type": "function_call_output", "call_id": "c2", "output": "here"}
        second = await create(served, input=[output], tools=[TOOL], previous_response_id=first.id)
        answers = {each["tool_call_id"]: each["content"] for each in messages(served) if each["role"] == "tool"}
    assert [(item.type, item.status) for item in first.output] == [
        ("code_interpreter_call", "completed"),
        ("function_call", "completed"),
    ]
    assert answers == {"c1": "42", "c2": "here"}
    assert second.output_text == "Done."
