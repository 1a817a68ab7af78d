"""POST /systemone of a server that has decision models: the body of a request, and the answers to it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from apis.chat import ImagePart
from apis.decisions import DecisionOption, DecisionQuestion, DecisionRequest, Decisions
from apis.deltas import Usage
from apis.errors import UpstreamError
from providers.inference.chat_completions.body import body_to_json
from providers.inference.chat_completions.usage import parse_count
from providers.inference.decisions.prompts import join_texts

NO_DECISIONS: Final = "makes no decisions"
_MASS_FIELDS: Final = ("label_mass", "option_mass")
"""Names of the share of probability that the options had."""


class _Answers(msgspec.Struct):
    answers: dict[str, Any]
    usage: Any = None


def request_to_system_one_body(request: DecisionRequest) -> bytes | None:
    """Return the body; None for a request that has no such form, with images or two options of one text."""
    parts = [*request.input, *(part for question in request.questions for part in question.instructions)]
    if any(isinstance(part, ImagePart) for part in parts):
        return None
    if any(len({option.text for option in question.options}) < len(question.options) for question in request.questions):
        return None
    state = join_texts(request.input)
    if request.instructions:
        state = f"{request.instructions}\n\n{state}"
    questions = {_name(at): _build_question(question) for at, question in enumerate(request.questions)}
    return body_to_json({"model": request.model, "state": state, "questions": questions})


def parse_system_one(body: bytes, request: DecisionRequest) -> Decisions:
    """Return the decisions. A question without an answer is refused. Raises UpstreamError for answers that are no
    probabilities."""
    try:
        answered = msgspec.json.decode(body, type=_Answers)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise UpstreamError("The inference server sent decisions that are not valid.") from exc
    probabilities: list[Sequence[float] | None] = []
    masses: list[float] = []
    for at, question in enumerate(request.questions):
        answer = answered.answers.get(_name(at))
        if answer is None:
            probabilities.append(None)
            continue
        fields = _as_mapping(answer)
        probabilities.append(_read_probabilities(fields, question))
        masses += [float(fields[name]) for name in _MASS_FIELDS if isinstance(fields.get(name), int | float)]
    return Decisions(probabilities, _parse_usage(answered.usage), min(masses, default=None))


def _build_question(question: DecisionQuestion) -> dict[str, Any]:
    fields: dict[str, Any] = {"instructions": join_texts(question.instructions)}
    match question.kind:
        case "predicate":
            yes, no = question.options
            fields["type"] = "noul"
            if yes.description or no.description:
                fields["criteria"] = {"true": yes.description or None, "false": no.description or None}
        case "choice":
            fields["type"] = "choice"
            fields["criteria"] = {option.text: option.description or None for option in question.options}
        case "score":
            fields["type"] = "score"
            fields["criteria"] = [_level(option) for option in question.options]
    return fields


def _level(option: DecisionOption) -> str:
    return f"{option.text}: {option.description}" if option.description else option.text


def _read_probabilities(answer: Mapping[str, Any], question: DecisionQuestion) -> Sequence[float]:
    """Return the probabilities of the options, which sum to 1. A missing one is 0."""
    if question.kind == "predicate":
        yes = _read_number(answer.get("noul", answer.get("probability")))
        values = [yes, 1 - yes]
    else:
        keys = [option.text if question.kind == "choice" else str(at) for at, option in enumerate(question.options)]
        listed: Any = answer.get("probabilities")
        if isinstance(listed, list):
            listed = dict(zip(keys, cast("list[Any]", listed), strict=False))
        listed = _as_mapping(listed)
        values = [_read_number(listed.get(key, 0)) for key in keys]
    total = math.fsum(values)
    if min(values) < 0 or total <= 0:
        raise UpstreamError("The inference server sent decisions without probabilities.")
    return [value / total for value in values]


def _read_number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UpstreamError("The inference server sent a decision whose probability is not a number.")
    return float(value)


def _parse_usage(value: object) -> Usage:
    usage = _as_mapping(value)
    details = _as_mapping(usage.get("input_tokens_details"))
    input_tokens = parse_count(usage.get("input_tokens", usage.get("prompt_tokens")))
    output_tokens = parse_count(usage.get("output_tokens", usage.get("completion_tokens")))
    cached_tokens = parse_count(usage.get("cached_tokens", details.get("cached_tokens")))
    return Usage(input_tokens, output_tokens, min(cached_tokens, input_tokens))


def _as_mapping(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else {}


def _name(at: int) -> str:
    return f"q{at + 1}"
