"""The settings of an image, and the tool `image_generation` as a Responses request declares it."""

from typing import Annotated, Final, Literal

from pydantic import Field

from apis.wire.base import ToolWire, Wire

ImageOption = Literal[
    "background",
    "complexity",
    "frame_count",
    "frame_duration_ms",
    "input_fidelity",
    "moderation",
    "output_compression",
    "output_format",
    "quality",
    "size",
]
"""Fields of the tool that an images server takes under the same names."""
MAX_PARTIAL_IMAGES: Final = 3


class ImageMask(Wire):
    """The part of the first image that may change, by URL (https or data) or by the id of an uploaded file."""

    image_url: str | None = None
    file_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None


class ImageSettings(Wire):
    """The form of an image that is to be generated. `auto` is everywhere the server's own choice."""

    background: Literal["transparent", "opaque", "auto"] | None = None
    complexity: Literal["low", "medium", "high"] | None = None
    frame_count: int | None = Field(None, ge=2, le=16)
    frame_duration_ms: int | None = Field(None, ge=1, le=655_350)
    model: str | None = Field(None, min_length=1, max_length=256)
    moderation: Literal["auto", "low"] | None = None
    output_compression: int | None = Field(None, ge=0, le=100)
    output_format: Literal["png", "webp", "jpeg", "gif"] | None = None
    partial_images: int | None = Field(None, ge=0, le=MAX_PARTIAL_IMAGES)
    quality: Literal["low", "medium", "high", "xhigh", "max", "auto"] | None = None
    size: str | None = Field(None, pattern=r"^(?:auto|[1-9][0-9]{0,4}x[1-9][0-9]{0,4})$")


class ImageGenerationTool(ToolWire, ImageSettings):
    """Images that the server's image model generates or edits."""

    type: Literal["image_generation"]
    action: Literal["generate", "edit", "auto"] | None = None
    input_fidelity: Literal["high", "low"] | None = None
    input_image_mask: ImageMask | None = None
