"""The hosted shell, in containers over bubblewrap."""

import asyncio
import json
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.providers.tool_runtime.python.test_python import SessionLog, session_log
from tests.support.sdk.answer_shapes import Script, call, function
from tests.support.sdk.requests import asked, bare, create, messages, refusal, responses, stream
from tests.support.servers.normal_user import SHARED_PYTHON
from tests.support.servers.serving import Served, scripted, serving

__all__ = ["session_log"]
pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")

Json = dict[str, Any]
TOOL: Json = {"type": "shell", "environment": {"type": "container_auto"}}
INTERPRETER: Json = {"type": "code_interpreter", "container": {"type": "auto"}}
DONE: Script = [{"text": "Done."}]
KEYS = [{"key": "key-of-a", "tenant": "a"}, {"key": "key-of-b", "tenant": "b"}]


def shell(*commands: str, id: str = "c1", **limits: int) -> Json:  # noqa: A002 - the name of the script's own field
    return call("shell", json.dumps({"commands": [*commands], **limits}), id=id)


@asynccontextmanager
async def commanding(*turns: Script, **sections: Any) -> AsyncGenerator[Served]:
    """A stack whose model plays `turns` and may run commands in containers."""
    tools = {"provider": "python", "timeout_s": 5, **SHARED_PYTHON, **sections.pop("python", {})}
    async with serving(scripted(*turns), tool_runtime=tools, **sections) as served:
        yield served


def outputs(item: Any) -> list[tuple[str, str, Any]]:
    """The stdout, stderr and exit code of each command; `timeout` for one that took too long."""
    return [(each.stdout, each.stderr, getattr(each.outcome, "exit_code", each.outcome.type)) for each in item.output]


async def test_commands_run_and_their_output_is_an_item_of_its_own() -> None:
    turn = [shell("echo one; echo two >&2; exit 3", "pwd", timeout_ms=4000, max_output_length=100)]
    async with commanding(turn, DONE) as served:
        response = await create(served, tools=[TOOL])
        _, called, answer = messages(served)
        assert bare(await responses(served).retrieve(response.id)) == bare(response)
    item, result, message = response.output
    assert (item.type, item.status, item.id[:3], item.call_id) == ("shell_call", "completed", "sh_", "c1")
    assert (item.action.commands[1], item.action.timeout_ms, item.action.max_output_length) == ("pwd", 4000, 100)
    assert (item.environment.type, item.environment.container_id[:5]) == ("container_reference", "cntr_")
    assert (result.type, result.status, result.id[:4], result.call_id) == (
        *("shell_call_output", "completed", "sho_", "c1"),
    )
    assert (outputs(result), result.max_output_length) == ([("one\n", "two\n", 3), ("/mnt/data\n", "", 0)], 100)
    assert message.content[0].text == "Done."
    assert called["tool_calls"][0]["function"]["name"] == "shell"
    assert answer == {
        "role": "tool",
        "tool_call_id": "c1",
        "content": "one\n\nstderr:\ntwo\n\nexit code 3\n\n/mnt/data\n\nexit code 0",
    }


async def test_commands_and_their_output_are_streamed_as_they_come() -> None:
    pieces = ['{"comm', 'ands": ["echo a', " \\u00e9", '; sleep 0.3; echo b", "e', 'cho c"], "timeout_ms": 4', "000}"]
    async with commanding([call("shell", *pieces, id="c1")], DONE) as served:
        events = await stream(served, tools=[TOOL])
    names = [event.type.removeprefix("response.") for event in events]
    commands = [(event.command_index, event.delta) for event in events if event.type.endswith("command.delta")]
    assert commands == [(0, "echo a"), (0, " é"), (0, "; sleep 0.3; echo b"), (1, "e"), (1, "cho c")]
    first, second = [event.command for event in events if event.type.endswith("command.done")]
    assert (first, second) == ("echo a é; sleep 0.3; echo b", "echo c")
    written = [
        (event.command_index, event.delta.stdout) for event in events if event.type.endswith("output_content.delta")
    ]
    assert sorted(written) == [(0, "a é\n"), (0, "b\n"), (1, "c\n")]
    assert written[-1] == (0, "b\n")  # the second command did not wait for the first
    ends = [event.command_index for event in events if event.type.endswith("output_content.done")]
    assert ends == [1, 0]
    added = [index for index, name in enumerate(names) if name == "output_item.added"][:2]
    done = [index for index, name in enumerate(names) if name == "output_item.done"][:2]
    assert (events[added[0]].item.action.commands, events[added[1]].item.output) == ([], [])
    assert added[0] < done[0] < added[1] < done[1]


