"""OpenAIImages: any server with OpenAI's `/v1/images/generations` and `/v1/images/edits`."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, Final, Literal, get_args
from urllib.parse import urlsplit

from pydantic import ConfigDict, Field, SecretStr

from apis.documents.fetcher import Fetcher, FetchRequest
from apis.documents.reader import UnreadableFile, image_to_url
from apis.errors import FetchFailed, ToolFailed
from apis.fair_share import ONE_TENANT, FairShare, Tenants
from apis.image_generator import (
    GeneratedImage,
    ImageCapabilities,
    ImageGenerator,
    ImageRequest,
    PartialImage,
)
from apis.provider import Provider
from apis.wire.image_tools import ImageOption
from providers.image_generator.answers import build_image, check_image, encoded_size, find_image
from providers.image_generator.images_client import ImagesClient

ServerUrl = Annotated[str, Field(pattern=r"^https?://[^\s/@?#]+(/[^\s?#]*)?$")]
_ALL_OPTIONS: Final[tuple[ImageOption, ...]] = get_args(ImageOption)


class OpenAIImages(ImageGenerator):
    """Speaks to one images server: vLLM-Omni, SGLang, LocalAI, stable-diffusion.cpp, OpenAI itself and the like."""

    class Config(Provider.Config):
        """`base_url` ends with /v1. `model` is sent where a request names none; with `models`, requests may name only
        these. `options` are the fields of the tool that the server takes; a request with another is refused. Without
        `edits` the server has no /images/edits; `image_field` is how it names the images in an edit's form. Without
        `streams` it takes no `stream` and sends no partial images. `response_format` is sent as it is; null for
        OpenAI's own models, which refuse it. `max_image_bytes` bounds one image; `max_concurrent` images are generated
        at a time, and `max_waiting` more of one tenant may wait. `timeout_s` bounds one image, its wait included.
        `proxy` is the URL of a proxy to send through."""

        model_config = ConfigDict(hide_input_in_errors=True)

        base_url: ServerUrl
        api_key: SecretStr | None = None
        model: str | None = Field(default=None, min_length=1)
        models: tuple[str, ...] = ()
        options: tuple[ImageOption, ...] = _ALL_OPTIONS
        edits: bool = True
        image_field: Literal["image[]", "image"] = "image[]"
        streams: bool = True
        response_format: Literal["b64_json"] | None = "b64_json"
        max_image_bytes: int = Field(default=20 * 1024 * 1024, ge=1024, le=22 * 1024 * 1024)
        max_concurrent: int = Field(default=4, ge=1, le=1024)
        max_waiting: int = Field(default=8, ge=0)
        timeout_s: float = Field(default=300.0, gt=0, le=3600)
        proxy: SecretStr | None = None

    def __init__(self, config: Config, fetcher: Fetcher, tenants: Tenants = ONE_TENANT) -> None:
        self._config = config
        self._fetcher = fetcher
        self.timeout_s = config.timeout_s
        self.max_image_bytes = config.max_image_bytes
        self._places = FairShare(
            "images to be generated",
            config.max_concurrent,
            tenant_waiting=config.max_waiting,
            several_tenants=tenants.are_several,
        )
        self._client: ImagesClient | None = None

    async def start(self) -> None:
        config = self._config
        api_key = config.api_key.get_secret_value().strip() if config.api_key else ""
        self._client = ImagesClient(config.base_url, api_key, config.proxy, config.image_field)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    @property
    def capabilities(self) -> ImageCapabilities:
        config = self._config
        models = {*config.models, *((config.model,) if config.models and config.model else ())}
        return ImageCapabilities(
            frozenset(config.options), frozenset(models), config.edits, config.streams, config.model
        )

    async def generate(self, request: ImageRequest) -> AsyncGenerator[PartialImage | GeneratedImage]:
        deadline = asyncio.get_running_loop().time() + self.timeout_s
        async with aclosing(self._generate_in_place(request)) as images:
            while True:
                try:
                    async with asyncio.timeout_at(deadline):
                        image = await anext(images, None)
                except TimeoutError:
                    raise ToolFailed(f"The image took longer than {self.timeout_s:g} s.") from None
                if image is None:
                    return
                yield image

    async def _generate_in_place(self, request: ImageRequest) -> AsyncGenerator[PartialImage | GeneratedImage]:
        assert self._client is not None, "started before it is called"
        with await self._places.acquire(request.tenant):
            answers = self._client.send(request, self._build_fields(request), encoded_size(self.max_image_bytes))
            async with aclosing(answers):
                partial_count = 0
                async for answer in answers:
                    kind = str(answer.get("type", ""))
                    if not kind.endswith(".partial_image"):
                        yield await self._read_image(answer, find_image(answer) if "data" in answer else answer)
                        return
                    if partial_count < request.partial_images:
                        data, media_type = await self._check(answer.get("b64_json"))
                        yield PartialImage(partial_count, data, media_type)
                        partial_count += 1
        raise ToolFailed("The images server ended its answer without an image.")

    def _build_fields(self, request: ImageRequest) -> dict[str, Any]:
        fields: dict[str, Any] = {"prompt": request.prompt, "n": 1, **request.options}
        if (model := request.model or self._config.model) is not None:
            fields["model"] = model
        if self._config.response_format is not None:
            fields["response_format"] = self._config.response_format
        if request.partial_images:
            fields |= {"stream": True, "partial_images": request.partial_images}
        return fields

    async def _read_image(self, answer: dict[str, Any], image: Any) -> GeneratedImage:
        data: Any = image.get("b64_json")
        url: Any = image.get("url")
        if not data and isinstance(url, str):
            data = url if url.startswith("data:") else await self._fetch_image(url)
        base64_data, media_type = await self._check(data)
        return build_image(base64_data, media_type, image, answer)

    async def _check(self, data: Any) -> tuple[str, str]:
        return await asyncio.to_thread(check_image, data, self.max_image_bytes)

    async def _fetch_image(self, url: str) -> str:
        """Return the image at a URL of the answer as a data URL. Private networks are open for the server's own origin
        alone."""
        try:
            is_own = urlsplit(url)[:2] == urlsplit(self._config.base_url)[:2]
            fetched = await self._fetcher.fetch(
                FetchRequest(url, max_bytes=self.max_image_bytes, timeout_s=self.timeout_s, allow_private=is_own)
            )
            if fetched.status != 200:
                raise ToolFailed(f"The image of the images server could not be fetched: HTTP {fetched.status}.")
            return await asyncio.to_thread(image_to_url, fetched.body)
        except FetchFailed as exc:
            raise ToolFailed(f"The image of the images server could not be fetched. {exc.message}") from exc
        except UnreadableFile as exc:
            raise ToolFailed(f"The images server sent something that is no image. {exc.message}") from None
        except ValueError:
            raise ToolFailed("The images server sent a URL that is none.") from None
