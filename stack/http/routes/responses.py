"""/v1/responses: create, read, stream, cancel and delete responses, count their input, compact their conversation."""

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final

from openai.types.responses import Response as ResponseObject
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from apis.conversations import ItemInclude
from apis.deltas import usage_from_wire
from apis.errors import InvalidRequest, NotFound
from apis.events import ResponseEvent
from apis.responses import CompactConversation, CreateResponse, InputItemListParams
from apis.sink import LastBatch, Sink, put_all
from apis.storage.keys import new_response_id
from apis.wire.base import remembered_json
from providers.common.fair_turns import end_pass, run_long
from stack.http.answers import deleted_response, json_response, value_response
from stack.http.context import HttpContext, Services
from stack.http.request_body import read_counted, read_metered, read_query
from stack.http.request_record import RequestRecord
from stack.http.route import RESPONSES, Route
from stack.http.sse import frame_encoder, read_dialect, response_to_json
from stack.http.streams import EventStream, Produce, run_while_connected

_LARGE_BYTES: Final = 256 * 1024
"""Bytes, or characters, of a response that is encoded in the tenant's turn."""


class ResponseParams(ItemInclude):
    """The query of GET /responses/{id}. The handler reads all but `include` by hand: any `stream` but `true` asks for
    the object."""

    stream: bool | None = None
    starting_after: int | None = Field(None, ge=0)
    include_obfuscation: bool | None = None


class CountInputTokens(CreateResponse):
    """A request to count the tokens of the prompt that a response would have. Without `model` it is about the model of
    its `prompt`, or about the one chat model of the server."""

    model: str | None = Field(None, min_length=1, max_length=256)  # pyright: ignore[reportIncompatibleVariableOverride] - frozen, so never written


async def create_response(http: Request, context: HttpContext, services: Services) -> Response:
    request = await read_metered(http, CreateResponse)
    respond, record = begin_response(context, services, request), context.request_record
    is_stored = request.store is not False and not request.background  # one in the background goes on in any case
    outlives_client = is_stored and services.stack.config.server.finish_stored_responses
    if request.stream:
        obfuscate = bool(request.stream_options and request.stream_options.include_obfuscation)
        return _stream_events(
            http,
            services,
            respond,
            record,
            obfuscate=obfuscate,
            creates_response=True,
            outlives_client=outlives_client,
        )
    final = read_final_response(respond, record)
    response = await (final if outlives_client else run_while_connected(http, final))
    return await _respond(http, services, response)


def begin_response(
    context: HttpContext, services: Services, request: CreateResponse
) -> Callable[[Sink[ResponseEvent]], Coroutine[Any, Any, None]]:
    """Return the function that puts the events of a new response into a sink; the record of the HTTP request expects
    the response from now on."""
    response_id = context.response_id or new_response_id()
    context.request_record.expect_response(response_id)
    return partial(
        services.stack.responses.respond,
        services.cache_salts.add_salt(request, context.tenant),
        tenant=context.tenant,
        response_id=response_id,
        charge=context.charge,
        caller=context.caller,
    )


async def count_input_tokens(http: Request, context: HttpContext, services: Services) -> Response:
    async def name_model(request: CountInputTokens) -> CountInputTokens:
        if request.model or request.prompt:
            return request
        return request.model_copy(update={"model": await _find_only_model(services)})

    request = await read_counted(http, CountInputTokens, complete=name_model)
    fields: dict[str, Any] = dict(request)
    count = await services.stack.responses.count_input_tokens(
        CreateResponse(**fields), tenant=context.tenant, caller=context.caller
    )
    estimate = {"estimated": True} if count.is_estimate else {}  # the SDK's type allows further fields
    return value_response({"object": "response.input_tokens", "input_tokens": count.tokens, **estimate})


async def compact_conversation(http: Request, context: HttpContext, services: Services) -> Response:
    request = await read_metered(http, CompactConversation)
    salted = services.cache_salts.add_salt(request, context.tenant)
    compaction = services.stack.responses.compact(salted, tenant=context.tenant, caller=context.caller)
    compacted = await run_while_connected(http, compaction)
    await end_pass(compacted.output)
    context.request_record.record_usage(request.model, usage_from_wire(compacted.usage))
    return json_response(compacted.model_dump_json(exclude_none=True).encode())


