"""Programs, MCP servers and the search for tools as Anthropic's server tools, also when they are sent back."""

import asyncio
import json
import shutil
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from anthropic import BadRequestError, PermissionDeniedError

from tests.spec.tools.test_code_interpreter import code, interpreting
from tests.support.sdk.answer_shapes import call
from tests.support.sdk.messages import ADD, HI, create, messages_client, replay, stream
from tests.support.sdk.requests import chat_requests, plain
from tests.support.sdk.web_pages import browsing, model, web
from tests.support.servers.mcp_server import RealServer
from tests.support.servers.mcp_stack import DONE, offered, stacked, tool_outputs
from tests.support.servers.serving import scripted, serving
from tests.support.tenants.accounts import new_project, organization_of, serving_accounts

both = pytest.mark.parametrize("send", [create, stream])
needs_sandbox = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
EXECUTION: Any = {"type": "code_execution_20260120", "name": "code_execution"}
BASH: Any = {"type": "code_execution_20250825", "name": "code_execution"}
FETCH: Any = {"type": "web_fetch_20250910", "name": "web_fetch", "max_uses": 3}
SEARCH: Any = {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}
WEATHER: Any = {
    "name": "get_weather",
    "description": "The forecast of a city.",
    "input_schema": {"type": "object", "properties": {}},
    "defer_loading": True,
}
GO_ON: Any = {"role": "user", "content": "go on"}


def server_of(real: RealServer, **fields: Any) -> Any:
    return {"type": "url", "name": "real", "url": real.url, **fields}


def toolset(**fields: Any) -> Any:
    return {"type": "mcp_toolset", "mcp_server_name": "real", **fields}


async def beta(send: Any, client: Any, messages: Any = None, **fields: Any) -> Any:
    """Send a request with the fields of the beta API, which has MCP servers."""
    request: Any = {"model": "scripted", "max_tokens": 100, "messages": messages or HI, **fields}
    if send is create:
        return await client.beta.messages.create(**request)
    async with client.beta.messages.stream(**request) as events:
        return await events.get_final_message()


@both
@needs_sandbox
async def test_a_program_is_a_call_of_the_server_and_the_model_reads_its_output_again(send: Any) -> None:
    turns: Any = [[code("print(6 * 7)", id="c1")], DONE, DONE]
    async with interpreting(*turns) as served, messages_client(served) as client:
        answer = await send(client, tools=[EXECUTION])
        await send(client, [*HI, replay(answer), GO_ON], tools=[EXECUTION])
        again = chat_requests(served)[-1].messages
    use, result, text = answer.content
    assert (use.type, use.name, use.input) == ("server_tool_use", "code_execution", {"code": "print(6 * 7)"})
    assert (result.type, result.tool_use_id) == ("code_execution_tool_result", use.id)
    assert (result.content.stdout, result.content.return_code) == ("42\n", 0)
    assert (text.text, answer.stop_reason) == ("Done.", "end_turn")
    assert [message.role for message in again] == ["user", "assistant", "tool", "assistant", "user"]
    assert again[2].content == "42"


@both
@needs_sandbox
async def test_a_message_names_its_container_and_the_next_one_may_use_it(send: Any) -> None:
    turns: Any = [[code("x = 5")], DONE, [code("print(x)")], DONE]
    async with interpreting(*turns, python={"idle_timeout_s": 7 * 60}) as served, messages_client(served) as client:
        first = await send(client, tools=[EXECUTION])
        second = await send(client, [*HI, replay(first), GO_ON], tools=[EXECUTION], container=first.container.id)
        plain = await send(client)
    assert first.container.id.startswith("cntr_")
    assert timedelta(minutes=6) < first.container.expires_at - datetime.now(UTC) <= timedelta(minutes=7)
    assert (second.container.id, second.content[1].content.stdout) == (first.container.id, "5\n")
    assert plain.container is None


