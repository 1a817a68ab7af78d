"""POST /v1/chat/completions: a second thin route over the same Inference."""

import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Literal, assert_never, cast

import orjson
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion_usage import CompletionTokensDetails, PromptTokensDetails
from pydantic import Field, field_validator
from starlette.requests import Request
from starlette.responses import Response

from apis.chat import ChatRequest
from apis.deltas import (
    Delta,
    DeltaBatch,
    Finish,
    ReasoningDelta,
    RefusalDelta,
    TextDelta,
    TokenLogprob,
    ToolArgumentsDelta,
    ToolCallStart,
    Usage,
)
from apis.errors import InvalidRequest, StackError, UpstreamError, error_to_body
from apis.wire.base import Wire, sdk_model_to_json
from stack.build import Stack
from stack.http.edge import client_disconnected_response, json_response
from stack.http.images import inline_images
from stack.http.parsing import read_request
from stack.http.request_record import RequestRecord
from stack.http.streams import ClientDisconnected, EventStream, StreamMonitor, run_while_connected


class ChatStreamOptions(Wire):
    include_usage: bool | None = None


class CreateChatCompletion(ChatRequest):
    """A chat request and how its answer is to be sent."""

    stream: bool | None = None
    stream_options: ChatStreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    n: Literal[1] | None = None

    @field_validator("messages", mode="before")
    @classmethod
    def _accept_reasoning_content(cls, messages: Any) -> Any:
        # answers carry it as `reasoning_content`, so that is how clients send it back
        given = cast(list[Any], messages) if isinstance(messages, list) else []
        for message in given:
            if isinstance(message, dict) and "reasoning_content" in message:
                fields = cast(dict[str, Any], message)
                fields.setdefault("reasoning", fields["reasoning_content"])
        return cast(Any, messages)


async def create_chat_completion(
    body: bytes, stack: Stack, add_salt: Callable[[ChatRequest], ChatRequest], monitor: StreamMonitor, http: Request
) -> Response:
    """The answer to one request, streamed or whole. `salted` gives it its tenant's cache salt."""
    request = await read_request(body, CreateChatCompletion)
    if request.tools and len({tool.name for tool in request.tools}) < len(request.tools):
        raise InvalidRequest("Two tools have the same name.", param="tools", code="invalid_value")
    fields = {name: getattr(request, name) for name in ChatRequest.model_fields}
    fields["max_completion_tokens"] = request.max_completion_tokens or request.max_tokens
    chat = await inline_images(ChatRequest.model_validate(fields), stack.fetcher)
    answer = _CompletionBuilder(request.model, http.scope["request_record"])
    steps = stack.inference.chat(add_salt(chat))
    if request.stream:
        wants_usage = bool(request.stream_options and request.stream_options.include_usage)
        return EventStream(answer.stream_chunks(steps, wants_usage=wants_usage), _encode_frames, monitor)
    try:
        completion = await run_while_connected(http.receive, answer.build_completion(steps))
    except ClientDisconnected:
        return client_disconnected_response()
    return json_response(sdk_model_to_json(completion))


def _encode_frames(chunks: Sequence[ChatCompletionChunk | dict[str, Any]]) -> bytes:
    data = [orjson.dumps(each) if isinstance(each, dict) else sdk_model_to_json(each) for each in chunks]
    return b"".join([b"data: %b\n\n" % each for each in data])


