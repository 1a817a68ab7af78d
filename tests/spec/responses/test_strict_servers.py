"""Servers whose chat templates refuse what others take: late instructions, messages of one role in a row, results of
tools, forms of the content, and calls of the history whose arguments are no object."""

import json
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any, Final, cast

import pytest
from openai import BadRequestError

from tests.providers.inference.remote import LIMITS
from tests.support.models.images import PIXEL_URL
from tests.support.servers.mcp_server import RealServer
from tests.support.servers.mcp_stack import mcp, with_mcp
from tests.support.servers.serving import Served, serving
from tests.support.servers.upstream_server import (
    Answer,
    Received,
    UpstreamServer,
    call_chunks,
    error_answer,
    event,
    json_answer,
    plain_answer,
    stream,
    text_chunks,
)

Messages = Sequence[dict[str, Any]]
Template = Callable[[Messages], str | None]
"""A chat template: returns its error for messages that it refuses, otherwise none."""

LOOKUP: Final[dict[str, Any]] = {"type": "function", "name": "lookup", "parameters": {"type": "object"}}


def roles(messages: Messages) -> list[str]:
    return [message["role"] for message in messages]


def only_first(wording: str) -> Template:
    return lambda messages: wording if "system" in roles(messages)[1:] else None


def alternating(wording: str) -> Template:
    def find_refusal(messages: Messages) -> str | None:
        turns = [role for role in roles(messages) if role != "system"]
        in_a_row = any(first == second for first, second in pairwise(turns))
        return wording if in_a_row or "system" in roles(messages)[1:] else None

    return find_refusal


def without_system(wording: str) -> Template:
    def find_refusal(messages: Messages) -> str | None:
        turns = roles(messages)
        in_a_row = any(first == second for first, second in pairwise(turns))
        return wording if in_a_row or {*turns} - {"user", "assistant"} else None

    return find_refusal


TEMPLATES: Final[dict[str, Template]] = {
    wording: template(wording)
    for template, wordings in (
        (
            only_first,
            (
                "System message must be at the beginning.",
                "System message must be first",
                "Unexpected role 'system' after role 'user'",
                "Unexpected message role.",
                "Only the first message can be a system message",
                "Multiple system messages are not supported",
                "Expected last role User or Tool (or Assistant with prefix True) for serving but got system",
            ),
        ),
        (
            alternating,
            (
                "Conversation roles must alternate user/assistant/user/assistant/...",
                "After the optional system message, conversation roles must alternate user and assistant roles",
                'roles must alternate between "user" and "assistant", but multiple "user" roles are in a row',
            ),
        ),
        (
            without_system,
            (
                "System role not supported",
                "Only user and assistant roles are supported!",
                "Unknown role: system",
                "Unsupported message role 'system'",
            ),
        ),
    )
    for wording in wordings
}
SHAPES: Final[dict[str, Callable[[str], Answer]]] = {
    "400": lambda text: error_answer(400, text),
    "500 of llama.cpp": lambda text: error_answer(500, f"Jinja Exception: {text}"),
    "422 as text": lambda text: json_answer({"error": f"Template error: {text}"}, 422),
    "200 with an error": lambda text: json_answer({"object": "error", "message": text, "code": 400}),
    "200 with an event": lambda text: plain_answer(event({"error": {"message": text}})),
}


@asynccontextmanager
async def strict_server(template: Template, shape: str = "400") -> AsyncGenerator[tuple[Served, UpstreamServer]]:
    """A stack over a server with this template, which must refuse no more than a few chats."""

    def answer(received: Received) -> Answer:
        refusal = template(received.json["messages"])
        if refusal is None:
            return stream(text_chunks("ok"))
        refusals.append(refusal)
        return SHAPES[shape](refusal)

    refusals: list[str] = []
    async with UpstreamServer() as upstream:
        upstream.routes["/v1/chat/completions"] = answer
        section = {"provider": "vllm", "base_url": upstream.base_url, **LIMITS, "max_retries": 0}
        async with serving(section) as served:
            yield served, upstream
    assert len(refusals) <= 4


