"""The hosted shell, in containers over bubblewrap."""

import asyncio
import json
import shutil
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.providers.tool_runtime.python.test_python import SessionLog, session_log
from tests.support.laws.stream_laws import check_stream
from tests.support.sdk.answer_shapes import Script, call, function
from tests.support.sdk.input_model import MODEL, play
from tests.support.sdk.requests import bare, chat_requests, create, messages, refusal, responses, stream
from tests.support.servers.normal_user import SHARED_PYTHON
from tests.support.servers.serving import Served, serving
from tests.support.servers.worker_processes import Workers, worker_processes

__all__ = ["session_log"]
pytestmark = [
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed"),
    pytest.mark.asyncio(loop_scope="module"),
]

Json = dict[str, Any]
TOOL: Json = {"type": "shell", "environment": {"type": "container_auto"}}
INTERPRETER: Json = {"type": "code_interpreter", "container": {"type": "auto"}}
KEYS = [{"key": "key-of-a", "tenant": "a"}, {"key": "key-of-b", "tenant": "b"}]
PYTHON: Json = {"provider": "python", "timeout_s": 5, **SHARED_PYTHON}


def shell(*commands: str, id: str = "c1", **limits: int) -> Json:  # noqa: A002 - the name of the script's own field
    return call("shell", json.dumps({"commands": [*commands], **limits}), id=id)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncGenerator[Served]:
    more = {"files": {"provider": "kv"}}
    async with serving(MODEL, tool_runtime=PYTHON, server={"api_keys": KEYS}, more=more) as served:
        yield served


async def count_containers(served: Served) -> int:
    return len((await served.client.containers.list(limit=100)).data)


def outputs(item: Any) -> list[tuple[str, str, Any]]:
    """The stdout, stderr and exit code of each command; `timeout` for one that took too long."""
    return [(each.stdout, each.stderr, getattr(each.outcome, "exit_code", each.outcome.type)) for each in item.output]


def container_of(response: Any) -> str:
    return response.output[0].environment.container_id


async def test_commands_run_and_their_output_is_an_item_of_its_own(served: Served) -> None:
    turn = [shell("echo one; echo two >&2; exit 3", "pwd", timeout_ms=4000, max_output_length=100)]
    response = await create(served, input=play(turn), tools=[TOOL])
    _, called, answer = messages(served)
    assert bare(await responses(served).retrieve(response.id)) == bare(response)
    item, result, message = response.output
    assert (item.type, item.status, item.id[:3], item.call_id) == ("shell_call", "completed", "sh_", "c1")
    assert (item.action.commands[1], item.action.timeout_ms, item.action.max_output_length) == ("pwd", 4000, 100)
    assert (item.environment.type, item.environment.container_id[:5]) == ("container_reference", "cntr_")
    assert (result.type, result.status, result.id[:4]) == ("shell_call_output", "completed", "sho_")
    assert (result.call_id, result.max_output_length) == ("c1", 100)
    assert outputs(result) == [("one\n", "two\n", 3), ("/mnt/data\n", "", 0)]
    assert message.content[0].text == "Done."
    assert called["tool_calls"][0]["function"]["name"] == "shell"
    text = "one\n\nstderr:\ntwo\n\nexit code 3\n\n/mnt/data\n\nexit code 0"
    assert answer == {"role": "tool", "tool_call_id": "c1", "content": text}


async def test_commands_and_their_output_are_streamed_as_they_come(served: Served) -> None:
    pieces = ['{"comm', 'ands": ["echo a', " \\u00e9", '; sleep 0.3; echo b", "e', 'cho c"], "timeout_ms": 4', "000}"]
    events = await stream(served, input=play([call("shell", *pieces, id="c1")]), tools=[TOOL])
    names = [event.type.removeprefix("response.") for event in events]
    commands = [(event.command_index, event.delta) for event in events if event.type.endswith("command.delta")]
    assert commands == [(0, "echo a"), (0, " é"), (0, "; sleep 0.3; echo b"), (1, "e"), (1, "cho c")]
    first, second = [event.command for event in events if event.type.endswith("command.done")]
    assert (first, second) == ("echo a é; sleep 0.3; echo b", "echo c")
    deltas = [event for event in events if event.type.endswith("output_content.delta")]
    written = [(event.command_index, event.delta.stdout) for event in deltas]
    assert sorted(written) == [(0, "a é\n"), (0, "b\n"), (1, "c\n")]
    assert written[-1] == (0, "b\n")  # the second command did not wait for the first
    assert [event.command_index for event in events if event.type.endswith("output_content.done")] == [1, 0]
    added = [index for index, name in enumerate(names) if name == "output_item.added"][:2]
    done = [index for index, name in enumerate(names) if name == "output_item.done"][:2]
    assert (events[added[0]].item.action.commands, events[added[1]].item.output) == ([], [])
    assert added[0] < done[0] < added[1] < done[1]


