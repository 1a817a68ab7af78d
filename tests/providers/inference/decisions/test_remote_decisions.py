"""VLLM's decisions: by a server's own route, else by the first token of a chat, and every way in which both can lie."""

import json
import math
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from apis.chat import ImagePart, ImageUrl, TextPart
from apis.decisions import DecisionOption, DecisionQuestion, DecisionRequest
from apis.deltas import Usage
from apis.errors import ContextLengthExceeded, ModelNotFound, StackError, Unsupported, UpstreamError
from providers.inference.decisions.labels import LABELS
from providers.inference.llama_cpp.provider import LlamaCpp
from tests.providers.inference.remote import started
from tests.providers.llama_cpp.asking import MODEL, small_config
from tests.support.servers.upstream_server import Answer, Received, UpstreamServer, error_answer, json_answer

CHAT, NATIVE, TEXT = "/v1/chat/completions", "/v1/systemone", "/v1/completions"
ABSENT = json_answer({"detail": "Not Found"}, status=404)
TEXTS = {"predicate": ("yes", "no"), "choice": ("billing", "bug", "shipping"), "score": ("calm", "annoyed", "furious")}


def question(kind: Any, *descriptions: str, options: tuple[str, ...] | None = None) -> DecisionQuestion:
    texts = options or TEXTS[kind]
    described = zip(texts, [*descriptions, *[""] * len(texts)], strict=False)
    return DecisionQuestion(
        kind=kind,
        instructions=[TextPart(text=f"A {kind}?")],
        options=[DecisionOption(text=text, description=description) for text, description in described],
        param=f"questions.{kind}",
    )


def decision_request(*questions: DecisionQuestion, **fields: Any) -> DecisionRequest:
    own = [*questions] or [question("choice")]
    least = {"model": "fake-model", "input": [TextPart(text="I paid twice.")], "questions": own}
    return DecisionRequest.model_validate({**least, **fields})


def chat_answer(probabilities: Mapping[str, float], **usage: Any) -> Answer:
    top: list[dict[str, Any]] = [
        {"token": token, "logprob": math.log(each), "bytes": []} for token, each in probabilities.items()
    ]
    position: dict[str, Any] = {**top[0], "top_logprobs": top}
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": "A"},
        "logprobs": {"content": [position]},
    }
    counts = {"prompt_tokens": 20, "completion_tokens": 1, **usage}
    return json_answer({"choices": [{**choice, "finish_reason": "length"}], "usage": counts})


@asynccontextmanager
async def serving(
    *answers: Answer, native: Answer = ABSENT, **fields: Any
) -> AsyncGenerator[tuple[Any, UpstreamServer]]:
    async with UpstreamServer(*answers) as upstream:
        upstream.routes[NATIVE] = native
        async with started(upstream.base_url, **{"max_retries": 0, **fields}) as vllm:
            yield vllm, upstream


async def test_a_chat_model_decides_by_its_first_token() -> None:
    answer = chat_answer({"A": 0.5, " A": 0.1, "B": 0.2, "The": 0.1}, prompt_tokens_details={"cached_tokens": 16})
    async with serving(answer) as (vllm, upstream):
        decisions = await vllm.decide(decision_request(question("choice"), question("score"), orders=2))
    assert decisions.usage == Usage(80, 4, 64)
    assert decisions.option_mass == pytest.approx(0.8)
    assert decisions.probabilities == [pytest.approx([0.375, 0.25, 0.375])] * 2
    sent = [request.json for request in upstream.chats]
    assert len(sent) == 4
    body = sent[0]
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    expected = {"max_completion_tokens": 1, "logprobs": True, "top_logprobs": 20, "temperature": 0}
    assert {name: body[name] for name in expected} == expected
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert not {"stream", "stream_options", "cache_root"} & body.keys()
    assert len({json.dumps(one["messages"])[:150] for one in sent}) == 1


async def test_a_server_of_openais_kind_is_sent_openais_fields_alone() -> None:
    salted = decision_request(prompt_cache_key="k", cache_salt="tenant-x")
    async with serving(chat_answer({"C": 1.0}), engine="openai") as (vllm, upstream):
        decisions = await vllm.decide(salted)
    assert decisions.probabilities == [[0.0, 0.0, 1.0]]
    fields = {
        "model",
        "messages",
        "max_completion_tokens",
        "temperature",
        "logprobs",
        "top_logprobs",
        "prompt_cache_key",
    }
    assert upstream.chats[0].json.keys() == fields