async def test_a_command_without_end_is_stopped_and_the_others_and_the_files_stay() -> None:
    turns: list[Script] = [
        [shell("echo kept > a; echo begun; sleep 60", "echo other", timeout_ms=300)],
        [shell("cat a", id="c2")],
        DONE,
    ]
    async with commanding(*turns) as served:
        response = await create(served, tools=[TOOL])
    _, first, _, second, _ = response.output
    assert outputs(first) == [("begun\n", "", "timeout"), ("other\n", "", 0)]
    assert outputs(second) == [("kept\n", "", 0)]


async def test_the_beginning_and_the_end_of_a_long_output_remain() -> None:
    long = "for i in $(seq 1000); do echo line $i; done"
    async with commanding([shell(long, f"{long} >&2", max_output_length=60)], DONE) as served:
        events = await stream(served, tools=[TOOL])
    out, err = events[-1].response.output[1].output
    for text in (out.stdout, err.stderr):
        assert text.startswith("line 1\nline 2\n")
        assert text.endswith("line 999\nline 1000\n")
        assert "characters of output are left out here" in text
        assert len(text) < 60 + 80


async def test_commands_that_exceed_a_limit_of_the_container_end_with_its_files() -> None:
    turns: list[Script] = [
        [shell("touch a; while true; do true; done", "echo short")],
        [shell("ls | wc -l", id="c2")],
        DONE,
    ]
    async with commanding(*turns, python={"cpu_s": 0.3}) as served:
        response = await create(served, tools=[TOOL])
    _, first, _, second, _ = response.output
    (_, stderr, code), short = outputs(first)
    assert (code, short) == (137, ("short\n", "", 0))
    assert "more than 0.3 s of processor time. Its files are gone" in stderr
    assert outputs(second) == [("0\n", "", 0)]


async def test_files_that_commands_write_are_cited_and_belong_to_the_container() -> None:
    answer: Script = [{"text": "See [it](sandbox:/mnt/data/out/a.txt)."}]
    async with commanding([shell("mkdir out && echo one > out/a.txt")], answer, answer) as served:
        response = await create(served, tools=[TOOL])
        later = await create(served, tools=[TOOL], previous_response_id=response.id)
        (annotation,) = response.output[-1].content[0].annotations
        files = served.client.containers.files
        content = await files.content.retrieve(annotation.file_id, container_id=annotation.container_id)
    assert (annotation.type, annotation.filename) == ("container_file_citation", "a.txt")
    assert annotation.container_id == response.output[0].environment.container_id
    assert content.content == b"one\n"
    assert later.output[-1].content[0].annotations[0].file_id == annotation.file_id


@pytest.mark.parametrize("how", ["chained", "in a conversation", "sent back, nothing stored"])
async def test_a_conversation_goes_on_in_its_container_and_reads_the_same_words(how: str) -> None:
    turns: list[Script] = [[shell("echo 7 > x")], DONE, [shell("cat x", id="c2")], DONE]
    async with commanding(*turns) as served:
        fields: Json = {"tools": [TOOL]}
        if how == "in a conversation":
            fields["conversation"] = (await served.client.conversations.create()).id
        fields["store"] = how != "sent back, nothing stored"
        first = await create(served, **fields)
        before = messages(served)
        if how == "chained":
            fields["previous_response_id"] = first.id
        if how == "sent back, nothing stored":
            user = {"role": "user", "content": "hi"}
            fields["input"] = [user, *map(bare, first.output), {"role": "user", "content": "Go on."}]
        second = await create(served, **fields)
        assert messages(served)[: len(before)] == before
    assert outputs(second.output[1]) == [("7\n", "", 0)]
    assert first.output[0].environment.container_id == second.output[0].environment.container_id


