"""System One, the decisions of other servers: a state, questions by their ids, and answers under the same ids."""

from collections.abc import Sequence
from typing import Any, assert_never

import orjson
from pydantic import JsonValue

from apis.chat import ImagePart, ImageUrl, TextPart
from apis.decisions import PREDICATE_OPTIONS, DecisionOption, DecisionQuestion, DecisionRequest, Decisions
from apis.wire.decisions import (
    CreateSystemOne,
    CriteriaChoiceQuestion,
    CriteriaScoreQuestion,
    NoulQuestion,
    SystemOneQuestion,
)
from stack.http.decisions.answers import JsonObject, find_confidence, find_likeliest, find_score


def convert_system_one(request: CreateSystemOne) -> DecisionRequest:
    """Return the request that models read."""
    images = [ImagePart(image_url=ImageUrl(url=_to_url(image))) for image in request.images or ()]
    return DecisionRequest(
        model=request.model,
        input=[TextPart(text=_render(request.state)), *images],
        input_param="state",
        questions=[_convert_question(name, question) for name, question in request.questions.items()],
    )


def find_system_one_images(request: CreateSystemOne) -> dict[str, str]:
    """Return the place of each image by its URL."""
    return {_to_url(image): f"images[{at}]" for at, image in enumerate(request.images or ())}


def build_system_one(request: CreateSystemOne, decisions: Decisions) -> JsonObject:
    """Return the object that answers the request. A question that the model refused has no answer."""
    answers = {
        name: _build_answer(question, probabilities)
        for (name, question), probabilities in zip(request.questions.items(), decisions.probabilities, strict=True)
        if probabilities is not None
    }
    usage = decisions.usage
    return {
        "model": request.model,
        "answers": answers,
        "usage": {
            "input_tokens": usage.input_tokens,
            "cached_tokens": usage.cached_tokens,
            "output_tokens": usage.output_tokens,
            "total_tokens": usage.input_tokens + usage.output_tokens,
        },
    }


def _convert_question(name: str, question: SystemOneQuestion) -> DecisionQuestion:
    match question:
        case NoulQuestion():
            kind = "predicate"
            criteria = question.criteria or {}
            descriptions = (criteria.get("true"), criteria.get("false"))
            options = [*map(_build_option, PREDICATE_OPTIONS, descriptions)]
        case CriteriaChoiceQuestion():
            kind = "choice"
            options = [_build_option(text, description) for text, description in question.criteria.items()]
        case CriteriaScoreQuestion():
            kind = "score"
            options = [DecisionOption(text=_render(level)) for level in question.criteria]
        case _:
            assert_never(question)
    instructions: list[TextPart | ImagePart] = [TextPart(text=_render(question.instructions))]
    return DecisionQuestion(kind=kind, instructions=instructions, options=options, param=f"questions.{name}")


def _build_option(text: str, description: JsonValue) -> DecisionOption:
    return DecisionOption(text=text, description=_render(description))


def _build_answer(question: SystemOneQuestion, probabilities: Sequence[float]) -> JsonObject:
    match question:
        case NoulQuestion():
            return {"type": "noul", "noul": probabilities[0]}
        case CriteriaChoiceQuestion():
            names = [*question.criteria]
            return {
                "type": "choice",
                "choice": names[find_likeliest(probabilities)],
                "probabilities": dict(zip(names, probabilities, strict=True)),
                "confidence": find_confidence(probabilities),
            }
        case CriteriaScoreQuestion():
            return {
                "type": "score",
                "score": find_score(probabilities),
                "probabilities": {str(at): each for at, each in enumerate(probabilities)},
                "legend": {str(at): level for at, level in enumerate(question.criteria)},
                "confidence": find_confidence(probabilities),
            }
        case _:
            assert_never(question)


def _render(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def _to_url(image: str) -> str:
    return image if image.startswith("data:") else f"data:;base64,{image}"
