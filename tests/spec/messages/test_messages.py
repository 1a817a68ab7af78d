"""/v1/messages through the official SDK: text, streams, tools, thinking, images, documents and options."""

from typing import Any

import pytest

from stack.http.messages.tools import shorten_name
from tests.support.models.images import PIXEL_URL
from tests.support.sdk.messages import ADD, HI, create, messages_client, replay, stream
from tests.support.servers.serving import Served, scripted, serving

PIXEL = PIXEL_URL.partition(",")[2]


def last_chat(served: Served) -> Any:
    inference: Any = served.stack.inference
    return inference.requests[-1]


async def test_a_message_and_a_stream_hold_the_same_text() -> None:
    async with serving(scripted([{"text": ["Hel", "lo ", "there"]}])) as served, messages_client(served) as client:
        whole, streamed = await create(client, system="be kind"), await stream(client, system="be kind")
    for message in (whole, streamed):
        assert message.id.startswith("msg_")
        assert (message.type, message.role, message.model) == ("message", "assistant", "scripted")
        assert [block.text for block in message.content] == ["Hello there"]
        assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
        assert (message.usage.input_tokens, message.usage.output_tokens) == (4, 3)


async def test_nothing_is_stored() -> None:
    async with serving() as served, messages_client(served) as client:
        await create(client)
        listed = await served.client.get("/responses", cast_to=object)
    assert listed["data"] == []  # type: ignore[index] - JSON


async def test_a_system_prompt_of_blocks_leaves_out_the_billing_header() -> None:
    """The header differs in every request of Claude Code, and would spoil the prompt cache."""
    system: Any = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=abc"},
        {"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "be brief"},
    ]
    messages: Any = [*HI, {"role": "assistant", "content": "hello"}, {"role": "system", "content": "be rude"}]
    async with serving() as served, messages_client(served) as client:
        await create(client, messages, system=system)
        chat = last_chat(served)
    texts = [(message.role, message.content) for message in chat.messages]
    assert [role for role, _ in texts][1:] == ["user", "assistant", "developer"]
    assert texts[0][1] == "be kind\n\nbe brief"
    assert "rude" in str(texts[3][1])


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_round_trip_of_tools_keeps_calls_results_and_thinking(is_streamed: bool) -> None:
    """The model reads its own sealed reasoning again, between its calls."""
    turns: Any = [
        [{"reasoning": ["I ", "add"]}, {"call": "add", "arguments": ['{"a"', ": 1}"], "id": "call_9"}],
        [{"text": "2"}],
    ]
    async with serving(scripted(*turns)) as served, messages_client(served) as client:
        send = stream if is_streamed else create
        answer = await send(client, tools=[ADD], tool_choice={"type": "any", "disable_parallel_tool_use": True})
        first = last_chat(served)
        results: Any = {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_9", "content": [{"type": "text", "text": "two"}]},
                {"type": "text", "text": "go on"},
            ],
        }
        last = await send(client, [*HI, replay(answer), results], tools=[ADD])
        chat = last_chat(served)
    thinking, call = answer.content
    assert (thinking.thinking, thinking.signature[:4]) == ("I add", "rs3.")
    assert (call.id, call.name, call.input, answer.stop_reason) == ("call_9", "add", {"a": 1}, "tool_use")
    assert (first.tool_choice, first.parallel_tool_calls) == ("required", False)
    assert [message.role for message in chat.messages] == ["user", "assistant", "tool", "user"]
    assert (chat.messages[1].reasoning, chat.messages[2].content) == ("I add", "two")
    assert [block.text for block in last.content] == ["2"]


async def test_a_failed_tool_says_so_to_the_model() -> None:
    messages: Any = [
        *HI,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "boom", "is_error": True}],
        },
    ]
    async with serving() as served, messages_client(served) as client:
        await create(client, messages, tools=[ADD])
        assert last_chat(served).messages[-1].content == "The tool failed:\nboom"


async def test_images_and_documents_reach_the_model() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
    text = {"type": "document", "title": "Notes", "source": {"type": "text", "media_type": "text/plain", "data": "N1"}}
    result = {"type": "search_result", "source": "s.example", "title": "T", "content": [{"type": "text", "text": "F1"}]}
    messages: Any = [{"role": "user", "content": [image, text, result, {"type": "text", "text": "look"}]}]
    async with serving() as served, messages_client(served) as client:
        await create(client, messages)
        parts = last_chat(served).messages[-1].content
    assert parts[0].image_url.url == f"data:image/png;base64,{PIXEL}"
    assert [part.text for part in parts[1:]] == ["Notes\nN1", "T\ns.example\nF1", "look"]


