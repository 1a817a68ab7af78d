"""POST /audio/transcriptions of an OpenAI-compatible server: the form of a request, and the readers of its answers."""

import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, cast

import orjson

from apis.deltas import Delta, Finish, TextDelta, Usage
from apis.errors import StackError, UpstreamError
from apis.transcription import Transcript, TranscriptionRequest
from providers.inference.chat_completions.answer_body import AnswerBody, JsonReader
from providers.inference.chat_completions.answer_limits import text_bytes
from providers.inference.chat_completions.chunk_reader import ChunkReader
from providers.inference.chat_completions.errors import failure_to_error
from providers.inference.chat_completions.usage import parse_count, parse_usage

NO_TRANSCRIPTIONS: Final = "transcribes no audio"
TRANSCRIPTIONS_PATH: Final = "/audio/transcriptions"
_DONE: Final = b"[DONE]"
_INVALID: Final = "The inference server sent a transcript that is not valid."
_MAX_SECONDS: Final = 10**7
_SUBTITLES: Final = ("srt", "vtt")


def write_form(request: TranscriptionRequest) -> tuple[bytes, str]:
    """Return the form of a request and its content type. Text is asked for as JSON, in which it differs from an
    error."""
    boundary = secrets.token_hex(16)
    parts = [
        b'--%b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
        % (boundary.encode(), name.encode(), value.encode("utf-8", "replace"))
        for name, value in _fields(request)
    ]
    head = b'--%b\r\nContent-Disposition: form-data; name="file"; filename="%b"\r\nContent-Type: %b\r\n\r\n' % (
        boundary.encode(),
        _quote(request.filename),
        request.media_type.encode("latin-1", "replace"),
    )
    body = b"".join((*parts, head, request.audio, b"\r\n--%b--\r\n" % boundary.encode()))
    return body, f"multipart/form-data; boundary={boundary}"


def _fields(request: TranscriptionRequest) -> Iterator[tuple[str, str]]:
    yield "model", request.model
    response_format = "json" if request.response_format in (None, "text") else request.response_format
    values = {
        "response_format": response_format,
        "language": request.language,
        "prompt": request.prompt,
        "temperature": request.temperature,
        "stream": "true" if request.stream else None,
    }
    yield from ((name, str(value)) for name, value in values.items() if value is not None)
    yield from (("timestamp_granularities[]", name) for name in request.timestamp_granularities or ())


def _quote(filename: str) -> bytes:
    """Return a name as browsers write it into the head of a part."""
    name = filename.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")
    return name.encode("utf-8", "replace")


def parse_transcript(body: bytes, request: TranscriptionRequest) -> Transcript:
    """Return the transcript of a whole answer. Raises UpstreamError for anything else."""
    if request.response_format in _SUBTITLES and not body.lstrip().startswith((b"{", b'"')):
        return Transcript(body.decode("utf-8", "replace"))
    try:
        value: Any = orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        raise UpstreamError(_INVALID) from exc
    if isinstance(value, str) and request.response_format in _SUBTITLES:
        return Transcript(value)
    return _read_answer(_as_mapping(value), request)


def _read_answer(answer: Mapping[str, Any], request: TranscriptionRequest) -> Transcript:
    if answer.get("error"):
        raise failure_to_error(answer["error"], request.model, is_whole_answer=True)
    text = answer.get("text")
    if not isinstance(text, str):
        raise UpstreamError(_INVALID)
    fields = {**answer} if request.response_format == "verbose_json" else {}
    usage, seconds = _read_usage(answer.get("usage"))
    return Transcript(text, fields, usage, seconds if seconds is not None else _read_seconds(answer.get("duration")))


def _read_usage(value: Any) -> tuple[Usage | None, float | None]:
    """Return the tokens and the seconds that a server has counted."""
    counted = _as_mapping(value)
    if not counted:
        return None, None
    if "seconds" in counted:
        return None, _read_seconds(counted["seconds"])
    if "input_tokens" in counted:
        return Usage(parse_count(counted["input_tokens"]), parse_count(counted.get("output_tokens"))), None
    return parse_usage(counted), None