@both
@needs_sandbox
async def test_a_program_has_the_exit_code_that_python_would_have(send: Any) -> None:
    slow = [code("import time", "print('begun', flush=True)", "time.sleep(100)", id="c3")]
    turns: Any = [[code("1 / 0", id="c1")], [code("import os", "os._exit(3)", id="c2")], slow, DONE, DONE]
    async with interpreting(*turns, python={"timeout_s": 1}) as served, messages_client(served) as client:
        answer = await send(client, tools=[EXECUTION])
        await send(client, [*HI, replay(answer), GO_ON], tools=[EXECUTION])
        again = chat_requests(served)[-1].messages
    failed, killed, late = (block.content for block in answer.content if block.type == "code_execution_tool_result")
    assert (failed.return_code, failed.stdout.splitlines()[-1]) == (1, "ZeroDivisionError: division by zero")
    assert killed.return_code == 137
    assert (late.type, late.error_code) == ("code_execution_tool_result_error", "execution_time_exceeded")
    outputs = [str(message.content) for message in again if message.role == "tool"]
    assert "begun" in outputs[2]


@both
@needs_sandbox
async def test_shell_commands_are_calls_of_the_server_and_the_model_reads_their_output_again(send: Any) -> None:
    commands = ["echo one; echo two >&2; exit 3", "echo 5 > x", "sleep 100"]
    first: Any = call("shell", json.dumps({"commands": commands, "timeout_ms": 900}), id="c1")
    turns: Any = [[first], [call("shell", '{"commands": ["cat x"]}', id="c2")], DONE, DONE]
    async with interpreting(*turns) as served, messages_client(served) as client:
        answer = await send(client, tools=[BASH], tool_choice={"type": "tool", "name": "code_execution"})
        before = chat_requests(served)[-1].messages
        await send(client, [*HI, replay(answer), GO_ON], tools=[BASH], container=answer.container.id)
        again = chat_requests(served)[-1].messages
    uses = [block for block in answer.content if block.type == "server_tool_use"]
    results = [block for block in answer.content if block.type == "bash_code_execution_tool_result"]
    assert {use.name for use in uses} == {"bash_code_execution"}
    assert [use.input["command"] for use in uses] == [*commands, "cat x"]
    assert [result.tool_use_id for result in results] == [use.id for use in uses]
    assert len({use.id for use in uses}) == len(uses)
    one, two, late, last = (result.content for result in results)
    assert (one.stdout, one.stderr, one.return_code) == ("one\n", "two\n", 3)
    assert (two.return_code, late.error_code, last.stdout) == (0, "execution_time_exceeded", "5\n")
    assert (answer.content[-1].text, answer.stop_reason) == ("Done.", "end_turn")
    assert timedelta(minutes=19) < answer.container.expires_at - datetime.now(UTC) <= timedelta(minutes=20)
    assert again[: len(before)] == before


async def test_calls_of_another_server_are_read_as_commands_and_calls() -> None:
    blocks: Any = [
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "bash_code_execution", "input": {"command": "pwd"}},
        {
            "type": "bash_code_execution_tool_result",
            "tool_use_id": "srvtoolu_1",
            "content": {
                "type": "bash_code_execution_result",
                "stdout": "/home",
                "stderr": "",
                "return_code": 2,
                "content": [],
            },
        },
        {
            "type": "server_tool_use",
            "id": "srvtoolu_2",
            "name": "text_editor_code_execution",
            "input": {"command": "view", "path": "/a.txt"},
        },
        {
            "type": "text_editor_code_execution_tool_result",
            "tool_use_id": "srvtoolu_2",
            "content": {"type": "text_editor_code_execution_view_result", "file_type": "text", "content": "the text"},
        },
        {"type": "text", "text": "Done."},
    ]
    async with serving(scripted(DONE)) as served, messages_client(served) as client:
        await create(client, [*HI, {"role": "assistant", "content": blocks}, GO_ON])
        sent = chat_requests(served)[0].messages
    assert [message.content for message in sent if message.role == "tool"] == ["/home\nexit code 2", "the text"]
    calls = [plain([message])[0].get("tool_calls", ()) for message in sent]
    assert [called["function"]["name"] for each in calls for called in each] == ["shell", "text_editor_code_execution"]


