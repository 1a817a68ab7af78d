"""Tools with items of their own that the client runs: shells, patches, searches for tools, and namespaces."""

from collections.abc import AsyncGenerator
from typing import Any

import pytest
import pytest_asyncio
from openai import InternalServerError

from tests.support.sdk.answer_shapes import Script, call, function
from tests.support.sdk.requests import bare, chat_requests, create, messages, refusal, responses, stream
from tests.support.servers.serving import Served, scripted, serving

Json = dict[str, Any]
DONE: Script = [{"text": "Done."}]
USER: Json = {"role": "user", "content": "hi"}

TOOLS: dict[str, tuple[Json, str, Json, Json, str]] = {
    "local_shell": (
        {"type": "local_shell"},
        '{"command": ["ls", "-l"], "timeout_ms": 5}',
        {"type": "local_shell_call", "action": {"type": "exec", "command": ["ls", "-l"], "timeout_ms": 5, "env": {}}},
        {"type": "local_shell_call_output", "output": '{"output": "a b"}'},
        '{"output": "a b"}',
    ),
    "shell": (
        {"type": "shell", "environment": {"type": "local"}},
        '{"commands": ["ls", "pwd"]}',
        {
            "type": "shell_call",
            "action": {"commands": ["ls", "pwd"], "timeout_ms": None, "max_output_length": None},
            "environment": {"type": "local"},
        },
        {
            "type": "shell_call_output",
            "output": [
                {"stdout": "a b", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}},
                {"stdout": "", "stderr": "slow", "outcome": {"type": "timeout"}},
            ],
        },
        "a b\nexit code 0\n\nstderr:\nslow\nstopped: it took too long",
    ),
    "apply_patch": (
        {"type": "apply_patch"},
        '{"type": "update_file", "path": "a.py", "diff": "@@\\n-a\\n+b"}',
        {
            "type": "apply_patch_call",
            "operation": {"type": "update_file", "path": "a.py", "diff": "@@\n-a\n+b"},
        },
        {"type": "apply_patch_call_output", "status": "failed", "output": "No such file."},
        "No such file.",
    ),
    "tool_search": (
        {"type": "tool_search", "execution": "client"},
        '{"query": "weather"}',
        {"type": "tool_search_call", "execution": "client", "arguments": {"query": "weather"}},
        {"type": "tool_search_output", "execution": "client", "tools": []},
        "No tool was found.",
    ),
}


@pytest_asyncio.fixture
async def served() -> AsyncGenerator[Served]:
    async with serving() as served:
        yield served


def offered(served: Served) -> list[str]:
    """The names of what the model was offered last."""
    return [tool.name for tool in chat_requests(served)[-1].tools or ()]


def call_fields(item: Any) -> Json:
    """An item without its ids and its status."""
    fields = item.model_dump(mode="json", exclude_unset=True)
    return {key: value for key, value in fields.items() if key not in ("id", "call_id", "status")}


@pytest.mark.parametrize("name", TOOLS)
async def test_a_call_comes_out_in_its_own_item(name: str) -> None:
    tool, written, item, _, _ = TOOLS[name]
    async with serving(scripted([call(name, written[:5], written[5:], id="c1")])) as served:
        events = await stream(served, tools=[tool])
        assert offered(served) == [name]
    response = events[-1].response
    assert [call_fields(each) for each in response.output] == [item]
    assert (response.output[0].call_id, response.output[0].status) == ("c1", "completed")
    assert response.status == "completed"
    types = [event.type for event in events[2:-1] if "shell_call_command" not in event.type]
    assert types == ["response.output_item.added", "response.output_item.done"]


@pytest.mark.parametrize("how", ["chained", "sent back", "referred to"])
@pytest.mark.parametrize("name", TOOLS)
async def test_its_output_goes_back_to_the_model(name: str, how: str) -> None:
    tool, written, _, output, sent = TOOLS[name]
    async with serving(scripted([{"reasoning": "hm"}, call(name, written, id="c1")], DONE)) as served:
        first = await create(served, tools=[tool])
        answer = {**output, "id" if name == "local_shell" else "call_id": "c1"}
        match how:
            case "chained":
                second = await create(served, tools=[tool], input=[answer], previous_response_id=first.id)
            case "sent back":
                second = await create(served, tools=[tool], input=[USER, *first.output, answer])
            case _:
                references = [{"type": "item_reference", "id": item.id} for item in first.output]
                second = await create(served, tools=[tool], input=[USER, *references, answer])
        _, called, result = messages(served)
    (function,) = [each["function"] for each in called["tool_calls"]]
    assert function["name"] == name
    if how == "chained":
        assert function["arguments"] == written
    assert result == {"role": "tool", "tool_call_id": "c1", "content": sent}
    assert called["reasoning"] == "hm"
    assert second.output_text == "Done."


