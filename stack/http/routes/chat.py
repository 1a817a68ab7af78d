"""/v1/chat/completions: the Chat Completions API over the same Inference, streamed or whole."""

import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, assert_never, cast

import orjson
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion_usage import CompletionTokensDetails, CompletionUsage, PromptTokensDetails
from pydantic import BaseModel, Field, field_validator
from starlette.requests import Request
from starlette.responses import Response

from apis.chat import ChatAllowedTools, ChatRequest, refuse_unsafe_engine_options
from apis.deltas import (
    DelayedOutput,
    Delta,
    DeltaBatch,
    Finish,
    ReasoningDelta,
    ReasoningSummaryDelta,
    RefusalDelta,
    TextDelta,
    TokenLogprob,
    ToolArgumentsDelta,
    ToolCallStart,
    Usage,
)
from apis.errors import InvalidRequest, StackError, UpstreamError, error_to_body
from apis.sink import LastBatch, ReceivingSink, Sink
from apis.wire.base import Wire, load_json, sdk_model_to_json
from apis.wire.request_options import ModerationOptions
from providers.common.grammars.chat import check_chat
from providers.common.moderated_inference import ModeratedInference, RequestModeration
from stack.http.answers import json_response
from stack.http.chat_media import inline_images, read_files
from stack.http.context import HttpContext, Services
from stack.http.request_body import read_metered
from stack.http.request_record import RequestRecord
from stack.http.route import RESPONSES, Route
from stack.http.streams import EventStream, run_while_connected


class ChatStreamOptions(Wire):
    include_usage: bool | None = None


class CreateChatCompletion(ChatRequest):
    """A chat request, and the form of its response."""

    stream: bool | None = None
    stream_options: ChatStreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    n: Literal[1] | None = None
    moderation: ModerationOptions | None = None

    @field_validator("messages", mode="before")
    @classmethod
    def _accept_reasoning_content(cls, messages: Any) -> Any:
        # responses carry the text as `reasoning` and as `reasoning_content`, and clients send back either
        for message in cast(list[Any], messages) if isinstance(messages, list) else []:
            if isinstance(message, dict) and "reasoning_content" in message:
                fields = cast(dict[str, Any], message)
                fields.setdefault("reasoning", fields["reasoning_content"])
        return cast(Any, messages)


async def create_chat_completion(http: Request, context: HttpContext, services: Services) -> Response:
    request = await read_metered(http, CreateChatCompletion)
    refuse_unsafe_engine_options(request)
    if request.tools and len({tool.name for tool in request.tools}) < len(request.tools):
        raise InvalidRequest("Two tools have the same name.", param="tools", code="invalid_value")
    fields = {name: getattr(request, name) for name in ChatRequest.model_fields}
    fields["cache_root"], fields["is_streamed"] = None, request.stream
    if isinstance(request.tool_choice, ChatAllowedTools) and request.tool_choice.allowed_tools.mode == "auto":
        # here nothing refuses the calls of other tools, as responses do
        allowed = {tool.name for tool in request.tool_choice.allowed_tools.tools}
        fields["tools"] = [tool for tool in request.tools or () if tool.name in allowed]
        fields["tool_choice"] = "auto"
    fields["max_completion_tokens"] = request.max_completion_tokens or request.max_tokens
    chat = await inline_images(ChatRequest.model_validate(fields), services.stack.fetcher)
    await check_chat(chat, context.tenant)
    inference, moderation = services.stack.inference, _find_moderation(request, context, services)
    if moderation is not None:
        judging = moderation.judge_input(_list_texts(chat), "messages")
        await run_while_connected(http, judging)
        inference = ModeratedInference(inference, moderation)
    chat = await read_files(chat, services.stack.inference, services.stack.reader, context.tenant)
    builder = _CompletionBuilder(
        request.model, context.request_record, moderation, hides_reasoning=services.stack.responses.hides_reasoning
    )
    stream = partial(inference.stream, services.cache_salts.add_salt(chat, context.tenant))
    if request.stream:
        wants_usage = bool(request.stream_options and request.stream_options.include_usage)
        build = partial(builder.build_chunks, wants_usage=wants_usage)

        async def put_chunks(sink: Sink[ChatCompletionChunk]) -> None:
            await stream(ReceivingSink(sink, build))

        return EventStream(
            put_chunks, encode_chunks, services.monitor, context.request_record, encode_error=encode_stream_error
        )
    completion = await run_while_connected(http, builder.build_completion(stream))
    return json_response(sdk_model_to_json(completion))


CHAT_ROUTES: Final = (
    Route(
        "POST",
        "/chat/completions",
        RESPONSES,
        create_chat_completion,
        body=CreateChatCompletion,
        stores=False,
        batched=True,
    ),
)


def encode_chunks(chunks: Sequence[BaseModel | dict[str, Any]]) -> bytes:
    """Return chunks and errors as frames of an event stream."""
    data = [orjson.dumps(chunk) if isinstance(chunk, dict) else sdk_model_to_json(chunk) for chunk in chunks]
    return b"".join([b"data: %b\n\n" % line for line in data])


