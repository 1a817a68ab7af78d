"""ImageGenerator: images from prompts, and images edited by prompts, for the tool `image_generation`."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field

from apis.provider import Provider
from apis.wire.image_tools import ImageOption

MAX_SOURCE_IMAGES = 16
"""Maximum images that one request edits."""


@dataclass(frozen=True, slots=True)
class ImageCapabilities:
    """Features of an images server, as the run config declares them. A request for any other is refused by its name.

    `models` are the names that requests may use; empty for any name. Without `edits` there are only new images, without
    `partial_images` only finished ones.
    """

    options: frozenset[ImageOption]
    models: frozenset[str] = frozenset()
    edits: bool = True
    partial_images: bool = True


@dataclass(frozen=True, slots=True)
class SourceImage:
    """A whole image to edit, or the mask of one; `media_type` is that of its bytes."""

    data: bytes = field(repr=False)
    media_type: str


@dataclass(frozen=True, slots=True)
class ImageRequest:
    """One image to generate, or to make of `images`, whose first one `mask` belongs to. `options` are in the API's own
    names; those that are missing are the server's choice, and so is the model. At most `partial_images` unfinished
    images come before the image."""

    prompt: str
    tenant: str = ""
    model: str | None = None
    options: Mapping[ImageOption, str | int] = field(default_factory=dict[ImageOption, str | int])
    images: Sequence[SourceImage] = ()
    mask: SourceImage | None = None
    partial_images: int = 0


@dataclass(frozen=True, slots=True)
class PartialImage:
    """An unfinished image; `index` counts them from 0."""

    index: int
    base64_data: str = field(repr=False)
    media_type: str


@dataclass(frozen=True, slots=True)
class ImageUsage:
    """Tokens of one image, as the server counts them."""

    input_tokens: int = 0
    input_image_tokens: int = 0
    input_text_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class GeneratedImage:
    """A finished image: valid base64 of a whole image of `media_type`. The other fields are what the server says it
    did, None where it says nothing."""

    base64_data: str = field(repr=False)
    media_type: str
    size: str | None = None
    quality: str | None = None
    background: str | None = None
    revised_prompt: str | None = None
    usage: ImageUsage | None = None


class ImageGenerator(Provider, ABC):
    """Generates images. Implementations bound each image in bytes and in time, and share their places fairly among
    tenants."""

    timeout_s: float
    """Seconds that one image may take, its wait for a place included."""
    max_image_bytes: int
    """Maximum bytes of one image, of those to edit too."""

    @property
    @abstractmethod
    def capabilities(self) -> ImageCapabilities:
        """Return the server's features, which never change."""

    @abstractmethod
    def generate(self, request: ImageRequest) -> AsyncGenerator[PartialImage | GeneratedImage]:
        """Yield unfinished images, as many as the server sends, then the finished one.

        Raises ToolFailed with a text for the model and the server's error code, if it has one, and RateLimited if too
        many requests of the tenant wait. Closing the generator ends the request.
        """