async def test_gpt_oss_on_vllm_is_read_in_its_final_channel() -> None:
    top = {"A": math.log(0.6), "B": math.log(0.3), "Hm": -4.0, "C": None}
    answer = json_answer(
        {"choices": [{"text": "A", "logprobs": {"top_logprobs": [top]}}], "usage": {"prompt_tokens": 9}}
    )
    async with serving(answer, template="harmony") as (vllm, upstream):
        decisions = await vllm.decide(decision_request(cache_salt="s"))
        with pytest.raises(Unsupported, match="reads text only"):
            await vllm.decide(decision_request(input=[ImagePart(image_url=ImageUrl(url="data:image/png;base64,AA"))]))
    assert decisions.probabilities == [pytest.approx([2 / 3, 1 / 3, 0])]
    body = upstream.received[-1].json
    assert upstream.received[-1].path == TEXT
    assert body["prompt"][-3:][0] == 200005
    assert body["prompt"][-1] == 200008
    assert (body["max_tokens"], body["logprobs"], body["cache_salt"]) == (1, 20, "s")


def native_answer(request: Received) -> Answer:
    probabilities = {"billing": 0.5, "bug": 0.25, "shipping": 0.25}
    answers = {
        "q1": {"type": "noul", "noul": 0.9, "label_mass": 0.7},
        "q2": {"type": "choice", "choice": "billing", "probabilities": probabilities, "confidence": 1},
        "q3": {"type": "score", "score": 1, "probabilities": {"0": 0.1, "1": 0.2, "2": 0.1}, "label_mass": 0.8},
    }
    return json_answer({"model": "d", "answers": answers, "usage": {"input_tokens": 30, "output_tokens": 3}})


async def test_a_decision_model_is_asked_by_its_own_route() -> None:
    request = decision_request(
        question("predicate", "money back"),
        question("choice", "payments"),
        question("score", "", "a bit"),
        question("predicate"),
        instructions="Be strict.",
        orders=2,
    )
    async with UpstreamServer() as upstream, started(upstream.base_url) as vllm:
        upstream.routes[NATIVE] = native_answer
        decisions = await vllm.decide(request)
    assert decisions.probabilities == [
        pytest.approx([0.9, 0.1]),
        [0.5, 0.25, 0.25],
        pytest.approx([0.25, 0.5, 0.25]),
        None,
    ]
    assert (decisions.usage, decisions.option_mass) == (Usage(30, 3), 0.7)
    assert upstream.chats == []
    assert upstream.received[-1].json == {
        "model": "fake-model",
        "state": "Be strict.\n\nI paid twice.",
        "questions": {
            "q1": {"type": "noul", "instructions": "A predicate?", "criteria": {"true": "money back", "false": None}},
            "q2": {
                "type": "choice",
                "instructions": "A choice?",
                "criteria": {"billing": "payments", "bug": None, "shipping": None},
            },
            "q3": {"type": "score", "instructions": "A score?", "criteria": ["calm", "annoyed: a bit", "furious"]},
            "q4": {"type": "noul", "instructions": "A predicate?"},
        },
    }


@pytest.mark.parametrize("status", [400, 404, 405, 422, 501])
async def test_a_model_without_a_route_of_its_own_is_asked_by_chat_and_remembered(status: int) -> None:
    refusal = error_answer(status, "This is not a decision one.")
    async with serving(chat_answer({"A": 1.0}), native=refusal) as (vllm, upstream):
        for _ in range(3):
            await vllm.decide(decision_request())
    assert [request.path for request in upstream.received if request.path == NATIVE] == [NATIVE]
    assert len(upstream.chats) == 3


async def test_what_its_own_route_cannot_say_goes_to_the_chat() -> None:
    image = ImagePart(image_url=ImageUrl(url="data:image/png;base64,AA"))
    twins = question("choice", options=("true", "true"))
    async with UpstreamServer(chat_answer({"A": 1.0})) as upstream, started(upstream.base_url) as vllm:
        upstream.routes[NATIVE] = native_answer
        await vllm.decide(decision_request(input=[image]))
        await vllm.decide(decision_request(twins))
    assert [request.path for request in upstream.received] == ["/tokenize", CHAT, CHAT]
    content: Any = upstream.chats[0].json["messages"][1]["content"]
    assert [part["type"] for part in content] == ["text", "image_url", "text"]