async def ask_both(served: Served, **fields: Any) -> list[str]:
    """The texts of a whole and a streamed response."""
    create: Any = served.client.responses.create
    whole = await create(model="fake-model", store=False, **fields)
    events = [event async for event in await create(model="fake-model", store=False, stream=True, **fields)]
    return [whole.output_text, events[-1].response.output_text]


LATE: Final[list[Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "developer", "content": "Answer BLUE."},
    {"role": "user", "content": [{"type": "input_text", "text": "colour?"}]},
]


@pytest.mark.parametrize("wording", TEMPLATES)
async def test_late_instructions_reach_a_model_whose_template_refuses_them(wording: str) -> None:
    """After one refusal, which is remembered, on every route that takes messages."""
    async with strict_server(TEMPLATES[wording]) as (served, upstream):
        assert await ask_both(served, instructions="Be brief.", input=LATE) == ["ok", "ok"]
        count = len(upstream.chats)
        messages: list[Any] = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "hi"},
            {"role": "system", "content": "Answer BLUE."},
        ]
        completion = await served.client.chat.completions.create(model="fake-model", messages=messages)
        assert completion.choices[0].message.content == "ok"
        assert len(upstream.chats) == count + 1
        assert all("Answer BLUE." in str(chat.json["messages"]) for chat in upstream.chats)
        assert all("Be brief." in str(chat.json["messages"]) for chat in upstream.chats)
        assert "colour?" in str(upstream.chats[0].json["messages"])


async def test_instructions_keep_their_role_where_a_template_takes_them_first() -> None:
    """Its words speak of all roles, and mean the late instructions."""
    words = "Only user and assistant roles are supported, with the exception of an initial optional system message!"
    async with strict_server(only_first(words)) as (served, upstream):
        assert await ask_both(served, instructions="Be brief.", input=LATE) == ["ok", "ok"]
        sent = upstream.chats[-1].json["messages"]
    assert roles(sent)[0] == "system"
    assert sent[0]["content"] == "Be brief.\n\nAnswer BLUE."


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_refusal_of_a_template_is_known_in_any_form(shape: str) -> None:
    """Its words are recognised, with any status. Codex sends the developer's message last."""
    template = only_first("System message must be at the beginning.")
    async with strict_server(template, shape) as (served, upstream):
        late = [{"role": "user", "content": "hi"}, {"role": "developer", "content": "late"}]
        assert await ask_both(served, instructions="base", input=late) == ["ok", "ok"]
        sent = upstream.chats[-1].json["messages"]
    assert sent == [{"role": "system", "content": "base\n\nlate"}, {"role": "user", "content": "hi"}]


async def test_a_lenient_server_is_sent_messages_in_their_order() -> None:
    """Nothing moves where nothing is refused."""
    async with strict_server(lambda _: None) as (served, upstream):
        await ask_both(served, input=LATE)
        assert roles(upstream.chats[-1].json["messages"]) == ["user", "assistant", "system", "user"]


async def test_another_refusal_is_not_taken_for_one_of_the_template() -> None:
    """The request fails at once, with its own reason."""
    async with strict_server(lambda _: "temperature must be at most 2") as (served, upstream):
        with pytest.raises(Exception, match="temperature must be at most 2"):
            await ask_both(served, input=LATE)
        assert len(upstream.chats) == 1


# --- any conversation ------------------------------------------------------------------------------------------------


def fields_of(messages: Messages, role: str, name: str) -> list[Any]:
    return [message.get(name) for message in messages if message["role"] == role]


def refuses_turns(messages: Messages, *, knows_tools: bool) -> bool:
    """Return true unless the turns alternate, beginning with the user: where it knows tools, of those without them."""
    turns = [message for message in messages if message["role"] != "system"]
    if knows_tools:
        turns = [turn for turn in turns if turn["role"] != "tool" and not turn.get("tool_calls")]
    return any(turn["role"] != ("user", "assistant")[at % 2] for at, turn in enumerate(turns))


def is_long(call_id: str) -> bool:
    return re.fullmatch("[a-zA-Z0-9]{9}", call_id) is None