@needs_sandbox
async def test_what_a_message_alone_shows_is_in_no_response() -> None:
    turns: Any = [[code("1 / 0", id="c1")], [call("shell", '{"commands": ["true"]}', id="c2")], DONE]
    tools: Any = [
        {"type": "code_interpreter", "container": {"type": "auto"}},
        {"type": "shell", "environment": {"type": "container_auto"}},
    ]
    async with interpreting(*turns) as served:
        response = await served.client.responses.create(model="scripted", input="hi", tools=tools)
        retrieved = await served.client.responses.retrieve(response.id)
    for each in (response, retrieved):
        assert [item.type for item in each.output][:3] == ["code_interpreter_call", "shell_call", "shell_call_output"]
        assert "container_expires_at" not in each.to_json()
        assert '"outcome"' not in each.output[0].to_json()


@needs_sandbox
async def test_a_program_is_shown_while_it_runs() -> None:
    """Its block comes before its result, which a client would wait for in silence otherwise."""
    turn = [code("import time", "time.sleep(100)")]
    patient: Any = {"timeout_s": 100}
    async with interpreting(turn, python=patient) as served, messages_client(served) as client:
        request: Any = {"model": "scripted", "max_tokens": 100, "messages": HI, "tools": [EXECUTION]}
        async with asyncio.timeout(50), client.messages.stream(**request) as events:
            async for event in events:
                if event.type == "content_block_stop":
                    break
            (use,) = events.current_message_snapshot.content
    assert use.type == "server_tool_use"
    assert use.input == {"code": "import time\ntime.sleep(100)"}


@needs_sandbox
async def test_a_program_reads_an_uploaded_file_that_the_model_does_not() -> None:
    files: Any = {"files": {"provider": "kv"}}
    turns: Any = [[code("import glob\nprint(open(glob.glob('/mnt/data/*')[0]).read())")], DONE]
    async with interpreting(*turns, more=files) as served, messages_client(served) as client:
        file = await served.client.files.create(file=("t.csv", b"a,b\n1,2"), purpose="user_data")
        upload: Any = {"type": "container_upload", "file_id": file.id}
        content = [{"type": "text", "text": "Read it."}, upload]
        answer = await create(client, [{"role": "user", "content": content}], tools=[EXECUTION])
        sent_messages = chat_requests(served)[0].messages
        with pytest.raises(BadRequestError, match="needs a 'code_execution' tool"):
            await create(client, [{"role": "user", "content": content}])
    assert answer.content[1].content.stdout == "a,b\n1,2\n"
    assert "1,2" not in str(sent_messages)


@both
async def test_a_tool_of_an_mcp_server_runs_and_its_result_is_read_again(send: Any) -> None:
    echo = call("real__echo", '{"text": "hello"}', id="c1")
    async with stacked([echo], DONE, DONE) as (served, real), messages_client(served) as client:
        fields: Any = {"mcp_servers": [server_of(real)], "tools": [toolset(), ADD]}
        answer = await beta(send, client, **fields)
        names = offered(served)
        await beta(send, client, [*HI, replay(answer), GO_ON], **fields)
        again = chat_requests(served)[-1].messages
    use, result, text = answer.content
    assert (use.type, use.server_name, use.name, use.input) == ("mcp_tool_use", "real", "echo", {"text": "hello"})
    assert (result.type, result.tool_use_id, result.is_error) == ("mcp_tool_result", use.id, False)
    assert [part.text for part in result.content] == ["hello"]
    assert (text.text, answer.stop_reason) == ("Done.", "end_turn")
    assert {"real__echo", "real__note", "add"} <= {*names}
    assert [message.role for message in again] == ["user", "assistant", "tool", "assistant", "user"]
    assert again[2].content == "hello"