async def test_images_are_refused_where_the_run_config_has_none() -> None:
    image = ImagePart(image_url=ImageUrl(url="data:image/png;base64,AA"))
    async with serving(chat_answer({"A": 1.0}), modalities=[]) as (vllm, upstream):
        with pytest.raises(Unsupported, match="reads text only") as caught:
            await vllm.decide(decision_request(input=[image]))
    assert (caught.value.param, upstream.received) == ("input", [])


async def test_twenty_one_options_are_refused_by_name() -> None:
    many = question("choice", options=tuple(map(str, range(21))))
    async with serving(chat_answer({"A": 1.0})) as (vllm, upstream):
        with pytest.raises(Unsupported, match="20 options at most, and here are 21") as caught:
            await vllm.decide(decision_request(question("choice"), many))
    assert caught.value.param == "questions.choice"
    assert upstream.chats == []


class ChosenTokens:
    """Answers as vLLM does: with the probabilities of the tokens that a request names, and that of its `likeliest`
    first token. The first label is a token with a space, too."""

    def __init__(self, upstream: UpstreamServer, *, labels: int = 52, likeliest: float = 0.0) -> None:
        self.tokens = ["\u0120A", *LABELS[:labels]]
        self._likeliest = likeliest
        upstream.routes["/tokenize"] = self._tokenize
        upstream.routes[CHAT] = self._chat

    def _tokenize(self, request: Received) -> Answer:
        body = request.json
        assert (body["add_special_tokens"], body["return_token_strs"]) == (False, True)
        assert {"A", " A", "ZZ", " ZZ"} <= {*body["prompt"].split("\n")}
        names = ["\u010a", *self.tokens, "\u0120"]
        return json_answer({"count": len(names), "tokens": [*range(len(names))], "token_strs": names})

    def _chat(self, request: Received) -> Answer:
        share = (1 - self._likeliest) / len(self.tokens)
        scored = {f"token_id:{each}": share for each in request.json["logprob_token_ids"]}
        return chat_answer({"token_id:900": self._likeliest or share} | scored)


def options(count: int) -> DecisionQuestion:
    return question("choice", options=tuple(map(str, range(count))))


async def test_vllm_scores_the_tokens_of_more_than_twenty_options() -> None:
    async with serving() as (vllm, upstream):
        server = ChosenTokens(upstream)
        decisions = await vllm.decide(decision_request(options(50), question("choice")))
        await vllm.decide(decision_request())
    first, second = decisions.probabilities
    assert first == pytest.approx([2 / 51, *[1 / 51] * 49])
    assert second == pytest.approx([2 / 4, 1 / 4, 1 / 4])
    assert decisions.option_mass == pytest.approx(4 / len(server.tokens))
    bodies = [request.json for request in upstream.chats]
    assert [len(body["logprob_token_ids"]) for body in bodies] == [51, 4, 4]
    assert [body["return_tokens_as_token_ids"] for body in bodies] == [True] * 3
    assert [request.path for request in upstream.received].count("/tokenize") == 1


async def test_vllm_is_sent_no_more_tokens_than_it_takes() -> None:
    async with serving() as (vllm, upstream):
        ChosenTokens(upstream, labels=255)
        decisions = await vllm.decide(decision_request(options(255)))
    assert [len(request.json["logprob_token_ids"]) for request in upstream.chats] == [128, 128]
    assert decisions.probabilities == [pytest.approx([2 / 256, *[1 / 256] * 254])]
    assert decisions.usage == Usage(40, 2)


async def test_more_options_than_labels_are_refused_by_name() -> None:
    async with serving() as (vllm, upstream):
        ChosenTokens(upstream)
        with pytest.raises(Unsupported, match="52 options at most, and here are 60") as caught:
            await vllm.decide(decision_request(options(60)))
    assert caught.value.param == "questions.choice"


async def test_a_model_that_reasons_first_is_an_error_although_its_labels_have_probabilities() -> None:
    async with serving() as (vllm, upstream):
        ChosenTokens(upstream, likeliest=0.9999)
        with pytest.raises(UpstreamError, match="none of the options"):
            await vllm.decide(decision_request())


