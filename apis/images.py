"""Requests of /v1/images: new images, and edits of images that the request brings."""

from typing import Literal

from pydantic import Field

from apis.image_generator import MAX_PROMPT_CHARS
from apis.wire.image_tools import ImageSettings


class CreateImage(ImageSettings):
    """Body that asks for `n` images of one prompt."""

    prompt: str = Field(min_length=1, max_length=MAX_PROMPT_CHARS)
    n: int | None = Field(None, ge=1, le=10)
    response_format: Literal["b64_json"] | None = None
    stream: bool | None = None


class EditImage(CreateImage):
    """Fields of the form that asks for edits of its images."""

    input_fidelity: Literal["high", "low"] | None = None