async def get_response(http: Request, context: HttpContext, services: Services) -> Response:
    include = read_query(http, ItemInclude).include or ()
    if http.query_params.get("stream") == "true":
        after = _parse_starting_after(http)
        batches = services.stack.responses.follow(
            parse_response_id(http), after, include=include, tenant=context.tenant
        )
        obfuscate = http.query_params.get("include_obfuscation") == "true"
        return _stream_events(http, services, partial(put_all, batches), context.request_record, obfuscate=obfuscate)
    response = await services.stack.responses.get(parse_response_id(http), include=include, tenant=context.tenant)
    return await _respond(http, services, response)


async def delete_response(http: Request, context: HttpContext, services: Services) -> Response:
    response_id = parse_response_id(http)
    await services.stack.responses.delete(response_id, tenant=context.tenant)
    return deleted_response(response_id, "response")


async def cancel_response(http: Request, context: HttpContext, services: Services) -> Response:
    response = await services.stack.responses.cancel(parse_response_id(http), tenant=context.tenant)
    return await _respond(http, services, response)


async def list_input_items(http: Request, context: HttpContext, services: Services) -> Response:
    params = read_query(http, InputItemListParams)
    items = await services.stack.responses.list_input_items(parse_response_id(http), params, tenant=context.tenant)
    return await run_long(value_response, items)


RESPONSE_PATH: Final = "/responses/{response_id}"

RESPONSE_ROUTES: Final = (
    Route(
        "POST",
        "/responses",
        RESPONSES,
        create_response,
        body=CreateResponse,
        stores=False,
        keyed=True,
        batched=True,
        websocket=True,
    ),
    Route("POST", "/responses/input_tokens", RESPONSES, count_input_tokens, body=CountInputTokens, stores=False),
    Route("POST", "/responses/compact", RESPONSES, compact_conversation, body=CompactConversation, stores=False),
    Route("GET", RESPONSE_PATH, RESPONSES, get_response, query=ResponseParams),
    Route("DELETE", RESPONSE_PATH, RESPONSES, delete_response, keyed=True),
    Route("POST", f"{RESPONSE_PATH}/cancel", RESPONSES, cancel_response, stores=False),
    Route("GET", f"{RESPONSE_PATH}/input_items", RESPONSES, list_input_items, query=InputItemListParams),
)


async def _find_only_model(services: Services) -> str:
    """Return the id of the one chat model. Raises InvalidRequest where there are more."""
    models = await services.stack.inference.models()
    chat_models = [model.id for model in models if model.embedding_dimensions is None]
    if len(chat_models) != 1:
        raise InvalidRequest("Missing required parameter: 'model'.", param="model", code="missing_required_parameter")
    return chat_models[0]


async def _respond(http: Request, services: Services, response: ResponseObject) -> Response:
    dialect = read_dialect(http.scope, services.stack.config.server.dialect)
    if len(remembered_json(response) or response.output_text) > _LARGE_BYTES:
        return json_response(await run_long(response_to_json, response, dialect))
    return json_response(response_to_json(response, dialect))


def _stream_events(
    http: Request,
    services: Services,
    produce: Produce,
    request_record: RequestRecord,
    *,
    obfuscate: bool,
    creates_response: bool = False,
    outlives_client: bool = False,
) -> Response:
    dialect = read_dialect(http.scope, services.stack.config.server.dialect)
    return EventStream(
        produce,
        frame_encoder(dialect, obfuscate),
        services.monitor,
        request_record,
        creates_response=creates_response,
        outlives_client=outlives_client,
    )


async def read_final_response(
    respond: Callable[[Sink[ResponseEvent]], Coroutine[Any, Any, None]], request_record: RequestRecord
) -> ResponseObject:
    """Return the response that the only event carries. A failed one raises its cause."""
    sink: LastBatch[Any] = LastBatch()  # `LastBatch[Any]()` would look the type up at each call
    try:
        await respond(sink)
    finally:
        request_record.observe(sink.batch[-1] if sink.batch else None)
    return sink.batch[-1].response


def parse_response_id(http: Request) -> str:
    """Return the id in the path. Raises NotFound for one that no response can have."""
    response_id: str = http.path_params["response_id"]
    if not (response_id.isascii() and response_id.isprintable() and len(response_id) <= 256 and "/" not in response_id):
        raise NotFound("No response has such an id.")
    return response_id


def _parse_starting_after(http: Request) -> int:
    """Return the sequence number after which the events start: -1 without the query parameter."""
    text = http.query_params.get("starting_after")
    if text is None:
        return -1
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        message = "'starting_after' is a whole number from 0 on."
        raise InvalidRequest(message, param="starting_after", code="invalid_value")
    return int(text)
