"""/v1/moderations by the decisions of a model, through the official SDK."""

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from openai import APIStatusError, BadRequestError, PermissionDeniedError
from openai.types import ModerationCreateResponse

from apis.moderation import CATEGORIES
from tests.spec.accounts.test_stored_keys import new_key
from tests.support.models.word_judge import HIGH, LOW, WordJudge
from tests.support.sdk.client import sdk_client
from tests.support.sdk.decisions import PIXEL
from tests.support.servers.serving import Served, serving
from tests.support.tenants.accounts import CHAINED, ROOT, new_project, organization_of, usage_results

Json = dict[str, Any]
JUDGE: Json = {"provider": "tests.support.models.word_judge:WordJudge"}


@asynccontextmanager
async def moderating(*, more: Json | None = None, server: Json | None = None, **fields: Any) -> AsyncGenerator[Served]:
    section = {"provider": "predicates", "model": "scripted", **fields}
    async with serving(JUDGE, more={"moderation": section, **(more or {})}, server=server) as served:
        yield served


def judge_of(served: Served) -> WordJudge:
    return cast(WordJudge, served.stack.inference)


async def moderate(served: Served, **fields: Any) -> Any:
    moderations: Any = served.client.moderations
    return await moderations.create(**fields)


async def test_a_text_has_the_scores_of_every_category() -> None:
    async with moderating() as served:
        answer: ModerationCreateResponse = await moderate(
            served, input="I will kill it.", model="omni-moderation-latest"
        )
        (request,) = judge_of(served).judged
    assert ModerationCreateResponse.model_validate(answer.to_dict())
    assert answer.id.startswith("modr-")
    assert answer.model == "omni-moderation-latest"
    (result,) = answer.results
    assert result.flagged
    scores = result.category_scores.to_dict()
    assert {*scores} == {*CATEGORIES}
    assert [name for name, flagged in result.categories.to_dict().items() if flagged] == ["violence"]
    assert (scores["violence"], scores["hate"]) == (HIGH, LOW)
    assert result.category_applied_input_types.violence == ["text"]
    assert len(request.questions) == len(CATEGORIES)


async def test_each_text_has_its_own_result_and_parts_have_one() -> None:
    async with moderating() as served:
        texts = await moderate(served, input=["kill", "a flower", "scum"])
        assert [result.flagged for result in texts.results] == [True, False, True]
        assert texts.model == "scripted", "without a name, the model that was asked"
        image = {"type": "image_url", "image_url": {"url": PIXEL}}
        (parts,) = (await moderate(served, input=[{"type": "text", "text": "Look: scum"}, image])).results
        assert (parts.categories.hate, parts.categories.sexual, parts.categories.violence) == (True, True, False)
        assert parts.category_applied_input_types.sexual == ["text", "image"]
        (alone,) = (await moderate(served, input=[image])).results
        assert alone.category_applied_input_types.sexual == ["image"]


async def test_thresholds_and_statements_are_those_of_the_run_config() -> None:
    fields: Json = {"threshold": 0.95, "thresholds": {"hate": 0.05}, "statements": {"hate": "It is rude."}}
    async with moderating(**fields) as served:
        (result,) = (await moderate(served, input="kill")).results
        instructions = judge_of(served).judged[0].questions[CATEGORIES.index("hate")].instructions
    assert (result.categories.violence, result.categories.hate) == (False, True)
    assert instructions[0].model_dump()["text"] == "It is rude."


async def test_a_long_text_is_judged_in_pieces_that_overlap() -> None:
    async with moderating(piece_chars=200) as served:
        text = "a flower " * 60 + "kill"
        (result,) = (await moderate(served, input=text)).results
        pieces = [request.input[0].model_dump()["text"] for request in judge_of(served).judged]
    assert result.categories.violence
    assert all(len(piece) <= 200 for piece in pieces)
    assert pieces[0] + "".join(piece[25:] for piece in pieces[1:]) == text
    async with moderating(piece_chars=200) as served:
        with pytest.raises(BadRequestError) as caught:
            await moderate(served, input=["short", "x" * 20_000])
    assert (caught.value.param, caught.value.code) == ("input[1]", "string_above_max_length")


REFUSED: dict[str, tuple[Json, str]] = {
    "a model of another name": ({"input": "x", "model": "guard"}, "model"),
    "no texts": ({"input": []}, "input"),
    "too many texts": ({"input": ["x"] * 33}, "input"),
    "a number": ({"input": [1]}, "input[0]"),
    "a part of another kind": ({"input": [{"type": "audio"}]}, "input[0].type"),
    "an image that is none": (
        {"input": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}]},
        "input[0].image_url.url",
    ),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
async def test_an_input_that_cannot_be_judged_is_refused_by_its_field(case: tuple[Json, str]) -> None:
    fields, param = case
    async with moderating() as served:
        with pytest.raises(BadRequestError) as caught:
            await moderate(served, **fields)
        assert caught.value.param == param
        assert not judge_of(served).judged


async def test_a_model_that_fails_or_makes_no_decisions_is_an_error() -> None:
    async with moderating() as served:
        with pytest.raises(APIStatusError) as broken:
            await moderate(served, input="broken")
    assert broken.value.status_code == 502
    section = {"provider": "predicates", "model": "scripted"}
    async with serving(more={"moderation": section}) as served:
        with pytest.raises(BadRequestError, match="makes no decisions"):
            await moderate(served, input="x")
    async with serving() as served:
        with pytest.raises(BadRequestError, match="`moderation`") as missing:
            await moderate(served, input="x")
    assert missing.value.code == "not_configured"


async def test_moderations_are_counted_and_closed_to_keys_for_other_models() -> None:
    async with moderating(more={"accounts": {"provider": "stored"}}) as served:
        other = await new_key(served, "alpha", "model:other")
        async with sdk_client(served.url, other.value) as client:
            with pytest.raises(PermissionDeniedError) as caught:
                await client.moderations.create(input="x")
            assert caught.value.code == "model_not_allowed"
        named = await new_key(served, "alpha", "model:omni-moderation-latest")
        async with sdk_client(served.url, named.value) as client:
            await client.moderations.create(input="x")
    async with moderating(more=CHAINED, server={"api_keys": [ROOT]}) as served:
        organization = organization_of(served.client)
        project, key = await new_project(organization)
        async with sdk_client(served.url, key) as client:
            await client.moderations.create(input=["four", "five!"])
        since = int(time.time()) // 86_400 * 86_400
        (result,) = usage_results(await organization.usage.moderations(start_time=since, project_ids=[project]))
        assert (result.num_model_requests, result.input_tokens) == (1, 9)
        assert usage_results(await organization.usage.completions(start_time=since, project_ids=[project])) == []
