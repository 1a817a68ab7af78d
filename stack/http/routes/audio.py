"""/v1/audio/transcriptions: the words of an audio file, from the models whose servers write them down."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from apis.deltas import TextDelta, Usage
from apis.errors import Unsupported
from apis.inference import Inference
from apis.sink import ConvertedSink, LastBatch, Sink
from apis.transcription import MAX_AUDIO_BYTES, CreateTranscription, Transcript, TranscriptionRequest
from providers.common.fair_turns import run_long
from stack.http.answers import json_response
from stack.http.context import HttpContext, Services
from stack.http.forms import open_form, read_form_fields
from stack.http.request_body import admit_request
from stack.http.request_record import RequestRecord
from stack.http.route import RESPONSES, Route
from stack.http.routes.chat import encode_stream_error
from stack.http.sse import encode_typed_events
from stack.http.streams import EventStream, run_while_connected

_COPIES: Final = 2
"""The file is in memory as it came, and as a part of the form that goes to the model's server."""
_LARGE_CHARS: Final = 256 * 1024
"""Characters of a transcript that is encoded in the tenant's turn."""
_OBJECTS: Final = (None, "json", "verbose_json")
_STREAMED: Final = (None, "json", "text")


async def create_transcription(http: Request, context: HttpContext, services: Services) -> Response:
    request = await _read_request(http, context, services)
    inference, record = services.stack.inference, context.request_record
    if request.stream:
        events = partial(_put_events, inference, request, record)
        monitor = services.monitor
        return EventStream(events, encode_typed_events, monitor, record, encode_error=encode_stream_error)
    work = inference.transcribe(request, LastBatch[str]())
    transcript = await run_while_connected(http, work)
    _record_usage(record, request.model, transcript)
    if request.response_format not in _OBJECTS:
        return PlainTextResponse(transcript.text)

    def encode() -> bytes:
        return orjson.dumps({**transcript.fields, "text": transcript.text, **_build_usage(transcript)})

    return json_response(await run_long(encode) if len(transcript.text) > _LARGE_CHARS else encode())


AUDIO_ROUTES: Final = (
    Route("POST", "/audio/transcriptions", RESPONSES, create_transcription, form=CreateTranscription, stores=False),
)


async def _read_request(http: Request, context: HttpContext, services: Services) -> TranscriptionRequest:
    async with open_form(http, MAX_AUDIO_BYTES, 1, field="file") as form:
        file = form.files["file"][0]
        fields = await admit_request(http, read_form_fields(form.fields, CreateTranscription), _count_text(form.fields))
        if fields.stream and fields.response_format not in _STREAMED:
            message = f"A stream has text: '{fields.response_format}' comes as a whole."
            raise Unsupported(message, param="response_format")
        services.shares.add_bytes(context.places, _COPIES * (file.size or 0), context.tenant)
        audio = await file.read()
    sent = {name: getattr(fields, name) for name in CreateTranscription.model_fields}
    return TranscriptionRequest(
        **sent,
        audio=audio,
        filename=file.filename or "audio",
        media_type=file.content_type or "application/octet-stream",
    )


def _count_text(fields: dict[str, Any]) -> int:
    return len(fields.get("prompt") or "")


async def _put_events(
    inference: Inference, request: TranscriptionRequest, record: RequestRecord, sink: Sink[dict[str, Any]]
) -> None:
    """Put the events of a streamed transcript into the sink."""

    def to_events(texts: Sequence[str]) -> Sequence[dict[str, Any]]:
        record.add_streamed([TextDelta(text) for text in texts])
        return [{"type": "transcript.text.delta", "delta": text} for text in texts]

    transcript = await inference.transcribe(request, ConvertedSink(sink, to_events))
    _record_usage(record, request.model, transcript)
    tokens = {} if transcript.usage is None else _build_usage(transcript)
    await sink.put([{"type": "transcript.text.done", "text": transcript.text, **tokens}])


def _record_usage(record: RequestRecord, model: str, transcript: Transcript) -> None:
    record.record_usage(model, transcript.usage or Usage())


def _build_usage(transcript: Transcript) -> dict[str, Any]:
    """Return the field `usage`: the tokens, or else the seconds that the server has counted."""
    if transcript.usage is not None:
        usage = transcript.usage
        total = usage.input_tokens + usage.output_tokens
        counts = {"input_tokens": usage.input_tokens, "output_tokens": usage.output_tokens, "total_tokens": total}
        return {"usage": {"type": "tokens", **counts}}
    return {} if transcript.seconds is None else {"usage": {"type": "duration", "seconds": transcript.seconds}}