def _read_seconds(value: Any) -> float | None:
    """Return a duration, which some servers write as text."""
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        return None
    return seconds if math.isfinite(seconds) and 0 <= seconds <= _MAX_SECONDS else None


def _as_mapping(value: Any) -> Mapping[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


class TranscriptReader(ChunkReader):
    """Reader of a streamed transcript: of OpenAI's events, of vLLM's chunks, or of the one object of a server that
    does not stream. The last delta is a Finish."""

    def __init__(self, request: TranscriptionRequest) -> None:
        super().__init__()
        self._request = request
        self._body = AnswerBody()
        self._texts: list[str] = []
        self._usage: Usage | None = None
        self._seconds: float | None = None
        self._has_ended = False

    def read_transcript(self) -> Transcript:
        """Return the transcript of an answer that has ended."""
        return Transcript("".join(self._texts), {}, self._usage, self._seconds)

    def feed(self, data: bytes) -> list[Delta]:
        """See `ChunkReader.feed`."""
        return self._read(partial(self._body.feed, data))

    def end(self) -> list[Delta]:
        """See `ChunkReader.end`."""
        deltas: list[Delta] = []
        reader = self._body.reader
        if isinstance(reader, JsonReader):
            deltas += self._read(reader.end)
        if self.is_finished or self.failure is not None:
            return deltas
        if not self._has_ended:
            self.failure = UpstreamError("The inference server ended its transcript before its end.")
            return deltas
        return [*deltas, self._finish()]

    def _read(self, split: Callable[[], Sequence[bytes]]) -> list[Delta]:
        deltas: list[Delta] = []
        if self.is_finished or self.failure is not None:
            return deltas
        try:
            for payload in split():
                if payload == _DONE:
                    deltas.append(self._finish())
                    break
                deltas += self._read_payload(payload)
                if self.is_finished:
                    break
        except StackError as exc:
            self.failure = exc
        return deltas

    def _read_payload(self, payload: bytes) -> list[Delta]:
        try:
            value: Any = orjson.loads(payload)
        except orjson.JSONDecodeError as exc:
            raise UpstreamError(_INVALID) from exc
        chunk = _as_mapping(value)
        if not chunk:
            raise UpstreamError(_INVALID)
        if chunk.get("error"):
            is_whole = isinstance(self._body.reader, JsonReader)
            raise failure_to_error(chunk["error"], self._request.model, is_whole_answer=is_whole)
        usage, seconds = _read_usage(chunk.get("usage"))
        self._usage, self._seconds = usage or self._usage, seconds if seconds is not None else self._seconds
        match chunk.get("type"):
            case "transcript.text.delta":
                return self._add(chunk.get("delta"))
            case "transcript.text.done":
                return [*([] if self._texts else self._add(chunk.get("text"))), self._finish()]
            case _ if "choices" in chunk:
                return self._read_choices(chunk["choices"])
            case _ if isinstance(self._body.reader, JsonReader):
                return [*self._add(_read_answer(chunk, self._request).text), self._finish()]
            case _:
                return []

    def _read_choices(self, choices: Any) -> list[Delta]:
        deltas: list[Delta] = []
        for choice in cast("list[Any]", choices) if isinstance(choices, list) else ():
            fields = _as_mapping(choice)
            deltas += self._add(_as_mapping(fields.get("delta")).get("content"))
            self._has_ended = self._has_ended or fields.get("finish_reason") is not None
        return deltas

    def _add(self, text: Any) -> list[Delta]:
        if not isinstance(text, str) or not text:
            return []
        self._texts.append(text)
        self.delta_count += 1
        self.answer_bytes += text_bytes(text)
        return [TextDelta(text)]

    def _finish(self) -> Delta:
        self.is_finished = True
        return Finish("stop", self._usage or Usage())
