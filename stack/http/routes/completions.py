"""/v1/completions: text completions of the models whose servers have them, streamed or whole."""

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import Response

from apis.chat import refuse_unsafe_engine_options
from apis.completion import (
    MAX_COMPLETIONS,
    CompletionBatch,
    CompletionDelta,
    CompletionLogprobs,
    CompletionRequest,
)
from apis.deltas import Usage
from apis.errors import InvalidRequest, UpstreamError
from apis.sink import put_all
from stack.http.answers import json_response
from stack.http.context import HttpContext, Services
from stack.http.request_body import read_metered
from stack.http.request_record import RequestRecord
from stack.http.route import RESPONSES, Route
from stack.http.routes.chat import ChatStreamOptions, encode_chunks, encode_stream_error
from stack.http.streams import EventStream, run_while_connected


class CreateCompletion(CompletionRequest):
    """A request for text completions, and the form of its response."""

    stream: bool | None = None
    stream_options: ChatStreamOptions | None = None


async def create_completion(http: Request, context: HttpContext, services: Services) -> Response:
    request = await read_metered(http, CreateCompletion)
    refuse_unsafe_engine_options(request, ("echo",))
    if request.completion_count > MAX_COMPLETIONS:
        message = f"The prompts, each 'n' times, are more than {MAX_COMPLETIONS} completions."
        raise InvalidRequest(message, param="n", code="integer_above_max_value")
    fields = {name: getattr(request, name) for name in CompletionRequest.model_fields}
    salted = services.cache_salts.add_salt(CompletionRequest.model_construct(**fields), context.tenant)
    builder = _TextCompletionBuilder(request, context.request_record)
    batches = services.stack.inference.complete(salted)
    if request.stream:
        chunks = builder.stream_chunks(batches)
        return EventStream(
            partial(put_all, chunks),
            encode_chunks,
            services.monitor,
            context.request_record,
            encode_error=encode_stream_error,
        )
    completion = await run_while_connected(http, builder.build_completion(batches))
    return json_response(orjson.dumps(completion))


COMPLETION_ROUTES: Final = (
    Route("POST", "/completions", RESPONSES, create_completion, body=CreateCompletion, stores=False, batched=True),
)


@dataclass(slots=True)
class _DrainedCompletion:
    """The pieces of one completion, joined by kind."""

    texts: list[str] = field(default_factory=list[str])
    logprobs: list[CompletionLogprobs] = field(default_factory=list[CompletionLogprobs])
    finish_reason: str | None = None

    def add(self, delta: CompletionDelta) -> None:
        self.texts.append(delta.text)
        if delta.logprobs is not None:
            self.logprobs.append(delta.logprobs)
        self.finish_reason = delta.finish_reason or self.finish_reason

    def build_choice(self, index: int) -> dict[str, Any]:
        """Return the whole completion. Raises UpstreamError if it has no end."""
        if self.finish_reason is None:
            raise UpstreamError("The inference server ended its answer without saying why.")
        logprobs = _join_logprobs(self.logprobs) if self.logprobs else None
        return _build_choice(index, "".join(self.texts), self.finish_reason, logprobs)


class _TextCompletionBuilder:
    """Builds the object of one request, as chunks or whole, and records its usage. The objects are dicts, because the
    SDK's model has no null for the end of a piece and for the probability of a prompt's first token."""

    def __init__(self, request: CreateCompletion, request_record: RequestRecord) -> None:
        self._model = request.model
        self._count = request.completion_count
        self._wants_usage = bool(request.stream_options and request.stream_options.include_usage)
        self._request_record = request_record
        self._id = f"cmpl-{secrets.token_hex(16)}"
        self._created = int(time.time())

    async def stream_chunks(self, batches: AsyncGenerator[CompletionBatch]) -> AsyncGenerator[list[dict[str, Any]]]:
        """Yield one chunk per piece."""
        async with aclosing(batches):
            async for batch in batches:
                self._request_record.add_streamed(batch)
                if chunks := [chunk for delta in batch if (chunk := self._to_chunk(delta)) is not None]:
                    yield chunks

    async def build_completion(self, batches: AsyncGenerator[CompletionBatch]) -> dict[str, Any]:
        """Return the object that a drained stream makes."""
        drained = [_DrainedCompletion() for _ in range(self._count)]
        usage = Usage()
        async with aclosing(batches):
            async for batch in batches:
                self._request_record.add_streamed(batch)
                for delta in batch:
                    if isinstance(delta, Usage):
                        usage = delta
                    else:
                        drained[delta.index].add(delta)
        self._request_record.record_usage(self._model, usage)
        return self._build_object([one.build_choice(index) for index, one in enumerate(drained)], usage)

    def _to_chunk(self, delta: CompletionDelta | Usage) -> dict[str, Any] | None:
        if isinstance(delta, Usage):
            self._request_record.record_usage(self._model, delta)
            return self._build_object([], delta) if self._wants_usage else None
        return self._build_object([_build_choice(delta.index, delta.text, delta.finish_reason, delta.logprobs)], None)

    def _build_object(self, choices: list[dict[str, Any]], usage: Usage | None) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "usage": None if usage is None else _usage_to_wire(usage),
        }


def _build_choice(
    index: int, text: str, finish_reason: str | None, logprobs: CompletionLogprobs | None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _usage_to_wire(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.input_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _join_logprobs(parts: Sequence[CompletionLogprobs]) -> CompletionLogprobs:
    return CompletionLogprobs(
        [token for part in parts for token in part.tokens],
        [each for part in parts for each in part.token_logprobs],
        [top for part in parts for top in part.top_logprobs],
        [offset for part in parts for offset in part.text_offset],
    )
