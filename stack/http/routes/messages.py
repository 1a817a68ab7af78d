"""/v1/messages: Anthropic's Messages API, by responses that are not stored."""

from typing import Any, Final

from openai.types.responses import Response as ResponseObject
from starlette.requests import Request
from starlette.responses import Response

from apis.messages import CountMessageTokens, CreateMessage
from apis.responses import CreateResponse, ReasoningOptions
from providers.common.fair_turns import run_long
from stack.http.answers import json_response, value_response
from stack.http.context import HttpContext, Services
from stack.http.messages.answer import build_message
from stack.http.messages.conversion import MessageForm, build_form, convert_count, convert_message
from stack.http.messages.events import MessageEvents, MessageStream
from stack.http.messages.json_text import to_json
from stack.http.messages.window import fit_window
from stack.http.parsing import find_header
from stack.http.request_body import read_converted
from stack.http.route import RESPONSES, Route
from stack.http.routes.responses import begin_response, read_final_response
from stack.http.streams import run_while_connected

_SESSION_HEADER: Final = b"x-claude-code-session-id"
_MAX_KEY_CHARS: Final = 256
_MANY_ITEMS: Final = 1000
"""Items of a conversation that are counted in the tenant's turn."""
_LARGE_CHARS: Final = 256 * 1024
"""Characters of an answer that is encoded in the tenant's turn."""


async def create_message(http: Request, context: HttpContext, services: Services) -> Response:
    message, request = await read_converted(http, CreateMessage, convert_message)
    if message.diagnostics or (isinstance(request.input, list) and len(request.input) > _MANY_ITEMS):
        form = await run_long(build_form, message, request)
    else:
        form = build_form(message, request)
    del message  # its texts are in the request
    request = _add_server_options(http, services, request, form)
    responses = services.stack.responses
    request = await fit_window(request, form, responses, tenant=context.tenant, caller=context.caller)
    respond, record = begin_response(context, services, request), context.request_record
    if request.stream:
        events = MessageEvents(form)
        return MessageStream(
            respond,
            events.encode,
            services.monitor,
            record,
            creates_response=True,
            encode_error=events.encode_error,
        )
    response = await run_while_connected(http, read_final_response(respond, record))
    if len(response.output_text) > _LARGE_CHARS:
        return json_response(await run_long(_message_to_json, response, form))
    return json_response(_message_to_json(response, form))


async def count_message_tokens(http: Request, context: HttpContext, services: Services) -> Response:
    _, request = await read_converted(http, CountMessageTokens, convert_count, generates=False)
    count = await services.stack.responses.count_input_tokens(request, tenant=context.tenant, caller=context.caller)
    return value_response({"input_tokens": count.tokens})


MESSAGE_ROUTES: Final = (
    Route("POST", "/messages", RESPONSES, create_message, body=CreateMessage, stores=False),
    Route("POST", "/messages/count_tokens", RESPONSES, count_message_tokens, body=CountMessageTokens, stores=False),
)


def _message_to_json(response: ResponseObject, form: MessageForm) -> bytes:
    return to_json(build_message(response, form))


def _add_server_options(
    http: Request, services: Services, request: CreateResponse, form: MessageForm
) -> CreateResponse:
    """Return the request with the key by which the requests of one session of an agent find the same cache, and with a
    summary where the text of reasoning is hidden."""
    changes: dict[str, Any] = {}
    session = find_header(http.scope, _SESSION_HEADER)
    if session and len(session) <= _MAX_KEY_CHARS:
        changes["prompt_cache_key"] = session
    if services.stack.responses.hides_reasoning and form.shows_thinking and not form.omits_thinking:
        reasoning = request.reasoning or ReasoningOptions()
        changes["reasoning"] = reasoning.model_copy(update={"summary": "auto"})
    return request.model_copy(update=changes) if changes else request
