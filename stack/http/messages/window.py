"""The bound of an answer in the window of its model.

Agents ask for tens of thousands of tokens in every request. Where prompt and answer do not fit together, an inference
server refuses the request; here the answer is bounded by the room that is left.
"""

import time
from collections.abc import Mapping
from typing import Final

from apis.accounts.accounts import Caller
from apis.errors import ContextLengthExceeded, CountingUnsupported, StackError
from apis.inference import Inference
from apis.responses import CreateResponse, Responses
from stack.http.messages.conversion import MessageForm

_MAX_AGE_S: Final = 60.0
"""Seconds between two listings of the models, each of which may query upstream servers."""
_FAILURE_AGE_S: Final = 5.0
"""Seconds after the beginning of a listing that failed."""
_ESTIMATE_FACTOR: Final = 3
"""A prompt is counted only where three times its estimated length would not fit."""
_ESTIMATE_MARGIN: Final = 1.2
_LEAST_ROOM: Final = 1


class ModelWindows:
    """The windows of the served models, and the bounds of answers in them."""

    def __init__(self, inference: Inference, responses: Responses) -> None:
        self._inference = inference
        self._responses = responses
        self._windows: Mapping[str, int | None] = {}
        self._next_listing_at = -float("inf")

    async def fit(self, request: CreateResponse, form: MessageForm, *, tenant: str, caller: Caller) -> CreateResponse:
        """Return the request with a bound of its output that fits. Raises ContextLengthExceeded for a prompt that
        leaves no room, with the figures by which clients decide how much to compact."""
        bound = request.max_output_tokens
        window = None if bound is None else await self._find_window(request.model)
        if window is None or bound is None or form.input_tokens * _ESTIMATE_FACTOR + bound <= window:
            return request
        try:
            count = await self._responses.count_input_tokens(request, tenant=tenant, caller=caller)
        except CountingUnsupported:
            return request
        if count.tokens >= window:
            message = f"prompt is too long: {count.tokens} tokens > {window} maximum"
            raise ContextLengthExceeded(message, param="messages")
        tokens = round(count.tokens * _ESTIMATE_MARGIN) if count.is_estimate else count.tokens
        room = max(_LEAST_ROOM, window - tokens)
        return request if bound <= room else request.model_copy(update={"max_output_tokens": room})

    async def _find_window(self, model: str) -> int | None:
        """Return the window of a model under any of its names; None where it is not known."""
        try:
            if time.monotonic() >= self._next_listing_at:
                self._next_listing_at = time.monotonic() + _FAILURE_AGE_S  # until then others go on with what is known
                self._windows = {each.id: each.context_tokens for each in await self._inference.models()}
                self._next_listing_at = time.monotonic() + _MAX_AGE_S
            if model not in self._windows:
                model = (await self._inference.find_names(model)).name
        except StackError:  # the request itself will say what is wrong
            return None
        return self._windows.get(model)
