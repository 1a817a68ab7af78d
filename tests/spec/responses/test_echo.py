"""Every parameter of a request is honoured and echoed, or refused by its name. Null means unset."""

from collections.abc import AsyncGenerator
from typing import Any

import pytest
import pytest_asyncio
from openai import BadRequestError

from tests.support.sdk.answer_shapes import function
from tests.support.sdk.requests import chat_requests, create, refusal, responses
from tests.support.servers.serving import Served, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

Json = dict[str, Any]
DEFAULTS: Json = {
    "object": "response",
    "status": "completed",
    "background": False,
    "error": None,
    "incomplete_details": None,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "model": "scripted",
    "parallel_tool_calls": True,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}, "verbosity": "medium"},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
}
KEYS = """
    id object created_at completed_at status incomplete_details model previous_response_id instructions output error
    tools tool_choice truncation parallel_tool_calls text top_p presence_penalty frequency_penalty top_logprobs
    temperature reasoning usage max_output_tokens max_tool_calls store background service_tier metadata
    safety_identifier prompt_cache_key
"""
NULLS = """
    instructions previous_response_id store stream stream_options include tools tool_choice parallel_tool_calls
    max_tool_calls max_output_tokens top_logprobs reasoning text truncation metadata service_tier safety_identifier
    prompt_cache_key prompt_cache_retention user temperature top_p presence_penalty frequency_penalty background
    conversation prompt context_management moderation seed stop top_k min_p logit_bias client_metadata
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncGenerator[Served]:
    async with serving() as served:
        yield served


async def raw(served: Served, **fields: Any) -> Json:
    """The response as it stands on the wire. All fields go as they are, known to the SDK or not."""
    body = {"model": "scripted", "input": "hi", **fields}
    answer = await responses(served).with_raw_response.create(extra_body=body)
    return answer.http_response.json()


async def test_every_key_of_the_response_object_is_there(served: Served) -> None:
    response = await raw(served)
    assert set(KEYS.split()) <= response.keys()
    assert {key: response[key] for key in DEFAULTS} == DEFAULTS


async def test_null_means_unset_everywhere(served: Served) -> None:
    response = await raw(served, **dict.fromkeys(NULLS.split()))
    assert {key: response[key] for key in DEFAULTS} == DEFAULTS
    chat = chat_requests(served)[-1].model_dump(exclude_none=True)
    assert chat.keys() == {"model", "messages", "cache_root"}


async def test_nulls_inside_objects_mean_unset_too(served: Served) -> None:
    response = await raw(
        served,
        reasoning={"effort": None, "summary": None, "generate_summary": None},
        text={"format": None, "verbosity": None},
        stream_options={"include_obfuscation": None},
    )
    assert response["text"] == DEFAULTS["text"]


async def test_empty_objects_and_lists_mean_unset(served: Served) -> None:
    response = await raw(served, reasoning={}, text={}, tools=[], include=[], metadata={}, stream_options={})
    assert {key: response[key] for key in DEFAULTS} == DEFAULTS


async def test_unknown_fields_are_ignored(served: Served) -> None:
    response = await raw(served, client_metadata={"x": 1}, image=None, whatever=[1, {"a": 2}])
    assert response["status"] == "completed"
    assert "client_metadata" not in response


HONOURED: dict[str, tuple[Json, Json, Json]] = {
    "temperature": ({"temperature": 0.25}, {"temperature": 0.25}, {"temperature": 0.25}),
    "no temperature at all": ({"temperature": 0}, {"temperature": 0.0}, {"temperature": 0.0}),
    "top_p": ({"top_p": 0.5}, {"top_p": 0.5}, {"top_p": 0.5}),
    "presence_penalty": ({"presence_penalty": 1.5}, {"presence_penalty": 1.5}, {"presence_penalty": 1.5}),
    "frequency_penalty": ({"frequency_penalty": -1}, {"frequency_penalty": -1.0}, {"frequency_penalty": -1.0}),
    "max_output_tokens": ({"max_output_tokens": 64}, {"max_output_tokens": 64}, {"max_completion_tokens": 64}),
    "max_tool_calls": ({"max_tool_calls": 3}, {"max_tool_calls": 3}, {}),
    "instructions": ({"instructions": "Be brief."}, {"instructions": "Be brief."}, {}),
    "metadata": ({"metadata": {"k": "v"}}, {"metadata": {"k": "v"}}, {}),
    "store": ({"store": False}, {"store": False}, {}),
    "verbosity": (
        {"text": {"verbosity": "low"}},
        {"text": {"format": {"type": "text"}, "verbosity": "low"}},
        {"verbosity": "low"},
    ),
    "safety_identifier": ({"safety_identifier": "s" * 128}, {"safety_identifier": "s" * 128}, {}),
    "prompt_cache_key": ({"prompt_cache_key": "k"}, {"prompt_cache_key": "k"}, {"prompt_cache_key": "k"}),
    "prompt_cache_retention": ({"prompt_cache_retention": "24h"}, {"prompt_cache_retention": "24h"}, {}),
    "user": ({"user": "u"}, {"user": "u"}, {}),
    "truncation": ({"truncation": "disabled"}, {"truncation": "disabled"}, {}),
    "top_logprobs": ({"top_logprobs": 2}, {"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
    "background off": ({"background": False}, {"background": False}, {}),
    "service_tier": ({"service_tier": "priority"}, {"service_tier": "priority"}, {"priority": None}),
    "parallel_tool_calls": (
        {"parallel_tool_calls": False, "tools": [function()]},
        {"parallel_tool_calls": False},
        {"parallel_tool_calls": False},
    ),
    "seed": ({"seed": 7}, {}, {"seed": 7}),
    "stop": ({"stop": ["END"]}, {}, {"stop": ["END"]}),
    "top_k": ({"top_k": 5}, {}, {"top_k": 5}),
    "min_p": ({"min_p": 0.1}, {}, {"min_p": 0.1}),
    "repetition_penalty": ({"repetition_penalty": 1.1}, {}, {"repetition_penalty": 1.1}),
    "logit_bias": ({"logit_bias": {"5": 1.0}}, {}, {"logit_bias": {"5": 1.0}}),
    "stop_token_ids": ({"stop_token_ids": [1, 2]}, {}, {"stop_token_ids": [1, 2]}),
    "cache_salt": ({"cache_salt": "x"}, {}, {"cache_salt": "x"}),
    "priority": ({"priority": 4}, {}, {"priority": 4}),
}


@pytest.mark.parametrize("case", HONOURED.values(), ids=HONOURED)
async def test_a_parameter_is_echoed_and_reaches_the_model(served: Served, case: tuple[Json, Json, Json]) -> None:
    request_fields, response_fields, chat_fields = case
    response = await raw(served, **request_fields)
    assert {key: response[key] for key in response_fields} == response_fields
    chat = chat_requests(served)[-1].model_dump()
    assert {key: chat.get(key) for key in chat_fields} == chat_fields


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh", "max"])
async def test_the_effort_of_reasoning_is_echoed_and_reaches_the_model(served: Served, effort: str) -> None:
    response = await raw(served, reasoning={"effort": effort, "summary": "auto"})
    assert response["reasoning"]["effort"] == effort
    assert response["reasoning"]["summary"] == "auto"
    assert chat_requests(served)[-1].reasoning_effort == effort


@pytest.mark.parametrize(
    "include",
    [
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "message.input_image.image_url",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
        "reasoning.encrypted_content",
        "message.output_text.logprobs",
    ],
)
async def test_every_includable_of_the_api_is_known(served: Served, include: str) -> None:
    assert (await raw(served, include=[include]))["status"] == "completed"


REFUSED: dict[str, tuple[Json, str, str]] = {
    "background and no store": ({"background": True, "store": False}, "background", "stored"),
    "prompt": ({"prompt": {"id": "pmpt_1"}}, "prompt.id", "there is no prompt 'pmpt_1'"),
    "an unknown truncation": ({"truncation": "some"}, "truncation", "'auto' or 'disabled'"),
    "an unknown includable": ({"include": ["all"]}, "include[0]", "message.output_text.logprobs"),
    "no model": ({"model": None}, "model", "expected a string, but got null"),
    "an empty model": ({"model": ""}, "model", "at least 1"),
    "no input": ({"input": None}, "input", "Missing required parameter: 'input'"),
    "input that is neither text nor items": ({"input": 5}, "input", "expected an array, but got an integer"),
    "a temperature in words": ({"temperature": "hot"}, "temperature", "expected a number, but got a string"),
    "a temperature in quotes": ({"temperature": "1"}, "temperature", "expected a number, but got a string"),
    "too hot": ({"temperature": 2.1}, "temperature", "at most 2"),
    "too cold": ({"temperature": -0.1}, "temperature", "at least 0"),
    "top_p": ({"top_p": 1.1}, "top_p", "at most 1"),
    "too few tokens": ({"max_output_tokens": 15}, "max_output_tokens", "at least 16"),
    "half a token": ({"max_output_tokens": 16.5}, "max_output_tokens", "expected an integer"),
    "tokens in quotes": ({"max_output_tokens": "64"}, "max_output_tokens", "expected an integer, but got a string"),
    "no tool calls": ({"max_tool_calls": 0}, "max_tool_calls", "at least 1"),
    "too many logprobs": ({"top_logprobs": 21}, "top_logprobs", "at most 20"),
    "an effort nobody makes": ({"reasoning": {"effort": "heroic"}}, "reasoning.effort", "'high'"),
    "a verbosity nobody has": ({"text": {"verbosity": "chatty"}}, "text.verbosity", "'low', 'medium' or 'high'"),
    "reasoning that is no object": ({"reasoning": "high"}, "reasoning", "expected an object, but got a string"),
    "too many pairs": ({"metadata": {f"k{n}": "v" for n in range(17)}}, "metadata", "at most 16"),
    "a long key": ({"metadata": {"k" * 65: "v"}}, "metadata." + "k" * 64, "at most 64"),
    "a long value": ({"metadata": {"k": "v" * 513}}, "metadata.k", "at most 512"),
    "a value that is no text": ({"metadata": {"k": 1}}, "metadata.k", "expected a string, but got an integer"),
    "a long safety_identifier": ({"safety_identifier": "s" * 129}, "safety_identifier", "at most 128"),
    "a tier nobody sells": ({"service_tier": "gold"}, "service_tier", "'auto'"),
    "a stream in words": ({"stream": "yes"}, "stream", "expected a boolean, but got a string"),
    "a store in words": ({"store": "yes"}, "store", "expected a boolean, but got a string"),
    "tools that are no list": ({"tools": {}}, "tools", "expected an array, but got an object"),
    "instructions that are no text": ({"instructions": ["a"]}, "instructions", "expected a string, but got an array"),
    "an empty previous_response_id": ({"previous_response_id": ""}, "previous_response_id", "at least 1"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
async def test_what_cannot_be_honoured_is_refused_by_name(served: Served, case: tuple[Json, str, str]) -> None:
    fields, param, words = case
    with pytest.raises(BadRequestError) as caught:
        await raw(served, **fields)
    error: Any = caught.value.body
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert words in error["message"]
    assert error["code"]


async def test_a_refused_request_never_reaches_the_model(served: Served) -> None:
    before = len(chat_requests(served))
    await refusal(served, temperature=9)
    assert len(chat_requests(served)) == before


async def test_a_client_of_chat_completions_gets_the_names_of_this_api(served: Served) -> None:
    with pytest.raises(BadRequestError, match=r"'messages'.* has moved to 'input'"):
        await responses(served).create(model="scripted", extra_body={"messages": [{"role": "user", "content": "hi"}]})


async def test_every_answer_has_a_request_id(served: Served) -> None:
    one, other = await create(served), await create(served)
    assert one._request_id.startswith("req_")  # pyright: ignore[reportPrivateUsage]  # the SDK's documented name for it
    assert one._request_id != other._request_id  # pyright: ignore[reportPrivateUsage]  # as above
    with pytest.raises(BadRequestError) as caught:
        await create(served, temperature=9)
    assert (caught.value.request_id or "").startswith("req_")


async def test_the_prefix_v1_may_be_left_out(served: Served) -> None:
    async with served.client.with_options(base_url=served.url) as client:
        assert (await client.responses.create(model="scripted", input="hi")).output_text == "hi"