@pytest.mark.parametrize(
    "answer",
    [chat_answer({"A": 0.75, "B": 0.25}), error_answer(400, "logprob_token_ids: extra fields not permitted")],
)
async def test_a_vllm_that_scores_no_chosen_tokens_is_read_by_its_likeliest_ones(answer: Answer) -> None:
    """An older one ignores the field, another one refuses it. It is remembered."""
    likeliest = chat_answer({"A": 0.75, "B": 0.25})
    async with serving() as (vllm, upstream):
        ChosenTokens(upstream)
        upstream.routes[CHAT] = lambda request: answer if "logprob_token_ids" in request.json else likeliest
        decisions = [await vllm.decide(decision_request()) for _ in range(2)]
        with pytest.raises(Unsupported, match="20 options at most, and here are 21"):
            await vllm.decide(decision_request(options(21)))
    assert [each.probabilities for each in decisions] == [[pytest.approx([0.75, 0.25, 0])]] * 2
    assert ["logprob_token_ids" in request.json for request in upstream.chats] == [True, False, False]


async def test_gpt_oss_on_vllm_is_scored_by_the_tokens_of_its_labels() -> None:
    def complete(request: Received) -> Answer:
        ids = request.json["logprob_token_ids"]
        top = {f"token_id:{each}": math.log(0.01 * (1 + at // 2)) for at, each in enumerate(ids)}
        choice = {"text": "A", "logprobs": {"top_logprobs": [top]}}
        return json_answer({"choices": [choice], "usage": {"prompt_tokens": 9}})

    async with serving(template="harmony") as (vllm, upstream):
        upstream.routes[TEXT] = complete
        decisions = await vllm.decide(decision_request())
    assert decisions.probabilities == [pytest.approx([1 / 6, 2 / 6, 3 / 6])]
    assert decisions.usage == Usage(9)
    assert "/tokenize" not in [request.path for request in upstream.received]


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (chat_answer({"The": 0.5, "<think>": 0.5}), UpstreamError, "none of the options"),
        (json_answer({"choices": [{"message": {"content": "A"}}]}), Unsupported, "no log probabilities"),
        (json_answer({"choices": [{"logprobs": {"content": []}}]}), Unsupported, "no log probabilities"),
        (json_answer({"choices": []}), Unsupported, "no log probabilities"),
        (json_answer({"choices": [{"logprobs": {"content": [{"token": 1}]}}]}), UpstreamError, "not valid"),
        (json_answer([]), UpstreamError, "not valid"),
        (error_answer(400, "This model's maximum context length is 10 tokens."), ContextLengthExceeded, "context"),
        (error_answer(404, "The model does not exist."), ModelNotFound, "fake-model"),
        (error_answer(500), UpstreamError, "500"),
    ],
)
async def test_a_chat_that_is_no_decision_is_an_error(answer: Answer, error: type[StackError], words: str) -> None:
    async with serving(answer) as (vllm, _):
        with pytest.raises(error, match=words):
            await vllm.decide(decision_request())


@pytest.mark.parametrize(
    "answers",
    [
        {"q1": {"type": "choice", "choice": "bug"}},
        {"q1": {"type": "choice", "probabilities": {"billing": -1, "bug": 2}}},
        {"q1": {"type": "choice", "probabilities": {"billing": "much"}}},
        {"q1": {"type": "choice", "probabilities": {"billing": True}}},
        {"q1": "bug"},
        [],
    ],
)
async def test_a_native_answer_without_probabilities_is_an_error(answers: Any) -> None:
    async with serving(native=json_answer({"answers": answers})) as (vllm, _):
        with pytest.raises(UpstreamError, match="decision"):
            await vllm.decide(decision_request())


async def test_a_real_server_without_decision_models_decides_as_it_does_here() -> None:
    """llama.cpp's own server answers 501 at its route for decisions, and its chats have log probabilities."""
    request = decision_request(question("choice"), question("predicate"), model=MODEL, orders=2)
    local = LlamaCpp(small_config(parallel=1), None)
    await local.start()
    try:
        own = await local.decide(request)
        pool: Any = local._pool  # pyright: ignore[reportPrivateUsage] - the only way to the engine's own address
        address = pool._models[MODEL].engine.address()
        async with started(f"{address.url}/v1", engine="openai", api_key=address.api_key) as vllm:
            remote = await vllm.decide(request)
    finally:
        await local.close()
    for one, other in zip(own.probabilities, remote.probabilities, strict=True):
        assert one == pytest.approx(other, abs=0.06)
    assert own.usage.input_tokens == remote.usage.input_tokens