async def test_the_container_that_a_request_names_is_the_interpreters_too() -> None:
    python = call("python", json.dumps({"code": "open('x', 'w').write('from python')"}), id="c1")
    async with commanding([python], DONE, [shell("cat x", id="c2")], DONE) as served:
        container = await served.client.containers.create(name="mine")
        await create(served, tools=[{**INTERPRETER, "container": container.id}])
        named = {"type": "shell", "environment": {"type": "container_reference", "container_id": container.id}}
        response = await create(served, tools=[named])
    assert outputs(response.output[1]) == [("from python", "", 0)]
    assert response.output[0].environment.container_id == container.id
    assert response.tools[0].environment.container_id == container.id


async def test_uploaded_files_and_files_of_messages_are_in_the_folder() -> None:
    async with commanding([shell("cat a.txt b.txt")], DONE, more={"files": {"provider": "kv"}}) as served:
        file = await served.client.files.create(file=("a.txt", b"one "), purpose="user_data")
        tool = {"type": "shell", "environment": {"type": "container_auto", "file_ids": [file.id]}}
        part = {"type": "input_file", "filename": "b.txt", "file_data": "data:text/plain;base64,dHdv"}
        response = await create(served, tools=[tool], input=[{"role": "user", "content": [part]}])
        assert messages(served)[-1]["content"].startswith("[files of the messages are in the current folder: b.txt]\n")
    assert outputs(response.output[1]) == [("one two", "", 0)]


@pytest.mark.parametrize(
    ("wanted", "param"),
    [
        ({"memory_limit": "4g"}, "memory_limit"),
        ({"file_ids": ["file-1"]}, "file_ids"),
        ({"network_policy": {"type": "allowlist", "allowed_domains": ["a.example"]}}, "network_policy"),
    ],
)
async def test_a_setting_that_no_container_can_have_is_refused_by_name(wanted: Json, param: str) -> None:
    tool = {"type": "shell", "environment": {"type": "container_auto", **wanted}}
    async with commanding(DONE) as served:
        error = await refusal(served, tools=[function(), tool])
    assert error["param"] == f"tools[1].environment.{param}"


async def test_settings_that_a_container_can_have_are_its_own() -> None:
    tool = {
        **TOOL,
        "environment": {**TOOL["environment"], "memory_limit": "1g", "network_policy": {"type": "disabled"}},
    }
    async with commanding([shell("cat /proc/net/dev | grep -c :")], DONE) as served:
        response = await create(served, tools=[tool])
        (container,) = (await served.client.containers.list()).data
    assert container.memory_limit == "1g"
    assert outputs(response.output[1]) == [("1\n", "", 0)]  # the loopback alone
    assert response.tools[0].environment.memory_limit == "1g"


async def test_without_containers_the_shell_is_refused_and_says_how_to_have_them() -> None:
    async with serving() as served:
        error = await refusal(served, tools=[function(), TOOL])
    assert error["param"] == "tools[1].type"
    assert "tool_runtime" in error["message"]


async def test_another_tenants_container_is_an_unknown_one() -> None:
    turns: list[Script] = [[shell("echo 7 > x")], DONE, [shell("ls | wc -l", id="c2")], DONE]
    async with commanding(*turns, server={"api_keys": KEYS}) as served:
        first = await create(served, tools=[TOOL])
        container_id = first.output[0].environment.container_id
        served.client.api_key = "key-of-b"
        named = {"type": "shell", "environment": {"type": "container_reference", "container_id": container_id}}
        error = await refusal(served, 404, tools=[named])
        items = [*map(bare, first.output), {"role": "user", "content": "Go on."}]
        theirs = await create(served, tools=[TOOL], input=items)
    assert error["param"] == "tools[0].environment.container_id"
    assert theirs.output[0].environment.container_id != container_id
    assert outputs(theirs.output[1]) == [("0\n", "", 0)]