async def test_a_local_shells_output_may_name_its_item() -> None:
    tool, written, *_ = TOOLS["local_shell"]
    async with serving(scripted([call("local_shell", written, id="c1")], DONE)) as served:
        first = await create(served, tools=[tool])
        output = {"type": "local_shell_call_output", "id": first.output[0].id, "output": "a"}
        await create(served, tools=[tool], input=[output], previous_response_id=first.id)
        assert messages(served)[-1]["tool_call_id"] == "c1"


@pytest.mark.parametrize("name", TOOLS)
async def test_it_is_stored_as_it_was_sent(name: str) -> None:
    tool, written, *_ = TOOLS[name]
    async with serving(scripted([call(name, written)])) as served:
        async with responses(served).stream(model="scripted", input="hi", tools=[tool]) as events:
            final = await events.get_final_response()
        assert bare(await responses(served).retrieve(final.id)) == bare(final)


async def test_several_calls_are_returned_with_those_of_functions() -> None:
    shell = call("shell", '{"commands": ["ls"]}')
    script: Script = [{"calls": [shell, call("get", "{}"), {**shell}]}]
    async with serving(scripted(script)) as served:
        response = await create(served, tools=[{"type": "shell"}, function("get")])
    assert sorted(item.type for item in response.output) == ["function_call", "shell_call", "shell_call"]