def call_ids(messages: Messages) -> list[str]:
    calls = [call["id"] for message in messages for call in message.get("tool_calls") or ()]
    return [*calls, *fields_of(messages, "tool", "tool_call_id")]


RULES: Final[dict[str, Callable[[Messages], bool]]] = {
    "Conversation roles must alternate user/assistant/user/assistant/...": lambda messages: refuses_turns(
        messages, knows_tools=False
    ),
    "After the optional system message, conversation roles must alternate user and assistant roles except for tool "
    "calls and results.": lambda messages: refuses_turns(messages, knows_tools=True),
    "Unsupported role: tool": lambda messages: "tool" in roles(messages),
    "Unexpected role 'tool'": lambda messages: "tool" in roles(messages),
    "Input should be 'system', 'user' or 'assistant'": lambda messages: "tool" in roles(messages),
    "Only user and assistant roles are supported!": lambda messages: bool({*roles(messages)} - {"user", "assistant"}),
    "content must be a string": lambda messages: any(isinstance(m.get("content"), list) for m in messages),
    'can only concatenate str (not "list") to str': lambda messages: any(
        isinstance(m.get("content"), list) for m in messages
    ),
    "Input should be a valid string": lambda messages: any(not isinstance(m.get("content"), str) for m in messages),
    "Message content must not be null": lambda messages: any(m.get("content") is None for m in messages),
    'can only concatenate str (not "NoneType") to str': lambda messages: any(
        m.get("content") is None for m in messages
    ),
    "messages: content must be non-empty": lambda messages: any(not m.get("content") for m in messages),
    "Tool call id was call_abcdefghijkl but must be a-z, A-Z, 0-9, with a length of 9.": lambda messages: any(
        map(is_long, call_ids(messages))
    ),
    "No user query found in messages.": lambda messages: "user" not in roles(messages),
    "The first message must be from the user.": lambda messages: (
        next(role for role in roles(messages) if role != "system") != "user"
    ),
    "Cannot have 2 or more assistant messages at the end of the list.": lambda messages: (
        roles(messages)[-2:] == ["assistant", "assistant"]
    ),
    "Expected last role User or Tool (or Assistant with prefix True) for serving but got assistant": lambda messages: (
        roles(messages)[-1] == "assistant"
    ),
}


def lookup_call(call_id: str, city: str) -> dict[str, Any]:
    function = {"name": "lookup", "arguments": json.dumps({"city": city})}
    return {"id": call_id, "type": "function", "function": function}


CONVERSATIONS: Final[dict[str, list[Any]]] = {
    "of all kinds": [
        {"role": "system", "content": "text-0"},
        {"role": "assistant", "content": "text-1"},
        {"role": "user", "content": "text-2"},
        {"role": "user", "content": [{"type": "text", "text": "text-3"}, {"type": "text", "text": "text-4"}]},
        {"role": "assistant", "tool_calls": [lookup_call("call_abcdefghijkl", "text-5")]},
        {"role": "tool", "tool_call_id": "call_abcdefghijkl", "content": "text-6"},
        {"role": "assistant", "tool_calls": [lookup_call("call_2", "text-7")]},
        {"role": "tool", "tool_call_id": "call_2", "content": ""},
        {"role": "assistant", "content": "text-8"},
        {"role": "assistant", "content": "text-9"},
    ],
    "without a user": [
        {"role": "system", "content": "text-0"},
        {"role": "assistant", "content": "text-1", "tool_calls": [lookup_call("call_1", "text-2")]},
        {"role": "tool", "tool_call_id": "call_1", "content": "text-3"},
        {"role": "assistant", "content": "text-4"},
    ],
}


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("wording", RULES)
async def test_a_conversation_reaches_a_model_whose_template_is_strict(wording: str, name: str) -> None:
    """It is sent in a form that the template takes, which keeps all texts in their order, the next time at once."""
    messages, breaks_rule = CONVERSATIONS[name], RULES[wording]
    async with strict_server(lambda sent: wording if breaks_rule(sent) else None) as (served, upstream):
        create: Any = served.client.chat.completions.create
        first = await create(model="fake-model", messages=messages)
        count = len(upstream.chats)
        events = [event async for event in await create(model="fake-model", messages=messages, stream=True)]
        assert first.choices[0].message.content == "ok"
        assert "ok" in str(events)
        assert len(upstream.chats) == count + 1
        sent = upstream.chats[-1].json["messages"]
    texts = list(dict.fromkeys(re.findall(r"text-\d", json.dumps(sent))))
    assert texts == [f"text-{at}" for at in range(len(texts))]
    assert len(texts) == len({*re.findall(r"text-\d", json.dumps(messages))})
    assert set(fields_of(sent, "tool", "tool_call_id")) <= {*call_ids(sent)}
    if "tool" not in roles(sent):
        assert json.dumps(sent).count("lookup(") == json.dumps(messages).count("lookup")


