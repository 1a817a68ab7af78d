"""The bound of an answer in the window of its model.

Agents ask for tens of thousands of tokens in every request. Where prompt and answer do not fit together, an inference
server refuses the request; here the answer is bounded by the room that is left.
"""

from typing import Final

from apis.accounts.accounts import Caller
from apis.errors import ContextLengthExceeded, CountingUnsupported
from apis.responses import CreateResponse, Responses
from stack.http.messages.conversion import MessageForm

_ESTIMATE_FACTOR: Final = 3
"""A prompt is counted only where three times its estimated length would not fit."""
_ESTIMATE_MARGIN: Final = 1.2
_LEAST_ROOM: Final = 1


async def fit_window(
    request: CreateResponse, form: MessageForm, responses: Responses, *, tenant: str, caller: Caller
) -> CreateResponse:
    """Return the request with a bound of its output that fits. Raises ContextLengthExceeded for a prompt that leaves no
    room, with the figures by which clients decide how much to compact."""
    bound = request.max_output_tokens
    window = None if bound is None else await responses.find_window(request.model)
    if window is None or bound is None or form.input_tokens * _ESTIMATE_FACTOR + bound <= window:
        return request
    try:
        count = await responses.count_input_tokens(request, tenant=tenant, caller=caller)
    except CountingUnsupported:
        return request
    if count.tokens >= window:
        message = f"prompt is too long: {count.tokens} tokens > {window} maximum"
        raise ContextLengthExceeded(message, param="messages")
    tokens = round(count.tokens * _ESTIMATE_MARGIN) if count.is_estimate else count.tokens
    room = max(_LEAST_ROOM, window - tokens)
    return request if bound <= room else request.model_copy(update={"max_output_tokens": room})