async def test_a_command_without_end_is_stopped_and_the_others_and_the_files_stay(served: Served) -> None:
    turns: list[Script] = [
        [shell("echo kept > a; echo begun; sleep 60", "echo other", timeout_ms=300)],
        [shell("cat a", id="c2")],
    ]
    response = await create(served, input=play(*turns), tools=[TOOL])
    _, first, _, second, _ = response.output
    assert outputs(first) == [("begun\n", "", "timeout"), ("other\n", "", 0)]
    assert outputs(second) == [("kept\n", "", 0)]


async def test_the_beginning_and_the_end_of_a_long_output_remain(served: Served) -> None:
    long = "for i in $(seq 1000); do echo line $i; done"
    turn = [shell(long, f"{long} >&2", max_output_length=60)]
    events = await stream(served, input=play(turn), tools=[TOOL])
    out, err = events[-1].response.output[1].output
    for text in (out.stdout, err.stderr):
        assert text.startswith("line 1\nline 2\n")
        assert text.endswith("line 999\nline 1000\n")
        assert "characters of output are left out here" in text
        assert len(text) < 60 + 80


async def test_files_that_commands_write_are_cited_and_belong_to_the_container(served: Served) -> None:
    answer: Script = [{"text": "See [it](sandbox:/mnt/data/out/a.txt)."}]
    text = json.dumps([[shell("mkdir out && echo one > out/a.txt")], answer])
    response = await create(served, input=text, tools=[TOOL])
    later = await create(served, input=json.dumps([answer]), tools=[TOOL], previous_response_id=response.id)
    (annotation,) = response.output[-1].content[0].annotations
    files = served.client.containers.files
    content = await files.content.retrieve(annotation.file_id, container_id=annotation.container_id)
    assert (annotation.type, annotation.filename) == ("container_file_citation", "a.txt")
    assert (annotation.container_id, content.content) == (container_of(response), b"one\n")
    assert later.output[-1].content[0].annotations[0].file_id == annotation.file_id


@pytest.mark.parametrize("how", ["chained", "in a conversation", "sent back, nothing stored"])
async def test_a_conversation_goes_on_in_its_container_and_reads_the_same_words(served: Served, how: str) -> None:
    fields: Json = {"tools": [TOOL], "store": how != "sent back, nothing stored"}
    if how == "in a conversation":
        fields["conversation"] = (await served.client.conversations.create()).id
    begin, go_on = play([shell("echo 7 > x")]), play([shell("cat x", id="c2")])
    first = await create(served, **fields, input=begin)
    before = messages(served)
    if how == "chained":
        fields["previous_response_id"] = first.id
    fields["input"] = go_on
    if how == "sent back, nothing stored":
        user, next_user = ({"role": "user", "content": text} for text in (begin, go_on))
        fields["input"] = [user, *map(bare, first.output), next_user]
    second = await create(served, **fields)
    assert messages(served)[: len(before)] == before
    assert outputs(second.output[1]) == [("7\n", "", 0)]
    assert container_of(first) == container_of(second)


async def test_the_container_that_a_request_names_is_the_interpreters_too(served: Served) -> None:
    python = call("python", json.dumps({"code": "open('x', 'w').write('from python')"}), id="c1")
    container = await served.client.containers.create(name="mine")
    await create(served, input=play([python]), tools=[{**INTERPRETER, "container": container.id}])
    named = {"type": "shell", "environment": {"type": "container_reference", "container_id": container.id}}
    response = await create(served, input=play([shell("cat x", id="c2")]), tools=[named])
    assert outputs(response.output[1]) == [("from python", "", 0)]
    assert container_of(response) == container.id == response.tools[0].environment.container_id