async def test_each_result_keeps_its_call_where_ids_are_short() -> None:
    """Ids that have the right form stay."""
    history = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "tool_calls": [lookup_call("call_one", "a"), lookup_call("abcdefghi", "b")]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "of b"},
        {"role": "tool", "tool_call_id": "call_one", "content": "of a"},
    ]
    words = "Tool call id was call_one but must be a-z, A-Z, 0-9, with a length of 9."
    async with strict_server(lambda sent: words if any(map(is_long, call_ids(sent))) else None) as (served, upstream):
        await served.client.chat.completions.create(model="fake-model", messages=cast(Any, history))
        ids = call_ids(upstream.chats[-1].json["messages"])
    assert ids == [ids[0], "abcdefghi", "abcdefghi", ids[0]]


async def test_a_new_call_has_an_id_of_its_own_where_the_calls_before_are_texts() -> None:
    """The engine counts the calls of each answer from 1 on."""

    def answer(received: Received) -> Answer:
        if "tool" in roles(received.json["messages"]):
            return error_answer(400, "Unsupported role: tool")
        return stream(call_chunks("lookup", "{}", call_id="call_1"))

    tool = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}
    history = CONVERSATIONS["without a user"][:-1]
    async with UpstreamServer() as upstream:
        upstream.routes["/v1/chat/completions"] = answer
        async with serving({"provider": "vllm", "base_url": upstream.base_url, **LIMITS}) as served:
            create: Any = served.client.chat.completions.create
            completion = await create(model="fake-model", messages=history, tools=[tool])
    assert completion.choices[0].message.tool_calls[0].id not in ("", "call_1")


async def test_a_template_that_refuses_every_form_ends_with_its_own_reason() -> None:
    """The number of attempts has a bound."""
    words = "roles must alternate, content must be a non-empty string, role 'tool' is not supported, a user comes last"
    async with UpstreamServer() as upstream:
        upstream.routes["/v1/chat/completions"] = lambda _: error_answer(400, words)
        section = {"provider": "vllm", "base_url": upstream.base_url, **LIMITS, "max_retries": 0}
        async with serving(section) as served:
            with pytest.raises(BadRequestError, match="roles must alternate"):
                await served.client.chat.completions.create(model="fake-model", messages=CONVERSATIONS["of all kinds"])
        assert 3 <= len(upstream.chats) <= 9


async def test_an_image_is_not_left_out_for_a_model_without_images() -> None:
    """The server's own reason is the error."""
    words = "fake-model is not a multimodal model: content must be a string"
    image = {"type": "image_url", "image_url": {"url": PIXEL_URL}}
    content = [{"type": "text", "text": "What is this?"}, image]
    async with strict_server(lambda _: words) as (served, upstream):
        with pytest.raises(BadRequestError, match="not a multimodal model"):
            await served.client.chat.completions.create(
                model="fake-model", messages=cast(Any, [{"role": "user", "content": content}])
            )
        assert all("image_url" in str(chat.json["messages"]) for chat in upstream.chats)


# --- arguments -------------------------------------------------------------------------------------------------------


def parses_arguments(messages: Messages) -> str | None:
    for call in (call for message in messages for call in message.get("tool_calls") or ()):
        try:
            if not isinstance(json.loads(call["function"]["arguments"]), dict):
                return "Can only get item pairs from a mapping."
        except ValueError as exc:
            return str(exc)
    return None