def encode_stream_error(error: StackError) -> bytes:
    """Return the frame of an error that ends a stream of chunks."""
    return encode_chunks([error_to_body(error)])


def _find_moderation(
    request: CreateChatCompletion, context: HttpContext, services: Services
) -> RequestModeration | None:
    """Return the moderation that a request asks for. Raises Unsupported and InvalidRequest."""
    if request.moderation is None:
        return None
    salt = services.cache_salts.salt_of(context.tenant)
    count_use = None if context.charge is None else context.charge.count_aside
    return RequestModeration(services.stack.moderation, request.moderation, salt, count_use)


def _list_texts(chat: ChatRequest) -> Sequence[str]:
    """Return the texts of the user and of tools, which are the input that is moderated."""
    texts: list[str] = []
    for message in chat.messages:
        if message.role in ("user", "tool"):
            content = message.content
            parts = [content] if isinstance(content, str) else [getattr(part, "text", "") for part in content or ()]
            texts += [text for text in parts if text]
    return texts


@dataclass(slots=True)
class _DrainedChat:
    """The deltas of a whole chat, joined by kind."""

    text: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    refusal: list[str] = field(default_factory=list[str])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    calls: dict[str, tuple[ToolCallStart, list[str]]] = field(
        default_factory=dict[str, tuple[ToolCallStart, list[str]]]
    )
    finish: Finish | None = None

    def add(self, delta: Delta) -> None:
        match delta:
            case TextDelta():
                self.text.append(_continue_text(delta))
                self.logprobs += delta.logprobs
            case ReasoningDelta():
                self.reasoning.append(_continue_text(delta))
            case RefusalDelta():
                self.refusal.append(delta.text)
            case ToolCallStart():
                self.calls[delta.id] = delta, []
            case ToolArgumentsDelta():
                self.calls[delta.id][1].append(delta.text)
            case Finish():
                self.finish = delta
            case ReasoningSummaryDelta() | DelayedOutput():
                pass  # only responses have summaries; delayed output counts, and is not shown
            case _:
                assert_never(delta)

    def build_message(self, finish: Finish) -> dict[str, Any]:
        """Return the assistant's message of a completion."""
        message: dict[str, Any] = {
            "role": "assistant",
            "content": "".join(self.text) if self.text or not self.calls else None,
            "refusal": "".join(self.refusal) or None,
        }
        if self.reasoning:
            message["reasoning"] = message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = [
                _build_tool_call(start, text if start.custom else _complete_arguments(start.name, text, finish))
                for start, text in ((start, "".join(pieces)) for start, pieces in self.calls.values())
            ]
        return message