async def test_uploaded_files_and_files_of_messages_are_in_the_folder(served: Served) -> None:
    file = await served.client.files.create(file=("a.txt", b"one "), purpose="user_data")
    tool = {"type": "shell", "environment": {"type": "container_auto", "file_ids": [file.id]}}
    part = {"type": "input_file", "filename": "b.txt", "file_data": "data:text/plain;base64,dHdv"}
    script = {"role": "user", "content": play([shell("cat a.txt b.txt")])}
    response = await create(served, tools=[tool], input=[{"role": "user", "content": [part]}, script])
    assert messages(served)[-1]["content"].startswith("[files of the messages are in the current folder: b.txt]\n")
    assert outputs(response.output[1]) == [("one two", "", 0)]


@pytest.mark.parametrize(
    ("expected", "param"),
    [
        ({"memory_limit": "4g"}, "memory_limit"),
        ({"file_ids": ["file-1"]}, "file_ids[0]"),
        ({"network_policy": {"type": "allowlist", "allowed_domains": ["a.example"]}}, "network_policy"),
    ],
)
async def test_a_setting_that_no_container_can_have_is_refused_by_name(
    served: Served, expected: Json, param: str
) -> None:
    tool = {"type": "shell", "environment": {"type": "container_auto", **expected}}
    error = await refusal(served, 404 if "file_ids" in expected else 400, tools=[function(), tool])
    assert error["param"] == f"tools[1].environment.{param}"


async def test_settings_that_a_container_can_have_are_its_own(served: Served) -> None:
    settings = {"memory_limit": "1g", "network_policy": {"type": "disabled"}}
    tool = {"type": "shell", "environment": {**TOOL["environment"], **settings}}
    response = await create(served, input=play([shell("grep -c : /proc/net/dev")]), tools=[tool])
    container = await served.client.containers.retrieve(container_of(response))
    assert container.memory_limit == response.tools[0].environment.memory_limit == "1g"
    assert outputs(response.output[1]) == [("1\n", "", 0)]  # the loopback alone


async def test_another_tenants_container_is_an_unknown_one(served: Served) -> None:
    begin, go_on = ({"role": "user", "content": play([shell("touch x; ls | wc -l", id=id_)])} for id_ in ("c1", "c2"))
    first = await create(served, input=[begin], tools=[TOOL])
    theirs = Served(served.client.with_options(api_key="key-of-b"), served.url, served.app, served.streams)
    named = {"type": "shell", "environment": {"type": "container_reference", "container_id": container_of(first)}}
    error = await refusal(theirs, 404, tools=[named])
    items = [begin, *map(bare, first.output), go_on]
    second = await create(theirs, tools=[TOOL], input=items)
    assert error["param"] == "tools[0].environment.container_id"
    assert container_of(second) not in ("", container_of(first))
    assert outputs(second.output[1]) == [("1\n", "", 0)]


@pytest.mark.parametrize("arguments", ["{oops", '{"commands": []}', '{"commands": "ls"}', '{"commands": ["a", 5]}'])
async def test_arguments_that_are_wrong_go_back_to_the_model(served: Served, arguments: str) -> None:
    count = await count_containers(served)
    turn: Script = [{"call": "shell", "arguments": [*arguments]}]
    response = (await stream(served, input=play(turn), tools=[TOOL]))[-1].response
    assert "`shell`" in messages(served)[-1]["content"]
    assert await count_containers(served) == count
    item, result, _ = response.output
    ((_, stderr, code),) = outputs(result)
    assert (item.status, result.status, code) == ("completed", "completed", 126)
    assert "`shell`" in stderr


async def test_commands_that_were_cut_are_not_run_and_the_chain_goes_on(served: Served) -> None:
    count = await count_containers(served)
    turn: Script = [call("shell", '{"commands": ["touch', " a"), {"finish": "length"}]
    response = (await stream(served, input=play(turn), tools=[TOOL]))[-1].response
    assert await count_containers(served) == count
    later = await create(served, input=play(), tools=[TOOL], previous_response_id=response.id)
    (item,) = response.output
    assert (response.status, item.status, item.action.commands) == ("incomplete", "incomplete", ["touch a"])
    assert later.output_text == "Done."


async def test_a_cancelled_run_closes_what_is_open(served: Served) -> None:
    text = play([shell("echo begun; sleep 100")])
    response = await create(served, input=text, tools=[TOOL], background=True)
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


