"""The providers of moderation under the laws of all, and the forms in which guard models answer."""

from typing import Any

import pytest

from apis.chat import TextPart
from apis.errors import UpstreamError
from apis.moderation import Moderation
from providers.moderation.guard import GuardModeration
from providers.moderation.predicates import PredicateModeration
from tests.conformance.moderation import LAWS, Law
from tests.support.models.word_guard import WordGuard
from tests.support.models.word_judge import WordJudge
from tests.support.servers.serving import serving

FIELDS: dict[str, Any] = {"model": "scripted", "piece_chars": 200}


def guard(form: str, **fields: Any) -> tuple[GuardModeration, WordGuard]:
    model = WordGuard(WordGuard.Config())
    config = GuardModeration.Config.model_validate({**FIELDS, "form": form, **fields})
    return GuardModeration(config, model), model


def predicates() -> Moderation:
    return PredicateModeration(PredicateModeration.Config(**FIELDS), WordJudge(WordJudge.Config()))


@pytest.mark.parametrize("kind", ["predicates", "llama_guard", "policy"])
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
async def test_every_provider_keeps_the_laws(law: Law, kind: str) -> None:
    await law(predicates() if kind == "predicates" else guard(kind, categories={"S1": ["violence"]})[0])


@pytest.mark.parametrize("form", ["llama_guard", "policy"])
async def test_an_answer_of_another_form_is_an_error(form: str) -> None:
    moderation, _ = guard(form)
    with pytest.raises(UpstreamError, match="guard model"):
        await moderation.judge([TextPart(text="mumble")])


async def test_the_codes_of_a_guard_have_the_categories_of_the_run_config() -> None:
    moderation, model = guard("llama_guard", categories={"S6": ["illicit"], "S1": []})
    scores = await moderation.judge([TextPart(text="kill")])
    assert scores.flagged == {"illicit"}
    (request,) = model.requests
    assert [message.role for message in request.messages] == ["user"]
    assert request.temperature == 0


async def test_a_policy_has_the_statements_of_the_run_config() -> None:
    moderation, model = guard("policy", statements={"hate": "It is rude."})
    await moderation.judge([TextPart(text="a flower")])
    (request,) = model.requests
    assert request.messages[0].role == "system"
    assert "- hate: It is rude.\n" in str(request.messages[0].content)


async def test_a_guard_answers_the_route_of_moderations() -> None:
    model = {"provider": "tests.support.models.word_guard:WordGuard"}
    section = {"provider": "guard", "form": "llama_guard", **FIELDS}
    async with serving(model, more={"moderation": section}) as served:
        moderation = await served.client.moderations.create(input=["kill", "a flower"])
    assert [result.flagged for result in moderation.results] == [True, False]
    assert moderation.results[0].category_scores.violence == 1.0