@pytest.mark.parametrize(
    "arguments", ["{oops", "{}", '{"commands": []}', '{"commands": "ls"}', '{"commands": ["a", 5]}']
)
async def test_arguments_that_are_wrong_go_back_to_the_model(arguments: str) -> None:
    turns: list[Script] = [[{"call": "shell", "arguments": [*arguments]}], DONE]
    async with commanding(*turns) as served:
        response = await create(served, tools=[TOOL])
        await stream(served, tools=[TOOL])
        assert "`shell`" in messages(served)[-1]["content"]
        assert (await served.client.containers.list()).data == []
    item, result, _ = response.output
    ((_, stderr, code),) = outputs(result)
    assert (item.status, result.status, code) == ("completed", "completed", 126)
    assert "`shell`" in stderr


async def test_commands_that_were_cut_are_not_run_and_the_chain_goes_on() -> None:
    turns: list[Script] = [[call("shell", '{"commands": ["touch', " a"), {"finish": "length"}], DONE]
    async with commanding(*turns) as served:
        response = (await stream(served, tools=[TOOL]))[-1].response
        assert (await served.client.containers.list()).data == []
        later = await create(served, tools=[TOOL], previous_response_id=response.id)
    (item,) = response.output
    assert (response.status, item.status, item.action.commands) == ("incomplete", "incomplete", ["touch a"])
    assert later.output_text == "Done."


async def test_commands_end_when_the_client_leaves(session_log: SessionLog) -> None:
    async with commanding([shell("echo begun; sleep 100")], DONE, python={"timeout_s": 60}) as served:
        async with asyncio.timeout(20):
            events = await create(served, tools=[TOOL], stream=True)
            async for event in events:
                if event.type == "response.shell_call_output_content.delta":
                    break
            await events.close()
            await session_log.ended.wait()


async def test_a_cancelled_run_closes_what_is_open() -> None:
    async with commanding([shell("echo begun; sleep 100")], DONE, python={"timeout_s": 60}) as served:
        response = await create(served, tools=[TOOL], background=True)
        async with asyncio.timeout(20):
            events = await responses(served).retrieve(response.id, stream=True)
            async for event in events:
                if event.type == "response.shell_call_output_content.delta":
                    break
            await events.close()
            cancelled = await responses(served).cancel(response.id)
            while cancelled.status != "cancelled":
                cancelled = await responses(served).retrieve(response.id)
    item, result = cancelled.output
    assert (item.status, result.status) == ("completed", "incomplete")
    assert outputs(result) == [("begun\n", "", 137)]


async def test_parallel_calls_and_a_function_of_the_client_all_have_their_way() -> None:
    turns: list[Script] = [
        [{"calls": [shell("echo 1", id="c1"), shell("echo 2", id="c2"), call("get", "{}", id="c3")]}],
        DONE,
    ]
    async with commanding(*turns) as served:
        first = await create(served, tools=[TOOL, function("get")])
        output = {"type": "function_call_output", "call_id": "c3", "output": "here"}
        second = await create(served, input=[output], tools=[TOOL], previous_response_id=first.id)
        answers = {each["tool_call_id"]: each["content"] for each in messages(served) if each["role"] == "tool"}
    assert answers == {"c1": "1\n\nexit code 0", "c2": "2\n\nexit code 0", "c3": "here"}
    assert second.output_text == "Done."
    assert sorted(item.type for item in first.output) == [
        "function_call",
        *["shell_call"] * 2,
        *["shell_call_output"] * 2,
    ]


async def test_a_forced_shell_is_forced_once() -> None:
    async with commanding([shell("true")], DONE) as served:
        await create(served, tools=[TOOL, function()], tool_choice={"type": "shell"})
        first, second = (chat.tool_choice for chat in asked(served))
    assert not isinstance(first, str)
    assert first is not None
    assert first.model_dump() == {"type": "function", "function": {"name": "shell"}}
    assert second == "auto"
