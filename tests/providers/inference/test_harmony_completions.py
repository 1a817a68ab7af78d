"""VLLM with `template: harmony` against a real server: what it asks of /completions, and what it makes of the ids."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from pydantic import ValidationError

from apis.deltas import Finish, ReasoningDelta, TextDelta, TokenLogprob, ToolArgumentsDelta, ToolCallStart, Usage
from apis.errors import ContextLengthExceeded, InvalidRequest, StackError, Unsupported, UpstreamError
from apis.inference import ALL_CONSTRAINTS, Model
from providers.inference.harmony.vocabulary import load_vocabulary
from providers.inference.vllm import VLLM
from tests.conformance.inference import LAWS, Law, Subject, drain
from tests.providers.inference.remote import chat_request, started
from tests.support.servers.upstream_server import (
    CUT,
    HANG,
    Answer,
    Chunk,
    UpstreamServer,
    error_answer,
    event,
    head,
    http_chunk,
    stream,
    usage_chunk,
)

PATH = "/v1/completions"
ANSWER = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello there!<|return|>"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a":1}<|call|>'
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
STRICT: dict[str, Any] = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {}}}
SCHEMA: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": True},
}


def ids(text: str) -> list[int]:
    return load_vocabulary().encoding.encode(text, allowed_special="all")


def chunk(tokens: Sequence[int] | None, finish_reason: str | None = None, logprobs: Any = None) -> Chunk:
    """A chunk as vLLM sends it."""
    choice = {"index": 0, "text": "?", "logprobs": logprobs, "finish_reason": finish_reason, "token_ids": tokens}
    return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}


def chunks(text: str, finish_reason: str = "stop") -> list[Chunk]:
    """An answer a token at a time, the last with its reason, and what was used."""
    *tokens, last = ids(text)
    used = usage_chunk(90, 7, prompt_tokens_details={"cached_tokens": 64})
    return [*(chunk([token]) for token in tokens), chunk([last], finish_reason), used]


@asynccontextmanager
async def serving(*answers: Answer, **fields: Any) -> AsyncGenerator[tuple[VLLM, UpstreamServer]]:
    """A provider, and the server that gives it these answers, the last one again and again."""
    async with UpstreamServer(*answers) as upstream:
        options: dict[str, Any] = {"template": "harmony", "max_retries": 0, **fields}
        async with started(upstream.base_url, **options) as vllm:
            yield vllm, upstream


def body(upstream: UpstreamServer) -> Any:
    """Return the body of the newest completion request."""
    return [request for request in upstream.received if request.path == PATH][-1].json


async def failure(answer: Answer, request: dict[str, Any] | None = None, **fields: Any) -> StackError:
    async with serving(answer, **fields) as (vllm, _):
        with pytest.raises(StackError) as caught:
            await drain(vllm, chat_request(**(request or {})))
    return caught.value


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
async def test_harmony_over_vllm_conforms(law: Law) -> None:
    answers: list[Answer] = [stream(chunks(ANSWER))]
    if "left" in law.__name__ or "cancelled" in law.__name__:
        answers = [[head(), http_chunk(event(chunk(ids(ANSWER)[:5]))), HANG], *answers]
    elif law.__name__ == "a_call_is_made":
        answers = [stream(chunks(CALL))]
    elif "unknown" in law.__name__:
        answers = [error_answer(404, "The model `x` does not exist.", param="model")]
    async with serving(*answers) as (vllm, upstream):
        subject = Subject(
            vllm, chat_request(), chat_request(), chat_request(tools=[TOOL]), chat_request(model="x"), upstream.left
        )
        await law(subject)


# --- what is asked ---------------------------------------------------------------------------------------------------


async def test_the_prompt_goes_out_as_tokens() -> None:
    async with serving(stream(chunks(ANSWER)), harmony={"current_date": "2026-01-01"}) as (vllm, upstream):
        await drain(vllm, chat_request())
        sent = body(upstream)
        prompt = load_vocabulary().encoding.decode(sent.pop("prompt"))
        assert await vllm.count_tokens(chat_request()) == 68
    assert prompt.startswith("<|start|>system<|message|>You are ChatGPT")
    assert "Current date: 2026-01-01\n" in prompt
    assert prompt.endswith("<|end|><|start|>user<|message|>hi<|end|><|start|>assistant")
    assert sent == {
        "model": "fake-model",
        "return_token_ids": True,
        "skip_special_tokens": False,
        "stop_token_ids": [200002, 200012],
        "max_tokens": 4096,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def test_sampling_and_the_engines_fields_are_passed_on() -> None:
    fields: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "presence_penalty": 1, "frequency_penalty": -1}
    fields |= {"seed": 3, "logit_bias": {"7": -5}, "top_k": 4, "min_p": 0.1, "repetition_penalty": 1.5}
    fields |= {"cache_salt": "a", "priority": 2}
    async with serving(stream(chunks(ANSWER)), extra_body={"n": 1}) as (vllm, upstream):
        own = {
            "stop": "x",
            "stop_token_ids": [5],
            "max_completion_tokens": 9,
            "prompt_cache_key": "k",
            "top_logprobs": 2,
        }
        await drain(vllm, chat_request(**fields, **own))
        sent = body(upstream)
        assert {name: sent[name] for name in fields} == fields
        assert (sent["stop_token_ids"], sent["max_tokens"], sent["n"]) == ([200002, 200012, 5], 9, 1)
        # a stop string is for the answer alone, and only here it is known where that begins
        assert not {"stop", "prompt_cache_key", "logprobs", "structured_outputs"} & set(sent)


async def test_the_token_limit_fits_into_the_context() -> None:
    async with serving(stream(chunks(ANSWER))) as (vllm, upstream):
        await drain(vllm, chat_request(max_completion_tokens=100_000))
        assert body(upstream)["max_tokens"] == 4096
        await drain(vllm, chat_request())
        assert sum(request.path == "/v1/models" for request in upstream.received) == 1


async def test_harmony_models_accept_text_and_native_tools() -> None:
    async with serving(stream(chunks(ANSWER))) as (vllm, _):
        native: Any = {"browser", "python"}
        promises: dict[str, Any] = {"enforces": ALL_CONSTRAINTS, "caches_prefixes": True}
        expected = Model("fake-model", "vllm", 1, 4096, frozenset(), frozenset(native), **promises)
        assert await vllm.models() == [expected]


# --- the output ------------------------------------------------------------------------------------------------------


async def test_tokens_become_thought_and_answer() -> None:
    async with serving(stream(chunks(ANSWER))) as (vllm, _):
        deltas = await drain(vllm, chat_request())
    assert deltas == [
        *(ReasoningDelta(text) for text in ("Hm", ".")),
        *(TextDelta(text, (), "final_answer") for text in ("Hello", " there", "!")),
        Finish("stop", Usage(90, len(ids(ANSWER)), 64, 2)),
    ]


async def test_a_call_streams() -> None:
    async with serving(stream(chunks(CALL))) as (vllm, _):
        start, *arguments, finish = await drain(vllm, chat_request(tools=[TOOL]))
    assert isinstance(start, ToolCallStart)
    assert start.name == "f"
    assert "".join(each.text for each in arguments if isinstance(each, ToolArgumentsDelta)) == '{"a":1}'
    assert isinstance(finish, Finish)
    assert finish.reason == "tool_calls"


async def test_a_limit_is_reported() -> None:
    async with serving(stream(chunks(ANSWER.removesuffix("!<|return|>"), "length"))) as (vllm, _):
        finish = (await drain(vllm, chat_request()))[-1]
    assert isinstance(finish, Finish)
    assert finish.reason == "length"


async def test_a_stop_string_ends_the_generation() -> None:
    answer: Answer = [head(), *(http_chunk(event(each)) for each in chunks(ANSWER)[:-2]), HANG]
    async with serving(answer) as (vllm, upstream):
        deltas = await drain(vllm, chat_request(stop=["there"]))
        await upstream.left.wait()
    assert "".join(delta.text for delta in deltas if isinstance(delta, TextDelta)) == "Hello "


async def test_logprobs_are_those_of_the_answer() -> None:
    (hello,), (hi,) = ids("Hello"), ids("Hi")

    def said(token: int) -> dict[str, Any]:
        likely = {f"token_id:{hi}": -2.5, f"token_id:{token}": -0.25, "token_id:200002": None}
        return {
            "tokens": [f"token_id:{token}"],
            "token_logprobs": [-0.25],
            "top_logprobs": [likely],
            "text_offset": [0],
        }

    tokens = ids("<|channel|>final<|message|>Hello<|return|>")
    chunks = [chunk([each], "stop" if each == 200002 else None, said(each)) for each in tokens]
    async with serving(stream([*chunks, usage_chunk()])) as (vllm, upstream):
        text, _ = await drain(vllm, chat_request(logprobs=True, top_logprobs=2))
        assert (body(upstream)["logprobs"], body(upstream)["return_tokens_as_token_ids"]) == (2, True)
    assert isinstance(text, TextDelta)
    (logprob,) = text.logprobs
    assert isinstance(logprob, TokenLogprob)
    assert (logprob.token, logprob.logprob, logprob.bytes) == ("Hello", -0.25, list(b"Hello"))
    assert [(top.token, top.logprob) for top in logprob.top_logprobs] == [("Hello", -0.25), ("Hi", -2.5)]
    assert hello != hi


@pytest.mark.parametrize(
    "answer",
    [
        stream([chunk(None)]),
        stream([*chunks(ANSWER)[:4]]),
        [head(), http_chunk(event(chunk(ids(ANSWER)[:5]))), CUT],
        stream([chunk(ids(ANSWER), "abort")]),
        stream(["{oops"]),
        stream([chunk([5], "stop", {"tokens": [" a"], "token_logprobs": [-1], "top_logprobs": None})]),
        stream([chunk([5], "stop", {"tokens": ["token_id:5"], "token_logprobs": [], "top_logprobs": None})]),
        stream([{"error": {"message": "Engine died", "code": 500}}]),
    ],
    ids=["no ids", "no finish", "cut", "abort", "no JSON", "no token id", "odd logprobs", "error"],
)
async def test_an_answer_that_is_none_is_an_error(answer: Answer) -> None:
    assert isinstance(await failure(answer), UpstreamError)


async def test_a_prompt_that_is_too_long_is_the_callers_error() -> None:
    message = "This model's maximum context length is 4096 tokens. However, your prompt contains 5000 input tokens"
    assert isinstance(await failure(error_answer(400, message)), ContextLengthExceeded)


# --- what is to be enforced ------------------------------------------------------------------------------------------


async def test_constraints_are_sent_as_a_grammar() -> None:
    demands: list[dict[str, Any]] = [
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"tools": [STRICT]},
    ]
    async with serving(stream(chunks(CALL))) as (vllm, upstream):
        for demand in demands:
            await drain(vllm, chat_request(**demand))
            assert "<[200005]>" in body(upstream)["structured_outputs"]["grammar"]


REFUSALS = [
    {"error": {"message": "Internal server error", "type": "InternalServerError", "code": 500}},
    {"error": {"message": "Grammar error: at 1(8): no", "type": "BadRequestError", "code": 400}},
]


@pytest.mark.parametrize("answer", [stream(chunks(ANSWER)), *(stream([each]) for each in REFUSALS)])
async def test_a_server_that_does_not_enforce_is_detected(answer: Answer) -> None:
    demand = {"response_format": SCHEMA}
    error = await failure(answer, demand, max_retries=2)
    assert isinstance(error, Unsupported)
    assert error.param == "text.format.schema"
    assert "--structured-outputs-config" in error.message


@pytest.mark.parametrize(
    ("demand", "param"),
    [
        ({"response_format": SCHEMA}, "text.format.schema"),
        ({"response_format": {"type": "json_object"}}, "text.format"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [STRICT]}, "tools[0].parameters"),
    ],
)
async def test_without_grammars_what_is_demanded_is_refused_by_name(demand: dict[str, Any], param: str) -> None:
    error = await failure(stream(chunks(ANSWER)), demand, grammars=False)
    assert isinstance(error, Unsupported)
    assert error.param == param


async def test_without_grammars_a_model_that_may_not_call_sees_no_tools() -> None:
    async with serving(stream(chunks(ANSWER)), grammars=False) as (vllm, upstream):
        await drain(vllm, chat_request(tools=[TOOL], tool_choice="none"))
        assert "functions" not in load_vocabulary().encoding.decode(body(upstream)["prompt"])
        await drain(vllm, chat_request(tools=[TOOL]))
        assert "type f = " in load_vocabulary().encoding.decode(body(upstream)["prompt"])


async def test_a_schema_that_is_none_is_refused_before_it_is_sent() -> None:
    wrong = {**SCHEMA, "json_schema": {"name": "x", "schema": {"type": "nothing"}, "strict": True}}
    async with serving(stream(chunks(ANSWER))) as (vllm, upstream):
        with pytest.raises(InvalidRequest) as caught:
            await drain(vllm, chat_request(response_format=wrong))
        assert not upstream.received
    assert caught.value.param == "text.format.schema"


def test_other_engines_have_no_template_harmony() -> None:
    with pytest.raises(ValidationError, match="needs engine: vllm"):
        VLLM.Config(template="harmony", engine="openai")