@both
async def test_a_failed_call_of_an_mcp_server_is_a_result_with_an_error(send: Any) -> None:
    async with stacked([call("real__fail", "{}")], DONE) as (served, real), messages_client(served) as client:
        answer = await beta(send, client, mcp_servers=[server_of(real)], tools=[toolset()])
        results = tool_outputs(served)
    result = answer.content[1]
    assert (result.type, result.is_error) == ("mcp_tool_result", True)
    assert result.content[0].text
    assert results


async def test_the_token_of_an_mcp_server_reaches_it_and_its_tools_are_chosen_by_name() -> None:
    only_note = {"default_config": {"enabled": False}, "configs": {"note": {"enabled": True}}}
    older = {"tool_configuration": {"allowed_tools": ["echo"]}}
    off_config = {"enabled": False}
    off = toolset(default_config=off_config)
    async with stacked(*[DONE] * 6) as (served, real), messages_client(served) as client:
        server = server_of(real, authorization_token="token-1")
        await beta(create, client, mcp_servers=[server])
        everything = sorted(offered(served))
        others = [name for name in everything if name != "real__fail"]
        assert len(others) == len(everything) - 1
        for fields, names in (
            ({"tools": [toolset(**only_note)]}, ["real__note"]),
            ({"mcp_servers": [{**server, **older}]}, ["real__echo"]),
            ({"tools": [off, ADD]}, ["add"]),
            ({"tools": [toolset(configs={"fail": {"enabled": False}, "note": {"enabled": True}})]}, others),
            ({"tools": [toolset(configs={"echo": off_config})], "mcp_servers": [{**server, **older}]}, []),
        ):
            request: Any = {"mcp_servers": [server], **fields}
            await beta(create, client, **request)
            assert sorted(offered(served)) == names
    assert {headers.get("authorization") for headers in real.sent} == {"Bearer token-1"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": [toolset()], "mcp_servers": []}, "no entry of 'mcp_servers' has the name 'real'"),
        ({"tools": [{"type": "mcp_toolset"}]}, "tools\\[0\\].mcp_server_name"),
        ({"tools": [toolset(), toolset()]}, "two toolsets name the server 'real'"),
        ({"mcp_servers": [{"type": "url", "name": "a b", "url": "https://a.example"}]}, "mcp_servers\\[0\\].name"),
        ({"mcp_servers": [{"type": "stdio", "name": "a", "url": "x"}]}, "mcp_servers\\[0\\].type"),
        ({"container": {"id": None, "skills": [{"skill_id": "pdf"}]}, "tools": [EXECUTION]}, "container.skills"),
    ],
)
async def test_what_is_wrong_with_a_tool_of_the_server_is_named(fields: Any, words: str) -> None:
    server = {"type": "url", "name": "real", "url": "https://mcp.example"}
    async with serving(scripted(DONE)) as served, messages_client(served) as client:
        with pytest.raises(BadRequestError, match=words):
            await beta(create, client, **{"mcp_servers": [server], **fields})


@both
async def test_a_deferred_tool_is_found_by_a_search_of_the_server(send: Any) -> None:
    turns: Any = [[call("tool_search", '{"query": "weather"}')], [call("get_weather", id="c2")], DONE]
    async with serving(scripted(*turns)) as served, messages_client(served) as client:
        answer = await send(client, tools=[SEARCH, WEATHER, ADD])
        done: Any = {"type": "tool_result", "tool_use_id": "c2", "content": "sunny"}
        messages = [*HI, replay(answer), {"role": "user", "content": [done]}]
        last = await send(client, messages, tools=[SEARCH, WEATHER, ADD])
        before, loaded, later = ([tool.name for tool in chat.tools or ()] for chat in chat_requests(served))
    use, result, called = answer.content
    assert (use.type, use.name, use.input) == ("server_tool_use", "tool_search_tool_bm25", {"query": "weather"})
    assert (result.type, result.tool_use_id) == ("tool_search_tool_result", use.id)
    assert [reference.tool_name for reference in result.content.tool_references] == ["get_weather"]
    assert (called.type, called.name, answer.stop_reason) == ("tool_use", "get_weather", "tool_use")
    assert (last.content[0].text, last.stop_reason) == ("Done.", "end_turn")
    assert "get_weather" not in before
    assert "get_weather" in loaded
    assert "get_weather" in later