async def test_options_reach_the_model() -> None:
    schema: Any = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    config: Any = {"effort": "max", "format": {"type": "json_schema", "schema": schema}}
    async with serving(scripted([{"text": '{"a": 1}'}])) as served, messages_client(served) as client:
        await create(
            client,
            max_tokens=7,
            stop_sequences=["END"],
            temperature=0.5,
            top_k=5,
            output_config=config,
            metadata={"user_id": "u"},
        )
        chat = last_chat(served)
    assert (chat.max_completion_tokens, chat.stop, chat.temperature, chat.top_k) == (7, ["END"], 0.5, 5)
    assert (chat.reasoning_effort, chat.response_format.json_schema.schema_) == ("high", schema)


@pytest.mark.parametrize("send", [create, stream])
async def test_a_stop_sequence_is_the_reason_of_the_end(send: Any) -> None:
    turn: Any = [{"text": "one"}, {"finish": "stop", "stop_sequence": "END"}]
    async with serving(scripted(turn)) as served, messages_client(served) as client:
        answer = await send(client, stop_sequences=["END", "STOP"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "END")


async def test_thinking_can_be_omitted_and_switched_off() -> None:
    turn: Any = [{"reasoning": "secret"}, {"text": "hi"}]
    async with serving(scripted(turn)) as served, messages_client(served) as client:
        for send in (create, stream):
            omitted = await send(client, thinking={"type": "adaptive", "display": "omitted"})
            off = await send(client, thinking={"type": "disabled"})
            assert (omitted.content[0].thinking, omitted.content[0].signature[:4]) == ("", "rs3.")
            assert [block.type for block in off.content] == ["text"]
        assert last_chat(served).reasoning_effort == "none"


async def test_output_that_a_client_does_not_see_does_not_end_its_stream() -> None:
    """The first output comes alone, after the head of the stream, and has no frame."""
    turn: Any = [{"wait_s": 0.2}, {"reasoning": "secret"}, {"wait_s": 0.1}, {"text": "hi"}]
    async with serving(scripted(turn)) as served, messages_client(served) as client:
        answer = await stream(client, thinking={"type": "disabled"})
    assert [block.text for block in answer.content] == ["hi"]


async def test_a_long_name_of_a_tool_comes_back_whole() -> None:
    """Names of MCP tools may have 128 characters here, and 64 at a model's server."""
    name = "mcp__" + "n" * 100
    short = shorten_name(name)
    call: Any = {"call": short, "arguments": '{"a": 1}'}
    async with serving(scripted([call])) as served, messages_client(served) as client:
        for send in (create, stream):
            answer = await send(client, tools=[{**ADD, "name": name}], tool_choice={"type": "tool", "name": name})
            assert (answer.content[0].name, answer.stop_reason) == (name, "tool_use")
            assert last_chat(served).tools[0].name == short
    assert len(short) == 64


async def test_tools_that_clients_run_have_their_usual_form() -> None:
    tools: Any = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
        {"type": "custom", **ADD},
    ]
    async with serving() as served, messages_client(served) as client:
        await create(client, tools=tools)
        functions = [tool.function for tool in last_chat(served).tools]
    assert [function.name for function in functions] == ["bash", "str_replace_based_edit_tool", "add"]
    assert "command" in functions[0].parameters["properties"]


async def test_a_message_without_tokens_only_warms_the_cache() -> None:
    async with serving() as served, messages_client(served) as client:
        answer = await create(client, max_tokens=0)
        assert (answer.content, answer.stop_reason) == ([], "max_tokens")


async def test_tokens_are_counted_as_the_model_reads_them() -> None:
    async with serving() as served, messages_client(served) as client:
        count = await client.messages.count_tokens(model="scripted", messages=HI, system="be kind")
        assert count.input_tokens == 4


async def test_models_are_listed_in_the_form_of_who_asks() -> None:
    router: Any = {
        "provider": "router",
        "providers": {"one": scripted([{"text": "hi"}])},
        "aliases": {"claude-sonnet-5-5": "scripted"},
    }
    async with serving(router) as served, messages_client(served) as client:
        listed = [model.id async for model in client.models.list(limit=1)]
        one = await client.models.retrieve("claude-sonnet-5-5")
        openai_ids = [model.id async for model in served.client.models.list()]
        answer = await create(client, model="claude-sonnet-5-5")
    assert listed == openai_ids == ["scripted", "claude-sonnet-5-5"]
    assert (one.id, one.type, one.lifecycle) == ("claude-sonnet-5-5", "model", "active")
    assert answer.model == "claude-sonnet-5-5"