async def test_parallel_calls_and_a_function_of_the_client_all_have_their_way(served: Served) -> None:
    turn = [{"calls": [shell("echo 1", id="c1"), shell("echo 2", id="c2"), call("get", "{}", id="c3")]}]
    first = await create(served, input=play(turn), tools=[TOOL, function("get")])
    output = {"type": "function_call_output", "call_id": "c3", "output": "here"}
    go_on = {"role": "user", "content": play()}
    second = await create(served, input=[output, go_on], tools=[TOOL], previous_response_id=first.id)
    answers = {each["tool_call_id"]: each["content"] for each in messages(served) if each["role"] == "tool"}
    assert answers == {"c1": "1\n\nexit code 0", "c2": "2\n\nexit code 0", "c3": "here"}
    assert second.output_text == "Done."
    kinds = ["function_call", "shell_call", "shell_call", "shell_call_output", "shell_call_output"]
    assert sorted(item.type for item in first.output) == kinds


async def test_a_forced_shell_is_forced_once(served: Served) -> None:
    await create(served, input=play([shell("true")]), tools=[TOOL, function()], tool_choice={"type": "shell"})
    first, second = [chat.tool_choice for chat in chat_requests(served)][-2:]
    assert not isinstance(first, str)
    assert first is not None
    assert first.model_dump() == {"type": "function", "function": {"name": "shell"}}
    assert second == "auto"


async def test_without_containers_the_shell_is_refused_and_says_how_to_have_them() -> None:
    async with serving() as bare_stack:
        error = await refusal(bare_stack, tools=[function(), TOOL])
    assert error["param"] == "tools[1].type"
    assert "tool_runtime" in error["message"]


@pytest.mark.asyncio(loop_scope="function")
async def test_commands_end_with_their_client_or_their_limits(session_log: SessionLog) -> None:
    async with serving(MODEL, tool_runtime={**PYTHON, "cpu_s": 0.3, "timeout_s": 60}) as served:
        async with asyncio.timeout(20):
            events = await create(served, input=play([shell("echo a; sleep 100")]), tools=[TOOL], stream=True)
            async for event in events:
                if event.type == "response.shell_call_output_content.delta":
                    break
            await events.close()
            await session_log.ended.wait()
        turns: list[Script] = [
            [shell("touch a; while true; do true; done", "echo short")],
            [shell("ls | wc -l", id="c2")],
        ]
        response = await create(served, input=play(*turns), tools=[TOOL])
    _, first, _, second, _ = response.output
    (_, stderr, code), short = outputs(first)
    assert (code, short) == (137, ("short\n", "", 0))
    assert "the container's programs were ended: it used more than 0.3 s of processor time" in stderr
    assert outputs(second) == [("1\n", "", 0)]


@pytest.mark.asyncio(loop_scope="function")
async def test_a_run_whose_worker_is_killed_goes_on_and_the_model_reads_that_the_outcome_is_unknown(
    tmp_path: Path,
) -> None:
    store = {"provider": "sqlite", "path": str(tmp_path / "store.db")}
    sections: Json = {"inference": MODEL, "tool_runtime": PYTHON}
    background = {"provider": "loop", "background": {"lease_s": 1.0, "poll_s": 10}}
    turn = [{"calls": [shell("echo done", id="c1"), shell("echo begun; sleep 4", id="c2")]}]
    async with worker_processes(tmp_path, store, workers=1, more={**sections, "responses": background}) as dying:
        begun = await dying.ask(
            "POST", "/responses", json={"model": "scripted", "input": play(turn), "tools": [TOOL], "background": True}
        )
        response_id = begun.json()["id"]
        await dying.until(response_id, "response.shell_call_output_content.delta", 2)
        dying.parent.kill()
        async with serving(
            MODEL,
            tool_runtime=PYTHON,
            kv_store=store,
            responses={"background": {"lease_s": 1.0, "poll_s": 0.1}},
        ) as served:
            response = await Workers(served.url, dying.parent).ended(response_id, 20)
            response = await responses(served).retrieve(response["id"])
            answers = {each["tool_call_id"]: each["content"] for each in messages(served) if each["role"] == "tool"}
            async with asyncio.timeout(5):
                log = [event async for event in await responses(served).retrieve(response_id, stream=True)]
            later = await create(served, input=play(), tools=[TOOL], previous_response_id=response_id)
    assert response.status == "completed"
    results = {item.call_id: item for item in response.output if item.type == "shell_call_output"}
    assert (results["c1"].status, outputs(results["c1"])) == ("completed", [("done\n", "", 0)])
    assert (results["c2"].status, outputs(results["c2"])) == ("incomplete", [("begun\n", "", 137)])
    assert answers["c1"] == "done\n\nexit code 0"
    assert "Nobody knows whether it did" in answers["c2"]
    check_stream(log)
    assert later.output_text == "Done."
