"""Servers that refuse fields of the body by their names."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest
from openai import BadRequestError

from tests.providers.inference.remote import LIMITS
from tests.spec.responses.test_strict_servers import LOOKUP, ask_both
from tests.support.servers.serving import Served, serving
from tests.support.servers.upstream_server import Answer, UpstreamServer, error_answer, json_answer, stream, text_chunks


def forbidden(name: str) -> Any:
    entry = {"type": "extra_forbidden", "loc": ["body", name], "msg": "Extra inputs are not permitted", "input": 1}
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
