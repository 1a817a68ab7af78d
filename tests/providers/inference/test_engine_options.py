"""Options of engines: each reaches the engines that have it, and is refused by name by those that do not."""

from typing import Any

import pytest

from apis.chat import ENGINE_OPTIONS, REFUSED_ENGINE_OPTIONS, refuse_unsafe_engine_options
from apis.errors import InvalidRequest, Unsupported
from providers.inference.chat_completions.body import GUIDED_FIELDS
from tests.conformance.inference import drain
from tests.providers.inference.remote import chat_request, started
from tests.support.servers.upstream_server import UpstreamServer, stream, text_chunks

OK = stream(text_chunks("a"))
OPTIONS: dict[str, Any] = {
    "chat_template_kwargs": {"enable_thinking": False},
    "structured_outputs": {"choice": ["yes", "no"]},
    "min_tokens": 5,
    "thinking_token_budget": 100,
    "ignore_eos": True,
    "bad_words": ["no"],
    "allowed_token_ids": [1, 2],
    "length_penalty": 1.5,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "truncate_prompt_tokens": -1,
    "documents": [{"title": "a", "text": "b"}],
    "mm_processor_kwargs": {"num_crops": 4},
    "vllm_xargs": {"key": 1},
}
GUIDED: dict[str, Any] = {
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "guided_choice": ["yes", "no"],
    "guided_grammar": 'root ::= "a"',
    "guided_whitespace_pattern": " ",
}


def test_every_option_is_tested() -> None:
    assert OPTIONS.keys() | GUIDED.keys() == {*ENGINE_OPTIONS}
    assert GUIDED.keys() == GUIDED_FIELDS.keys()


async def test_options_reach_vllm() -> None:
    """They were dropped without a word."""
    async with UpstreamServer(OK) as upstream, started(upstream.base_url) as vllm:
        await drain(vllm, chat_request(**OPTIONS))
        assert {name: upstream.chats[0].json.get(name) for name in OPTIONS} == OPTIONS
        await drain(vllm, chat_request())
        assert not upstream.chats[1].json.keys() & OPTIONS.keys()


@pytest.mark.parametrize("name", GUIDED)
async def test_older_names_of_guidance_reach_vllm_by_the_new_one(name: str) -> None:
    """Current versions of vLLM ignore the older names."""
    async with UpstreamServer(OK) as upstream, started(upstream.base_url) as vllm:
        await drain(vllm, chat_request(**{name: GUIDED[name]}))
        sent = upstream.chats[0].json
        assert sent["structured_outputs"] == {GUIDED_FIELDS[name]: GUIDED[name]}
        assert name not in sent
        with pytest.raises(InvalidRequest) as caught:
            await drain(vllm, chat_request(**{name: GUIDED[name], "structured_outputs": {"regex": "a"}}))
        assert caught.value.param == name


async def test_the_template_of_a_count_is_that_of_the_chat() -> None:
    """A prompt is counted with the same options of its template."""
    async with UpstreamServer(OK) as upstream, started(upstream.base_url) as vllm:
        await vllm.count_tokens(chat_request(chat_template_kwargs={"enable_thinking": False}))
        assert upstream.received[0].json["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize("name", ENGINE_OPTIONS)
async def test_a_server_without_an_option_refuses_it_by_name(name: str) -> None:
    """Nothing is dropped in silence."""
    async with UpstreamServer(OK) as upstream, started(upstream.base_url, engine="openai") as vllm:
        with pytest.raises(Unsupported) as caught:
            await drain(vllm, chat_request(**{name: {**OPTIONS, **GUIDED}[name]}))
        assert caught.value.param == name
        assert upstream.chats == []


@pytest.mark.parametrize("name", REFUSED_ENGINE_OPTIONS)
def test_an_option_that_no_response_has_a_place_for_is_refused_by_name(name: str) -> None:
    """Its neutral values ask for nothing."""
    with pytest.raises(Unsupported) as caught:
        refuse_unsafe_engine_options(chat_request(**{name: "x"}))
    assert caught.value.param == name
    for neutral in (*REFUSED_ENGINE_OPTIONS[name], None):
        refuse_unsafe_engine_options(chat_request(**{name: neutral}))
