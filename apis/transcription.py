"""Transcriptions: the words that are spoken in an audio file, and the form in which they are asked for."""

from dataclasses import dataclass, field
from typing import Any, Final, Literal

from pydantic import Field

from apis.deltas import Usage
from apis.wire.base import Wire

MAX_AUDIO_BYTES: Final = 25 * 1024 * 1024
"""Maximum bytes of an audio file; vLLM takes no more by default."""


class CreateTranscription(Wire):
    """Fields of the form, besides its file. `timestamp_granularities` are of the format `verbose_json`."""

    model: str = Field(min_length=1, max_length=256)
    language: str | None = Field(None, max_length=64)
    prompt: str | None = Field(None, max_length=32_000)
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    timestamp_granularities: list[Literal["word", "segment"]] | None = Field(None, max_length=2)
    stream: bool | None = None


class TranscriptionRequest(CreateTranscription):
    """One audio file to write down. `filename` is a label of any text, by whose ending a server may know the format."""

    audio: bytes = Field(repr=False)
    filename: str
    media_type: str


@dataclass(frozen=True, slots=True)
class Transcript:
    """The whole text of an audio file. `fields` are those of the JSON object that the format `verbose_json` has, or an
    empty object; for `srt` and `vtt` the text is the file of subtitles. `usage` is None where the server counts no
    tokens, `seconds` where it does not say how long the audio is."""

    text: str
    fields: dict[str, Any] = field(default_factory=dict[str, Any])
    usage: Usage | None = None
    seconds: float | None = None
