"""Options of engines through the SDK's `extra_body`, in both APIs."""

from typing import Any

import pytest
from openai import BadRequestError

from tests.providers.inference.remote import LIMITS
from tests.support.sdk.requests import create
from tests.support.servers.serving import Served, serving
from tests.support.servers.upstream_server import UpstreamServer, stream, text_chunks

OPTIONS: dict[str, Any] = {
    "chat_template_kwargs": {"enable_thinking": False},
    "structured_outputs": {"choice": ["yes", "no"]},
    "min_tokens": 3,
    "ignore_eos": True,
    "bad_words": ["never"],
}


async def chat(served: Served, **fields: Any) -> Any:
    client: Any = served.client
    messages = [{"role": "user", "content": "hi"}]
    return await client.chat.completions.create(model="fake-model", messages=messages, extra_body=fields)


async def test_options_of_an_engine_reach_it_from_both_apis() -> None:
    """Thinking can be turned off, and answers can be guided."""
    async with (
        UpstreamServer(stream(text_chunks("yes"))) as upstream,
        serving({"provider": "vllm", "base_url": upstream.base_url, **LIMITS}) as served,
    ):
        assert (await create(served, model="fake-model", extra_body=OPTIONS)).output_text == "yes"
        assert (await chat(served, **OPTIONS)).choices[0].message.content == "yes"
        for request in upstream.chats:
            assert {name: request.json[name] for name in OPTIONS} == OPTIONS


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"echo": True}, "echo"), ({"chat_template": "{{ x }}"}, "chat_template"), ({"min_tokens": -1}, "min_tokens")],
)
async def test_what_cannot_be_honoured_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    """Both APIs refuse it."""
    async with (
        UpstreamServer(stream(text_chunks("yes"))) as upstream,
        serving({"provider": "vllm", "base_url": upstream.base_url, **LIMITS}) as served,
    ):
        for asking in (create(served, model="fake-model", extra_body=fields), chat(served, **fields)):
            with pytest.raises(BadRequestError) as caught:
                await asking
            assert caught.value.param == param
