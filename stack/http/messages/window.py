"""The bound of an answer in the window of its model.

Agents ask for tens of thousands of tokens in every request. Where prompt and answer do not fit together, an inference
server refuses the request; here the answer is bounded by the room that is left.
"""

from typing import Final

from apis.accounts.accounts import Caller
from apis.errors import ContextLengthExceeded, CountingUnsupported
from apis.responses import CreateResponse
from stack.build import Stack
from stack.http.messages.conversion import MessageForm

_ESTIMATE_FACTOR: Final = 3
"""A prompt counts exactly only where three times its estimated length would not fit."""
_ESTIMATE_MARGIN: Final = 1.2
_LEAST_ROOM: Final = 1


async def fit_window(
    stack: Stack, request: CreateResponse, form: MessageForm, *, tenant: str, caller: Caller
) -> CreateResponse:
    """Return the request with a bound of its output that fits. Raises ContextLengthExceeded for a prompt that leaves no
    room, with the figures by which clients decide how much to compact."""
    window = await _find_window(stack, request.model)
    bound = request.max_output_tokens
    if window is None or bound is None or form.input_tokens * _ESTIMATE_FACTOR + bound <= window:
        return request
    try:
        count = await stack.responses.count_input_tokens(request, tenant=tenant, caller=caller)
    except CountingUnsupported:
        return request
    tokens = round(count.tokens * _ESTIMATE_MARGIN) if count.is_estimate else count.tokens
    if count.tokens >= window:
        raise ContextLengthExceeded(f"prompt is too long: {count.tokens} tokens > {window} maximum", param="messages")
    room = max(_LEAST_ROOM, window - tokens)
    return request if bound <= room else request.model_copy(update={"max_output_tokens": room})


async def _find_window(stack: Stack, model: str) -> int | None:
    models = {each.id: each for each in await stack.inference.models()}
    listed = models.get(model)
    if listed is None:
        listed = models.get((await stack.inference.find_names(model)).name)
    return None if listed is None else listed.context_tokens
