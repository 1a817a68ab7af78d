"""POST /completions of an OpenAI-compatible server: the body of a request, and the reader of its stream."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from apis.chat import TENANT_SALT_PREFIX, refuse_engine_options
from apis.completion import (
    CompletionBatch,
    CompletionDelta,
    CompletionLogprobs,
    CompletionRequest,
)
from apis.deltas import Delta, TextDelta, Usage
from apis.errors import StackError, Unsupported, UpstreamError
from providers.inference.chat_completions.answer_body import AnswerBody, JsonReader
from providers.inference.chat_completions.answer_limits import LOGPROB_BYTES, text_bytes
from providers.inference.chat_completions.body import ENGINE_FIELDS, GUIDED_FIELDS, UpstreamEngine, body_to_json
from providers.inference.chat_completions.chunk_reader import ChunkReader
from providers.inference.chat_completions.deviations import read_error, read_finish_reason
from providers.inference.chat_completions.errors import failure_to_error
from providers.inference.chat_completions.text_repair import repair_surrogates
from providers.inference.chat_completions.usage import parse_usage

NO_COMPLETIONS: Final = "has no text completions"
_DONE: Final = b"[DONE]"
_COPIED_FIELDS: Final = (
    *("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "stop", "logit_bias"),
    *("prompt", "max_tokens", "n", "echo", "suffix", "logprobs"),
    *ENGINE_FIELDS,
)
_INVALID_CHUNK: Final = "The inference server sent a completion that is not valid."


class _Logprobs(msgspec.Struct):
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None
    text_offset: list[int] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: Any = None
    error: Any = None


def write_completion(
    request: CompletionRequest, engine: UpstreamEngine, extra_body: Mapping[str, Any] | None = None
) -> tuple[str, bytes]:
    """Return the path and the body of a streamed request. Raises Unsupported for a field that the server has
    not."""
    if engine == "openai":
        refuse_engine_options(request)
    for name in GUIDED_FIELDS:
        if getattr(request, name) is not None:
            raise Unsupported(f"'{name}' is not offered here: send 'structured_outputs'.", param=name)
    body: dict[str, Any] = {"model": request.model, "stream": True, "stream_options": {"include_usage": True}}
    for name in _COPIED_FIELDS:
        value = getattr(request, name)
        if value is None:
            continue
        if name in ENGINE_FIELDS and engine == "openai":
            if name == "cache_salt" and value.startswith(TENANT_SALT_PREFIX):
                continue
            raise Unsupported(f"'{name}' is not supported by this model's server.", param=name)
        body[name] = value
    return "/completions", body_to_json({**body, **(extra_body or {})})


class CompletionReader(ChunkReader):
    """Reader of text completions. The deltas that `feed` returns only say that there is output; `take_batch` returns
    the pieces themselves."""

    def __init__(self, request: CompletionRequest) -> None:
        super().__init__()
        self._model = request.model
        self._open_indexes = set(range(request.completion_count))
        self._count = request.completion_count
        self._body = AnswerBody()
        self._usage: Usage | None = None
        self._batch: list[CompletionDelta | Usage] = []

    def feed(self, data: bytes) -> list[Delta]:
        """Return one delta per piece that `data` completed."""
        deltas: list[Delta] = []
        if self.is_finished or self.failure is not None:
            return deltas
        try:
            deltas += self._read_payloads(self._body.feed(data))
        except StackError as exc:
            self.failure = exc
        return deltas

    def end(self) -> list[Delta]:
        """Finish after the body ended. Sets `failure` where a completion has no end."""
        deltas: list[Delta] = []
        if self.is_finished or self.failure is not None:
            return deltas
        try:
            if isinstance(self._body.reader, JsonReader):
                deltas += self._read_payloads(self._body.reader.end())
            if not self.is_finished:
                deltas += self._finish()
        except StackError as exc:
            self.failure = exc
        return deltas

    def _read_payloads(self, payloads: Sequence[bytes]) -> list[Delta]:
        deltas: list[Delta] = []
        for payload in payloads:
            if payload == _DONE:
                return [*deltas, *self._finish()]
            deltas += self._read_chunk(payload)
        return deltas

    def _finish(self) -> list[Delta]:
        if self._open_indexes:
            raise UpstreamError("The inference server ended its answer without saying why.")
        self.is_finished = True
        if self._usage is None:
            return []
        self._batch.append(self._usage)
        return [TextDelta("")]

    def take_batch(self) -> CompletionBatch:
        """Return the pieces since the last call."""
        batch, self._batch = self._batch, []
        return batch

    def _read_chunk(self, payload: bytes) -> list[Delta]:
        chunk = _decode(payload)
        error, is_body = chunk.error, isinstance(self._body.reader, JsonReader)
        if error is None and not chunk.choices and chunk.usage is None:
            error = read_error(json.loads(payload.decode("utf-8", "replace")), is_body=is_body)
        if error is not None:
            raise failure_to_error(error, self._model, is_whole_answer=is_body)
        if chunk.usage is not None:
            self._usage = parse_usage(chunk.usage)
        choices = chunk.choices or []
        for choice in choices:
            self._batch.append(self._read_choice(choice))
        return [TextDelta(choice.text or "") for choice in choices]

    def _read_choice(self, choice: _Choice) -> CompletionDelta:
        if not 0 <= choice.index < self._count:
            raise UpstreamError(_INVALID_CHUNK)
        text = choice.text or ""
        self.delta_count += 1
        logprobs = None
        if choice.logprobs is not None:
            sent = choice.logprobs
            logprobs = CompletionLogprobs(
                sent.tokens or (), sent.token_logprobs or (), sent.top_logprobs or (), sent.text_offset or ()
            )
            self.answer_bytes += LOGPROB_BYTES * sum(1 + len(top or ()) for top in logprobs.top_logprobs)
            self.answer_bytes += LOGPROB_BYTES * len(logprobs.tokens)
        self.answer_bytes += text_bytes(text)
        reason = None if choice.finish_reason is None else read_finish_reason(choice.finish_reason)
        if reason == "error":
            raise UpstreamError("The inference server broke the generation off.")
        if reason is not None:
            self._open_indexes.discard(choice.index)
        return CompletionDelta(choice.index, text, "stop" if reason == "tool_calls" else reason, logprobs)


def _decode(payload: bytes) -> _Chunk:
    try:
        return msgspec.json.decode(payload, type=_Chunk)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:  # halves of surrogate pairs are legal JSON, but msgspec refuses them
        return msgspec.convert(
            json.loads(repair_surrogates(json.dumps(json.loads(payload), ensure_ascii=False))), _Chunk
        )
    except (ValueError, RecursionError, msgspec.DecodeError) as exc:
        raise UpstreamError(_INVALID_CHUNK) from exc