BAD: dict[str, tuple[str, str, str]] = {
    "no JSON": ("shell", "{oops", "not JSON"),
    "no object": ("shell", "[]", "not a JSON object"),
    "no commands": ("shell", '{"commands": []}', "`commands`"),
    "no command": ("local_shell", "{}", "`command`"),
    "no diff": ("apply_patch", '{"type": "update_file", "path": "a"}', "needs a `diff`"),
    "no such operation": ("apply_patch", '{"type": "move_file", "path": "a"}', "`type`"),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
async def test_bad_arguments_are_an_error_for_the_model_which_may_try_again(case: tuple[str, str, str]) -> None:
    name, arguments, words = case
    tool, written, item, _, _ = TOOLS[name]
    turns: list[Script] = [[call(name, arguments, id="c1")], [call(name, written, id="c2")]]
    async with serving(scripted(*turns)) as served:
        response = await create(served, tools=[tool])
        called, sent_result = messages(served)[1:]
    assert [call_fields(each) for each in response.output] == [item]
    assert called["tool_calls"][0]["function"] == {"name": name, "arguments": arguments}
    assert words in sent_result["content"]


async def test_a_model_that_never_gets_it_right_is_not_asked_for_ever() -> None:
    async with serving(scripted([{"reasoning": "hm"}, call("shell", "{}")])) as served:
        events = await stream(served, tools=[{"type": "shell"}])
        assert [bool(chat.tools) for chat in chat_requests(served)] == [True, True, True, False]
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.incomplete_details.reason == "max_messages"


async def test_a_call_that_is_demanded_has_to_be_right_the_second_time() -> None:
    wrong = call("shell", "{}")
    async with serving(scripted([wrong], [call("shell", '{"commands": ["ls"]}')], [wrong])) as served:
        fields: Json = {"tools": [{"type": "shell"}], "tool_choice": {"type": "shell"}}
        response = await create(served, **fields)
        assert [item.type for item in response.output] == ["shell_call"]
        assert messages(served)[-1]["role"] == "tool"
        with pytest.raises(InternalServerError, match="no call of `shell`"):
            await create(served, **fields, input="again")


async def test_a_call_that_was_cut_off_is_no_call() -> None:
    async with serving(scripted([call("shell", '{"commands": ["rm -rf'), {"finish": "length"}])) as served:
        response = await create(served, tools=[{"type": "shell"}])
    assert (response.status, response.output) == ("incomplete", [])


async def test_deleting_a_file_needs_no_diff() -> None:
    async with serving(scripted([call("apply_patch", '{"type": "delete_file", "path": "a"}')])) as served:
        response = await create(served, tools=[{"type": "apply_patch"}])
    assert response.output[0].operation.to_dict() == {"type": "delete_file", "path": "a"}


async def test_skills_are_listed_for_the_model(served: Served) -> None:
    skill = {"name": "pdf", "description": "Reads PDF.", "path": "/skills/pdf"}
    response = await create(served, tools=[{"type": "shell", "environment": {"type": "local", "skills": [skill]}}])
    assert response.tools[0].environment.skills[0].name == "pdf"
    assert (
        "pdf (/skills/pdf): Reads PDF."
        in (chat_requests(served)[-1].tools or [])[0].model_dump()["function"]["description"]
    )


@pytest.mark.parametrize("kind", ["shell", "apply_patch"])
async def test_a_tool_can_be_chosen(kind: str) -> None:
    arguments = {"shell": '{"commands": ["ls"]}', "apply_patch": '{"type": "delete_file", "path": "a"}'}[kind]
    async with serving(scripted([call(kind, arguments)])) as served:
        response = await create(served, tools=[{"type": kind}, function("get")], tool_choice={"type": kind})
        choice: Any = chat_requests(served)[-1].tool_choice
    assert response.tool_choice.type == kind
    assert choice.name == kind


async def test_a_function_may_not_take_the_name_of_a_typed_tool(served: Served) -> None:
    assert (await refusal(served, tools=[{"type": "shell"}, function("shell")]))["param"] == "tools[1].name"


# --- namespaces ------------------------------------------------------------------------------------------------------

CRM: Json = {
    "type": "namespace",
    "name": "crm",
    "description": "Customers.",
    "tools": [function("find"), {"type": "custom", "name": "note"}],
}


async def test_functions_of_a_namespace_carry_it() -> None:
    calls = [call("crm__find", '{"a": 1}', id="c1"), call("crm__note", "hm", id="c2", custom=True)]
    async with serving(scripted([{"calls": calls}], DONE)) as served:
        first = await create(served, tools=[CRM, function("find")])
        assert offered(served) == ["crm__find", "crm__note", "find"]
        assert [(item.type, item.name, item.namespace) for item in first.output] == [
            ("function_call", "find", "crm"),
            ("custom_tool_call", "note", "crm"),
        ]
        outputs = [
            {"type": "function_call_output", "call_id": "c1", "output": "42"},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": "ok"},
        ]
        await create(served, tools=[CRM], input=[USER, *first.output, *outputs])
        called = messages(served)[1]["tool_calls"]
    assert called[0]["function"] == {"name": "crm__find", "arguments": '{"a": 1}'}
    assert called[1]["custom"] == {"name": "crm__note", "input": "hm"}
    assert first.tools[0].name == "crm"
    assert first.tools[0].tools[0].name == "find"


async def test_a_function_of_a_namespace_can_be_chosen() -> None:
    async with serving(scripted([call("crm__note", custom=True)], [call("crm__find")])) as served:
        response = await create(served, tools=[CRM], tool_choice={"type": "function", "name": "find"})
        choice: Any = chat_requests(served)[-1].tool_choice
    assert choice.name == "crm__find"
    assert [(item.namespace, item.name) for item in response.output] == [("crm", "find")]


async def test_a_schema_in_a_namespace_is_checked(served: Served) -> None:
    bad = {**CRM, "tools": [{**function("find"), "parameters": {"type": "array"}}]}
    assert (await refusal(served, tools=[bad]))["param"] == "tools[0].tools[0].parameters"


async def test_two_functions_of_one_name_in_a_namespace_are_refused(served: Served) -> None:
    twice = {**CRM, "tools": [function("find"), function("find")]}
    assert (await refusal(served, tools=[twice]))["param"] == "tools[0].tools[1].name"


# --- tools that are loaded late --------------------------------------------------------------------------------------

SEARCH: Json = {"type": "tool_search", "execution": "client", "parameters": {"type": "object", "properties": {}}}
LATE = function("weather", defer_loading=True)


async def test_late_tools_are_offered_once_they_were_found() -> None:
    turns: list[Script] = [
        [call("tool_search", '{"query": "w"}', id="c1")],
        [{"calls": [call("weather", id="c2"), call("crm__find", id="c3")]}],
        DONE,
    ]
    async with serving(scripted(*turns)) as served:
        tools = [SEARCH, LATE, function("now")]
        first = await create(served, tools=tools)
        assert offered(served) == ["now", "tool_search"]
        loaded = {"type": "tool_search_output", "call_id": "c1", "execution": "client", "tools": [LATE, CRM]}
        second = await create(served, tools=tools, input=[loaded], previous_response_id=first.id)
        assert offered(served) == ["weather", "now", "crm__find", "crm__note", "tool_search"]
        sent_text = messages(served)[-1]["content"]
        outputs = [{"type": "function_call_output", "call_id": each, "output": "42"} for each in ("c2", "c3")]
        await create(served, tools=tools, input=outputs, previous_response_id=second.id)
        assert "weather" in offered(served)
    assert '"name":"weather"' in sent_text
    assert [(item.name, item.namespace) for item in second.output] == [("weather", None), ("find", "crm")]


async def test_where_the_server_is_to_search_late_tools_wait_for_its_search(served: Served) -> None:
    await create(served, tools=[{"type": "tool_search"}, LATE])
    assert offered(served) == ["tool_search"]


async def test_late_tools_without_a_search_are_offered_at_once(served: Served) -> None:
    await create(served, tools=[LATE])
    assert offered(served) == ["weather"]