@pytest.mark.parametrize(
    ("written", "sent"),
    [
        (" \n", {}),
        ("", {}),
        ("null", {}),
        ('["a"]', {"raw_arguments": '["a"]'}),
        ("5", {"raw_arguments": "5"}),
        ('{"q":"a', {"raw_arguments": '{"q":"a'}),
        ('{"q":"a"}{"q":"b"}', {"raw_arguments": '{"q":"a"}{"q":"b"}'}),
        ("[" * 100_000, {"raw_arguments": "[" * 100_000}),
        ('```json\n{"q":"a"}\n```', {"q": "a"}),
        (json.dumps('{"q":"a"}'), {"q": "a"}),
        (json.dumps(json.dumps({"q": "a"})), {"q": "a"}),
        ('{"q":"\\ud83d"}', {"q": "\ud83d"}),
    ],
)
async def test_arguments_that_are_no_object_do_not_stop_a_conversation(written: str, sent: Any) -> None:
    """The engine gets an object, and the item stays as it was."""
    history: list[Any] = [
        {"role": "user", "content": "go"},
        {"type": "function_call", "call_id": "c1", "name": "lookup", "arguments": written},
        {"type": "function_call_output", "call_id": "c1", "output": "42"},
    ]
    async with strict_server(parses_arguments) as (served, upstream):
        create: Any = served.client.responses.create
        response = await create(model="fake-model", input=history, tools=[LOOKUP])
        assert response.output_text == "ok"
        items = await served.client.responses.input_items.list(response.id, order="asc")
        stored: Any = items.data[1]
        assert stored.arguments == written
        call = {"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": written}}
        messages: list[Any] = [
            {"role": "user", "content": "go"},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "42"},
        ]
        completion = await served.client.chat.completions.create(model="fake-model", messages=messages)
        assert completion.choices[0].message.content == "ok"
    for chat in upstream.chats:
        arguments = chat.json["messages"][1]["tool_calls"][0]["function"]["arguments"]
        assert json.loads(arguments) == sent
        assert "42" in str(chat.json["messages"])


async def test_arguments_that_are_an_object_stay_as_they_were_written() -> None:
    """The prompt's prefix does not change."""
    written = '{ "q":"a",\n"q":"é"}'
    history: list[Any] = [
        {"type": "function_call", "call_id": "c1", "name": "lookup", "arguments": written},
        {"type": "function_call_output", "call_id": "c1", "output": "42"},
    ]
    async with strict_server(parses_arguments) as (served, upstream):
        await ask_both(served, input=history, tools=[LOOKUP])
    assert upstream.chats[0].json["messages"][0]["tool_calls"][0]["function"]["arguments"] == written


@pytest.mark.parametrize("written", ['{"text":"a', '```json\n{"text":"a"}\n```', "", '["a"]', '{"text": }'])
async def test_the_model_reads_the_error_of_an_mcp_call_with_broken_arguments(written: str) -> None:
    """The response goes on, though the engine parses every call of the history; so does the one that follows."""

    def answer(received: Received) -> Answer:
        messages = received.json["messages"]
        if refusal := parses_arguments(messages):
            return error_answer(400, refusal)
        if messages[-1]["role"] == "tool":
            return stream(text_chunks("I read: ", messages[-1]["content"]))
        return stream(call_chunks("real__echo", written))

    real = RealServer()
    async with real.serving(), UpstreamServer() as upstream:
        upstream.routes["/v1/chat/completions"] = answer
        section = {"provider": "vllm", "base_url": upstream.base_url, **LIMITS}
        async with serving(section, tool_servers=with_mcp(real.url)) as served:
            create: Any = served.client.responses.create
            first = await create(model="fake-model", input="go", tools=[mcp(real)])
            assert first.status == "completed"
            assert first.output_text.startswith("I read: ")
            assert len(first.output_text) > len("I read: ")
            output = {"role": "user", "content": "and?"}
            second = await create(
                model="fake-model", input=[output], previous_response_id=first.id, tools=[mcp(real)], tool_choice="none"
            )
            assert second.status in ("completed", "incomplete")