class _CompletionBuilder:
    """Builds one completion, as chunks or whole, and records its usage."""

    def __init__(
        self,
        model: str,
        request_record: RequestRecord,
        moderation: RequestModeration | None = None,
        *,
        hides_reasoning: bool,
    ) -> None:
        self._moderation = moderation
        self._hides_reasoning = hides_reasoning
        self._model = model
        self._request_record = request_record
        self._common_fields: dict[str, Any] = {
            "id": f"chatcmpl-{secrets.token_hex(16)}",
            "created": int(time.time()),
            "model": model,
        }
        self._call_indexes: dict[str, int] = {}
        self._functions: dict[str, tuple[str, list[str]]] = {}
        self._has_begun = False

    def build_chunks(self, deltas: DeltaBatch, *, wants_usage: bool) -> Sequence[ChatCompletionChunk]:
        """Return one chunk per delta, and those of the beginning and the end."""
        chunks = [] if self._has_begun else [self._build_chunk({"role": "assistant", "content": ""})]
        self._has_begun = True
        self._request_record.add_streamed(deltas)
        for delta in deltas:
            if isinstance(delta, Finish):
                chunks += self._complete_calls(delta)
            if isinstance(delta, DelayedOutput) or (self._hides_reasoning and isinstance(delta, ReasoningDelta)):
                continue
            chunks.append(self._delta_to_chunk(delta))
            if isinstance(delta, Finish):
                self._request_record.record_usage(self._model, delta.usage)
                if self._moderation is not None:
                    chunks.append(self._build_chunk(None, moderation=_build_moderation(self._moderation)))
                if wants_usage:
                    chunks.append(self._build_chunk(None, usage=_build_completion_usage(delta.usage)))
        return chunks

    async def build_completion(self, stream: Callable[[Sink[Delta]], Awaitable[None]]) -> ChatCompletion:
        """Return the completion that a drained stream makes. Raises UpstreamError if the stream has no end."""
        drained = _DrainedChat()

        def drain(deltas: DeltaBatch) -> DeltaBatch:
            self._request_record.add_streamed(deltas)
            for delta in deltas:
                if not (self._hides_reasoning and isinstance(delta, ReasoningDelta)):
                    drained.add(delta)
            return deltas

        await stream(ReceivingSink(LastBatch[Delta](), drain))
        if drained.finish is None:
            raise UpstreamError("The inference server ended its answer without saying why.")
        self._request_record.record_usage(self._model, drained.finish.usage)
        choice = {
            "index": 0,
            "message": drained.build_message(drained.finish),
            "finish_reason": drained.finish.reason,
            "logprobs": _build_logprobs(drained.logprobs),
        }
        return ChatCompletion.model_validate(
            {
                **self._common_fields,
                "object": "chat.completion",
                "choices": [choice],
                "usage": _build_completion_usage(drained.finish.usage),
                **({"moderation": _build_moderation(self._moderation)} if self._moderation is not None else {}),
            }
        )

    def _complete_calls(self, finish: Finish) -> list[ChatCompletionChunk]:
        """Return the chunks of arguments that the model left out. Raises UpstreamError for those that are no JSON."""
        chunks: list[ChatCompletionChunk] = []
        for call_id, (name, pieces) in self._functions.items():
            text = "".join(pieces)
            if (whole := _complete_arguments(name, text, finish)) != text:
                chunks.append(self._delta_to_chunk(ToolArgumentsDelta(call_id, whole)))
        return chunks

    def _delta_to_chunk(self, delta: Delta) -> ChatCompletionChunk:
        match delta:
            case TextDelta():
                return self._build_chunk({"content": _continue_text(delta)}, logprobs=_build_logprobs(delta.logprobs))
            case ReasoningDelta():
                text = _continue_text(delta)
                return self._build_chunk({"reasoning": text, "reasoning_content": text})
            case RefusalDelta():
                return self._build_chunk({"refusal": delta.text})
            case ToolCallStart():
                index = self._call_indexes[delta.id] = len(self._call_indexes)
                if not delta.custom:
                    self._functions[delta.id] = delta.name, []
                return self._build_chunk({"tool_calls": [{"index": index, **_build_tool_call(delta, "")}]})
            case ToolArgumentsDelta():
                if delta.id in self._functions:
                    self._functions[delta.id][1].append(delta.text)
                # the SDK has no delta for a custom call's input: it goes into the arguments of a function
                call = {"index": self._call_indexes[delta.id], "function": {"arguments": delta.text}}
                return self._build_chunk({"tool_calls": [call]})
            case Finish():
                return self._build_chunk({}, finish_reason=delta.reason)
            case ReasoningSummaryDelta() | DelayedOutput():
                raise AssertionError("no chunk of a completion shows it")
            case _:
                assert_never(delta)

    def _build_chunk(
        self,
        delta: dict[str, Any] | None,
        *,
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
        usage: CompletionUsage | None = None,
        moderation: dict[str, Any] | None = None,
    ) -> ChatCompletionChunk:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}
        return ChatCompletionChunk.model_validate(
            {
                **self._common_fields,
                "object": "chat.completion.chunk",
                "choices": [] if delta is None else [choice],
                "usage": usage,
                **({} if moderation is None else {"moderation": moderation}),
            }
        )


def _continue_text(delta: TextDelta | ReasoningDelta) -> str:
    """Return the text of a delta. A completion has one message: what the model wrote as several is in lines."""
    return f"\n{delta.text}" if delta.begins_message else delta.text


def _complete_arguments(name: str, arguments: str, finish: Finish) -> str:
    """Return the arguments of a function's call, which are an empty object where the model wrote none. Raises
    UpstreamError for those of a whole call that are no JSON object: a client would fail on them. A call that was cut
    off stays as it is."""
    if finish.reason in ("length", "content_filter"):
        return arguments
    if not arguments.strip():
        return "{}"
    try:
        is_object = isinstance(load_json(arguments), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise UpstreamError(f"The model called '{name}' with arguments that are no JSON object.")
    return arguments


def _build_tool_call(start: ToolCallStart, text: str) -> dict[str, Any]:
    if start.custom:
        return {"id": start.id, "type": "custom", "custom": {"name": start.name, "input": text}}
    return {"id": start.id, "type": "function", "function": {"name": start.name, "arguments": text}}


def _build_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    if not tokens:
        return None
    content = [
        {
            "token": token.token,
            "logprob": token.logprob,
            "bytes": [*token.bytes],
            "top_logprobs": [
                {"token": top.token, "logprob": top.logprob, "bytes": [*top.bytes]} for top in token.top_logprobs
            ],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _build_moderation(moderation: RequestModeration) -> dict[str, Any]:
    """Return the results of a moderation in the form of completions, which have lists of them."""
    return {
        name: result
        if result["type"] == "error"
        else {"type": "moderation_results", "model": result["model"], "results": [result]}
        for name, result in moderation.build_results().items()
    }


def _build_completion_usage(usage: Usage) -> CompletionUsage:
    return CompletionUsage(
        prompt_tokens=usage.input_tokens,
        completion_tokens=usage.output_tokens,
        total_tokens=usage.input_tokens + usage.output_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=usage.reasoning_tokens),
    )
