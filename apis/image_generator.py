"""ImageGenerator: images from prompts, and images edited by prompts, for a tool and for the routes below /v1/images."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NoReturn, Self, get_args

from apis.documents.reader import image_media_type
from apis.errors import InvalidRequest, Unsupported
from apis.provider import Provider
from apis.wire.image_tools import ImageOption, ImageSettings

MAX_SOURCE_IMAGES = 16
"""Maximum images that one request edits."""
MAX_SOURCE_BYTES: Final = 32 * 1024 * 1024
"""Maximum bytes of all images of one edit."""
MAX_PROMPT_CHARS: Final = 32_000
_OPTIONS: Final[tuple[ImageOption, ...]] = get_args(ImageOption)


@dataclass(frozen=True, slots=True)
class ImageCapabilities:
    """Features of an images server, as the run config declares them. A request for any other is refused by its name.

    `models` are the names that requests may use; empty for any name. `default_model` is the one of requests that name
    none, None where only the images server knows it. Without `edits` there are only new images, without
    `partial_images` only finished ones.
    """

    options: frozenset[ImageOption]
    models: frozenset[str] = frozenset()
    edits: bool = True
    partial_images: bool = True
    default_model: str | None = None

    def require(self, settings: ImageSettings, prefix: str = "") -> None:
        """Raise Unsupported for a setting that the images server does not have, and InvalidRequest for a model that it
        does not serve. The error names the field, after `prefix`."""
        refused: list[str] = [
            name
            for name in _OPTIONS
            if name not in self.options and getattr(settings, name, None) not in (None, "auto")
        ]
        if settings.partial_images and not self.partial_images:
            refused.append("partial_images")
        if refused:
            self.refuse(f"{prefix}{refused[0]}")
        if settings.model is not None and self.models and settings.model not in self.models:
            listed = ", ".join(sorted(self.models))
            message = f"The image model '{settings.model}' is not served here; these are: {listed}."
            raise InvalidRequest(message, param=f"{prefix}model", code="model_not_found")

    @staticmethod
    def refuse(param: str) -> NoReturn:
        """Raise Unsupported for a field that asks for more than the images server has."""
        name = param.rpartition(".")[2]
        raise Unsupported(f"'{name}' is not offered by the images server of this stack.", param=param)

    def select_options(self, settings: ImageSettings) -> dict[ImageOption, str | int]:
        """Return the settings that the images server takes, without those that are not set."""
        return {
            name: value
            for name in _OPTIONS
            if name in self.options and (value := getattr(settings, name, None)) is not None
        }


@dataclass(frozen=True, slots=True)
class SourceImage:
    """A whole image to edit, or the mask of one; `media_type` is that of its bytes."""

    data: bytes = field(repr=False)
    media_type: str

    @classmethod
    def check(cls, data: bytes, max_bytes: int) -> Self:
        """Return the image that these bytes are. Raises InvalidRequest for more than `max_bytes`, and for bytes that
        are no whole image."""
        if len(data) > max_bytes:
            raise InvalidRequest(f"The image has more than {max_bytes} bytes.", code="image_too_large")
        return cls(data, image_media_type(data))


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

        Raises ToolFailed with a text for the model and the server's error code, if it has one, ImageRefused where the
        server calls the request wrong, and RateLimited if too many requests of the tenant wait. Closing the generator
        ends the request.
        """