@both
async def test_a_deferred_mcp_server_is_found_by_its_name(send: Any) -> None:
    turns: Any = [[call("tool_search", '{"query": "real"}')], [call("real__echo", '{"text": "hello"}')], DONE, DONE]
    async with stacked(*turns) as (served, real), messages_client(served) as client:
        deferred = toolset(default_config={"defer_loading": True})
        fields: Any = {"mcp_servers": [server_of(real)], "tools": [SEARCH, deferred]}
        answer = await beta(send, client, **fields)
        await beta(send, client, [*HI, replay(answer), GO_ON], **fields)
        first, *later = ([tool.name for tool in chat.tools or ()] for chat in chat_requests(served))
    assert [block.type for block in answer.content] == [
        *("server_tool_use", "tool_search_tool_result", "mcp_tool_use", "mcp_tool_result", "text")
    ]
    assert answer.content[1].content.tool_references[0].tool_name == "real"
    assert "real__echo" not in first
    assert all("real__echo" in names for names in later)


async def test_without_a_search_for_tools_nothing_is_deferred() -> None:
    async with serving(scripted(DONE)) as served, messages_client(served) as client:
        await create(client, tools=[WEATHER, ADD])
        assert sorted(offered(served)) == ["add", "get_weather"]


@both
async def test_pages_are_opened_without_a_search(send: Any) -> None:
    async with web() as there:
        url = f"{there.site.url}/rome"
        turns: Any = [[call("open_page", json.dumps({"page": url}))], DONE]
        async with serving(model(*turns), more=there.sections) as served, messages_client(served) as client:
            answer = await send(client, tools=[FETCH])
            names = offered(served)
    use, result, text = answer.content
    assert (use.type, use.name, use.input) == ("server_tool_use", "web_fetch", {"url": url})
    assert (result.type, result.content.url) == ("web_fetch_tool_result", url)
    assert text.text == "Done."
    assert answer.usage.server_tool_use.web_fetch_requests == 1
    assert names == ["open_page", "find_in_page"]


async def test_a_search_that_also_fetches_is_one_tool() -> None:
    search: Any = {"type": "web_search_20250305", "name": "web_search"}
    async with browsing(DONE) as (served, _), messages_client(served) as client:
        await create(client, tools=[FETCH, search])
        assert offered(served) == ["web_search", "open_page", "find_in_page"]


async def test_pages_need_a_provider_that_opens_them() -> None:
    async with serving(scripted(DONE)) as served, messages_client(served) as client:
        with pytest.raises(BadRequestError, match="opens pages"):
            await create(client, tools=[FETCH])


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("code_interpreter", {"tools": [EXECUTION]}),
        ("mcp", {"mcp_servers": [{"type": "url", "name": "real", "url": "https://mcp.example"}]}),
        ("web_search", {"tools": [FETCH]}),
    ],
)
async def test_tools_that_a_project_may_not_use_are_refused(kind: str, fields: Any) -> None:
    async with serving_accounts() as served:
        organization = organization_of(served.client)
        project_id, key = await new_project(organization)
        permissions = organization.projects.hosted_tool_permissions
        await permissions.update(project_id, **{kind: {"enabled": False}})
        async with messages_client(served, key) as client:
            with pytest.raises(PermissionDeniedError):
                await beta(create, client, **fields)
