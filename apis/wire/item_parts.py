"""The parts of items: ids, statuses and content parts."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

ItemStatus = Literal["in_progress", "completed", "incomplete"]
CallId = Annotated[str, Field(min_length=1, max_length=256)]
ItemId = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x20\x7f]+$")]
AudioFormat = Annotated[str, Field(pattern=r"^[a-z0-9]{2,8}$")]
"""The ending of a file of audio, as `wav` or `mp3`."""
ToolName = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x20\x7f]+$")]


class ItemWire(BaseModel):
    """A part of an item: strict in its known fields, and lossless in unknown ones. Its schema is built at once: all
    models with items share it, which would otherwise each have one of their own."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class InputText(ItemWire):
    type: Literal["input_text"]
    text: str


class InputImage(ItemWire):
    """An image by URL (https or data) or by the id of an uploaded file."""

    type: Literal["input_image"]
    image_url: str | None = None
    file_id: str | None = None
    detail: Literal["low", "high", "auto", "original"] | None = None


class InputFile(ItemWire):
    """A file by its data (data URL or base64), by URL or by the id of an uploaded file."""

    type: Literal["input_file"]
    file_data: str | None = None
    file_url: str | None = None
    file_id: str | None = None
    filename: str | None = None


class AudioContent(ItemWire):
    """`data` is base64."""

    data: Annotated[str, Field(min_length=1)]
    format: AudioFormat


class InputAudio(ItemWire):
    """Speech or sounds, for models that hear them."""

    type: Literal["input_audio"]
    input_audio: AudioContent


class OutputText(ItemWire):
    type: Literal["output_text"]
    text: str


class OutputRefusal(ItemWire):
    type: Literal["refusal"]
    refusal: str


def text_or_list(value: Any) -> str:
    """Return the tag of content that is text or a list, so that a validation error concerns the intended form only."""
    return "text" if isinstance(value, str) else "list"


InputContentPart = Annotated[InputText | InputImage | InputFile | InputAudio, Field(discriminator="type")]
OutputContentPart = Annotated[InputText | OutputText | OutputRefusal, Field(discriminator="type")]
# fail_fast: only the first error is reported, and collecting 100,000 of them would block the event loop
_InputContentList = Annotated[list[InputContentPart], Field(fail_fast=True)]
_OutputContentList = Annotated[list[OutputContentPart], Field(fail_fast=True)]
InputContent = Annotated[
    Annotated[str, Tag("text")] | Annotated[_InputContentList, Tag("list")], Discriminator(text_or_list)
]
OutputContent = Annotated[
    Annotated[str, Tag("text")] | Annotated[_OutputContentList, Tag("list")], Discriminator(text_or_list)
]
