"""Servers that refuse fields of the body by their names."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest
from openai import BadRequestError

from tests.providers.inference.remote import LIMITS
from tests.spec.responses.test_strict_servers import LOOKUP, ask_both
from tests.support.models.images import PIXEL_URL
from tests.support.servers.serving import Served, serving
from tests.support.servers.upstream_server import (
    Answer,
    Received,
    UpstreamServer,
    error_answer,
    json_answer,
    stream,
    text_chunks,
)

FORBIDDEN: Final = "Extra inputs are not permitted"


def forbidden(name: str) -> Any:
    entry = {"type": "extra_forbidden", "loc": ["body", *name.split(".")], "msg": FORBIDDEN, "input": 1}
    return json_answer({"detail": [entry]}, 422)


FIELD_REFUSALS: Final[dict[str, Callable[[str], Answer]]] = {
    "pydantic": forbidden,
    "OpenAI": lambda name: error_answer(400, f"Unrecognized request argument supplied: {name}"),
    "newer OpenAI": lambda name: error_answer(400, f"Unsupported parameter: '{name}' is not supported here."),
    "Python": lambda name: error_answer(500, f"create() got an unexpected keyword argument '{name}'"),
}


@asynccontextmanager
async def server_without(name: str, refuse: Callable[[str], Answer]) -> AsyncGenerator[tuple[Served, UpstreamServer]]:
    """A stack over a server that refuses a field by its name."""
    async with UpstreamServer() as upstream:
        upstream.routes["/v1/chat/completions"] = lambda received: (
            refuse(name) if name in received.json else stream(text_chunks("ok"))
        )
        section = {"provider": "vllm", "base_url": upstream.base_url, **LIMITS, "max_retries": 0}
        async with serving(section) as served:
            yield served, upstream


@pytest.mark.parametrize("wording", FIELD_REFUSALS)
@pytest.mark.parametrize(
    ("name", "fields", "sent"),
    [
        ("stream_options", {}, {}),
        ("max_completion_tokens", {"max_output_tokens": 99}, {"max_tokens": 99}),
        ("parallel_tool_calls", {"parallel_tool_calls": False, "tools": [LOOKUP]}, {"stream": True}),
        ("tool_choice", {"tool_choice": "auto", "tools": [LOOKUP]}, {"stream": True}),
        ("prompt_cache_key", {"prompt_cache_key": "mine"}, {}),
    ],
)
async def test_a_field_that_a_server_does_not_know_is_left_out(wording: str, name: str, fields: Any, sent: Any) -> None:
    """The answer is the same without it. After one refusal this is remembered."""
    async with server_without(name, FIELD_REFUSALS[wording]) as (served, upstream):
        assert await ask_both(served, input="hi", **fields) == ["ok", "ok"]
        assert [name in chat.json for chat in upstream.chats] == [True, False, False]
        assert upstream.chats[-1].json.items() >= sent.items()
        assert bool(upstream.chats[-1].json.get("tools")) == ("tools" in fields)


PNG_PART: Final = {"type": "image_url", "image_url": {"url": PIXEL_URL, "detail": "low"}}
INNER_FIELDS: Final[dict[str, tuple[list[Any], dict[str, Any], Callable[[Any], str]]]] = {
    "name of a message": (
        [{"role": "user", "name": "Ada", "content": "hi"}],
        {},
        lambda body: "messages.0.name" if "name" in body["messages"][0] else "",
    ),
    "name of a message with parts": (
        [{"role": "user", "name": "Ada", "content": [{"type": "text", "text": "hi"}]}],
        {},
        lambda body: "messages[0].name" if "name" in body["messages"][0] else "",
    ),
    "detail of an image": (
        [{"role": "user", "content": [{"type": "text", "text": "hi"}, PNG_PART]}],
        {},
        lambda body: (
            "messages.0.content.1.image_url.detail"
            if "detail" in body["messages"][0]["content"][1]["image_url"]
            else ""
        ),
    ),
    "strict of a tool": (
        [{"role": "user", "content": "hi"}],
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": False}}]},
        lambda body: "tools.0.function.strict" if "strict" in body["tools"][0]["function"] else "",
    ),
    "strict of a format": (
        [{"role": "user", "content": "hi"}],
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {}}}},
        lambda body: "response_format.json_schema.strict" if "strict" in body["response_format"]["json_schema"] else "",
    ),
}


@pytest.mark.parametrize("wording", FIELD_REFUSALS)
@pytest.mark.parametrize("case", INNER_FIELDS)
async def test_a_field_within_messages_tools_and_formats_is_left_out(wording: str, case: str) -> None:
    """The name of who speaks is then the beginning of the text. After one refusal this is remembered."""
    messages, fields, find_path = INNER_FIELDS[case]

    def answer(received: Received) -> Answer:
        path = find_path(received.json)
        return FIELD_REFUSALS[wording](path) if path else stream(text_chunks("{}"))

    async with UpstreamServer() as upstream:
        upstream.routes["/v1/chat/completions"] = answer
        section = {"provider": "vllm", "base_url": upstream.base_url, **LIMITS, "max_retries": 0}
        async with serving(section) as served:
            create: Any = served.client.chat.completions.create
            for _ in range(2):
                completion = await create(model="fake-model", messages=messages, **fields)
                assert completion.choices[0].message.content == "{}"
        assert len(upstream.chats) == 3
        said = upstream.chats[-1].json["messages"][0]["content"]
        assert ("Ada: " in str(said)) == ("name" in case)


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
async def test_earlier_reasoning_is_left_out_where_a_server_has_no_field_for_it(field: str) -> None:
    async with UpstreamServer() as upstream:
        upstream.routes["/v1/chat/completions"] = lambda received: (
            json_answer({"detail": [{"loc": ["body", "messages", 1, "assistant", field], "msg": FORBIDDEN}]}, 422)
            if any(field in message for message in received.json["messages"])
            else stream(text_chunks("ok"))
        )
        section = {"provider": "vllm", "base_url": upstream.base_url, "reasoning_field": field}
        async with serving({**section, **LIMITS, "max_retries": 0}) as served:
            history = [
                {"role": "user", "content": "hi"},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hmm."}]},
                {"role": "assistant", "content": "Hello."},
                {"role": "user", "content": "go on"},
            ]
            assert await ask_both(served, input=history) == ["ok", "ok"]
        assert len(upstream.chats) == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [("top_p", 1.0), ("presence_penalty", 0.0), ("frequency_penalty", 0.0), ("verbosity", "medium"), ("stop", [])],
)
async def test_a_value_that_changes_nothing_is_left_out(name: str, value: Any) -> None:
    """Many clients send every field that they have, with its default."""
    async with server_without(name, forbidden) as (served, upstream):
        create: Any = served.client.chat.completions.create
        completion = await create(model="fake-model", messages=[{"role": "user", "content": "hi"}], **{name: value})
        assert completion.choices[0].message.content == "ok"
        assert [name in chat.json for chat in upstream.chats] == [True, False]


@pytest.mark.parametrize("words", ["The name of the model is not supported.", "Unsupported: reasoning is not allowed."])
async def test_a_common_word_is_not_taken_for_the_name_of_a_field(words: str) -> None:
    async with server_without("messages", lambda _: error_answer(400, words)) as (served, upstream):
        create: Any = served.client.chat.completions.create
        with pytest.raises(BadRequestError, match="not"):
            await create(model="fake-model", messages=[{"role": "user", "name": "Ada", "content": "hi"}])
        assert len(upstream.chats) == 1


async def test_a_field_that_changes_the_answer_is_not_left_out() -> None:
    """The error names it."""
    async with server_without("tool_choice", forbidden) as (served, upstream):
        with pytest.raises(BadRequestError, match="tool_choice: Extra inputs are not permitted"):
            await ask_both(served, input="hi", tools=[LOOKUP], tool_choice="required")
        assert len(upstream.chats) == 1


async def test_tools_without_a_parser_of_calls_end_with_an_error_that_says_what_to_do() -> None:
    words = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
    async with server_without("tools", lambda _: error_answer(400, words)) as (served, _):
        with pytest.raises(BadRequestError, match="Start that server with these options"):
            await ask_both(served, input="hi", tools=[LOOKUP])
