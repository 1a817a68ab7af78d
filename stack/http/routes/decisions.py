"""/v1/decisions and /v1/systemone: typed questions about one input, answered by probabilities."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from apis.chat import ImagePart, TextPart
from apis.decisions import DecisionRequest, Decisions
from apis.wire.decisions import CreateDecision, CreateSystemOne
from providers.common.fair_turns import run_long
from stack.http.answers import json_response
from stack.http.chat_media import load_images, replace_url
from stack.http.context import HttpContext, Services
from stack.http.decisions.answers import apply_temperature, build_decision
from stack.http.decisions.conversion import convert_decision, find_images
from stack.http.decisions.system_one import build_system_one, convert_system_one, find_system_one_images
from stack.http.request_body import read_converted
from stack.http.route import RESPONSES, Route
from stack.http.streams import run_while_connected

WireT = TypeVar("WireT", CreateDecision, CreateSystemOne)
_MANY_PROBABILITIES: Final = 2048
"""Probabilities of an answer that is built in the tenant's turn."""


async def create_decision(http: Request, context: HttpContext, services: Services) -> Response:
    read = read_converted(http, CreateDecision, _with_orders(services, convert_decision))
    sent, request = await read
    decisions = await _decide(http, context, services, request, find_images(sent))
    return await _respond(services, sent.model, decisions, partial(build_decision, sent))


async def create_system_one(http: Request, context: HttpContext, services: Services) -> Response:
    read = read_converted(http, CreateSystemOne, _with_orders(services, convert_system_one))
    sent, request = await read
    decisions = await _decide(http, context, services, request, find_system_one_images(sent))
    return await _respond(services, sent.model, decisions, partial(build_system_one, sent))


DECISION_ROUTES: Final = (Route("POST", "/decisions", RESPONSES, create_decision, body=CreateDecision, stores=False),)
SYSTEM_ONE_ROUTES: Final = (
    Route("POST", "/systemone", RESPONSES, create_system_one, body=CreateSystemOne, stores=False),
)


def _with_orders(services: Services, convert: Callable[[WireT], DecisionRequest]) -> Callable[[WireT], DecisionRequest]:
    """Return the conversion to a request that is read in as many orders as the run config says."""
    orders = services.stack.config.decisions.orders
    return lambda sent: convert(sent).model_copy(update={"orders": orders})


async def _decide(
    http: Request, context: HttpContext, services: Services, request: DecisionRequest, images: Mapping[str, str]
) -> Decisions:
    """Return the decisions of the request's model, which the record of the HTTP request counts."""
    if images:
        request = _replace_urls(request, await load_images(images, services.stack.fetcher, "input"))
    salted = services.cache_salts.add_salt(request, context.tenant)
    decisions = await run_while_connected(http, services.stack.inference.decide(salted))
    context.request_record.record_usage(request.model, decisions.usage, category="decisions")
    return decisions


def _replace_urls(request: DecisionRequest, urls: Mapping[str, str]) -> DecisionRequest:
    def replace(parts: list[TextPart | ImagePart]) -> list[TextPart | ImagePart]:
        return [replace_url(part, urls) if isinstance(part, ImagePart) else part for part in parts]

    questions = [
        question.model_copy(update={"instructions": replace(question.instructions)}) for question in request.questions
    ]
    return request.model_copy(update={"input": replace(request.input), "questions": questions})


async def _find_temperature(services: Services, model: str) -> float:
    """Return the temperature of a model by the name that was asked for, else by another name of the model, else 1."""
    temperatures = services.stack.config.decisions.temperatures
    if not temperatures or model in temperatures:
        return temperatures.get(model, 1.0)
    names = await services.stack.inference.find_names(model)
    return next((temperatures[name] for name in (names.name, *names.aliases) if name in temperatures), 1.0)


async def _respond(
    services: Services, model: str, decisions: Decisions, build: Callable[[Decisions], dict[str, Any]]
) -> Response:
    temperature = await _find_temperature(services, model)

    def encode() -> bytes:
        return orjson.dumps(build(apply_temperature(decisions, temperature)))

    count = sum(len(each or ()) for each in decisions.probabilities)
    return json_response(await run_long(encode) if count > _MANY_PROBABILITIES else encode())