class _CompletionBuilder:
    """One completion being made."""

    def __init__(self, model: str, request_record: RequestRecord) -> None:
        self._model = model
        self._request_record = request_record
        self._common_fields: dict[str, Any] = {
            "id": f"chatcmpl-{secrets.token_hex(16)}",
            "created": int(time.time()),
            "model": model,
        }
        self._call_indexes: dict[str, int] = {}

    async def stream_chunks(
        self, batches: AsyncGenerator[DeltaBatch], *, wants_usage: bool
    ) -> AsyncGenerator[list[ChatCompletionChunk | dict[str, Any]]]:
        """One chunk per delta. A failure is told as an `error` object, then raised."""
        first: dict[str, Any] = {"role": "assistant", "content": ""}
        begun = False
        try:
            async with aclosing(batches):
                async for step in batches:
                    batch: list[ChatCompletionChunk | dict[str, Any]] = [] if begun else [self._build_chunk(first)]
                    begun = True
                    for delta in step:
                        batch.append(self._delta_to_chunk(delta))
                        if isinstance(delta, Finish):
                            self._request_record.record_usage(self._model, delta.usage)
                            if wants_usage:
                                batch.append(self._build_chunk(None, usage=_build_completion_usage(delta.usage)))
                    yield batch
        except StackError as exc:
            if begun:
                yield [error_to_body(exc)]
            raise

    async def build_completion(self, batches: AsyncGenerator[DeltaBatch]) -> ChatCompletion:
        """The same drained into one object."""
        text: list[str] = []
        reasoning: list[str] = []
        refusal: list[str] = []
        logprobs: list[TokenLogprob] = []
        calls: dict[str, tuple[ToolCallStart, list[str]]] = {}
        finish: Finish | None = None
        async with aclosing(batches):
            async for delta in _flatten_deltas(batches):
                match delta:
                    case TextDelta():
                        text.append(delta.text)
                        logprobs += delta.logprobs
                    case ReasoningDelta():
                        reasoning.append(delta.text)
                    case RefusalDelta():
                        refusal.append(delta.text)
                    case ToolCallStart():
                        calls[delta.id] = delta, []
                    case ToolArgumentsDelta():
                        calls[delta.id][1].append(delta.text)
                    case Finish():
                        finish = delta
                    case _:
                        assert_never(delta)
        if finish is None:
            raise UpstreamError("The inference server ended its answer without saying why.")
        self._request_record.record_usage(self._model, finish.usage)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": "".join(text) if text or not calls else None,
            "refusal": "".join(refusal) or None,
        }
        if reasoning:
            message["reasoning_content"] = "".join(reasoning)
        if calls:
            message["tool_calls"] = [_build_tool_call(start, "".join(pieces)) for start, pieces in calls.values()]
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": finish.reason,
            "logprobs": _build_logprobs(logprobs),
        }
        return ChatCompletion.model_validate(
            {
                **self._common_fields,
                "object": "chat.completion",
                "choices": [choice],
                "usage": _build_completion_usage(finish.usage),
            }
        )

    def _delta_to_chunk(self, delta: Delta) -> ChatCompletionChunk:
        match delta:
            case TextDelta():
                return self._build_chunk({"content": delta.text}, logprobs=_build_logprobs(delta.logprobs))
            case ReasoningDelta():
                return self._build_chunk({"reasoning_content": delta.text})
            case RefusalDelta():
                return self._build_chunk({"refusal": delta.text})
            case ToolCallStart():
                index = self._call_indexes[delta.id] = len(self._call_indexes)
                return self._build_chunk({"tool_calls": [{"index": index, **_build_tool_call(delta, "")}]})
            case ToolArgumentsDelta():
                # the SDK knows no pieces of a custom call's input: they go where a function's arguments go
                call = {"index": self._call_indexes[delta.id], "function": {"arguments": delta.text}}
                return self._build_chunk({"tool_calls": [call]})
            case Finish():
                return self._build_chunk({}, finish_reason=delta.reason)
            case _:
                assert_never(delta)

    def _build_chunk(
        self,
        delta: dict[str, Any] | None,
        *,
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
        usage: CompletionUsage | None = None,
    ) -> ChatCompletionChunk:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}
        return ChatCompletionChunk.model_validate(
            {
                **self._common_fields,
                "object": "chat.completion.chunk",
                "choices": [] if delta is None else [choice],
                "usage": usage,
            }
        )


async def _flatten_deltas(batches: AsyncGenerator[DeltaBatch]) -> AsyncGenerator[Delta]:
    async for step in batches:
        for delta in step:
            yield delta


def _build_tool_call(start: ToolCallStart, text: str) -> dict[str, Any]:
    if start.custom:
        return {"id": start.id, "type": "custom", "custom": {"name": start.name, "input": text}}
    return {"id": start.id, "type": "function", "function": {"name": start.name, "arguments": text}}


def _build_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    if not tokens:
        return None
    content = [
        {
            "token": each.token,
            "logprob": each.logprob,
            "bytes": [*each.bytes],
            "top_logprobs": [
                {"token": one.token, "logprob": one.logprob, "bytes": [*one.bytes]} for one in each.top_logprobs
            ],
        }
        for each in tokens
    ]
    return {"content": content, "refusal": None}


def _build_completion_usage(usage: Usage) -> CompletionUsage:
    return CompletionUsage(
        prompt_tokens=usage.input_tokens,
        completion_tokens=usage.output_tokens,
        total_tokens=usage.input_tokens + usage.output_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=usage.reasoning_tokens),
    )
