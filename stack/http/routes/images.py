"""/v1/images: images that the image generator of the run config makes of prompts, or of the images of a form."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import orjson
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response

from apis.deltas import Usage
from apis.errors import InvalidRequest, StackError, ToolFailed, Unsupported
from apis.image_generator import (
    MAX_SOURCE_BYTES,
    MAX_SOURCE_IMAGES,
    GeneratedImage,
    ImageGenerator,
    ImageRequest,
    ImageUsage,
    PartialImage,
    SourceImage,
)
from apis.images import CreateImage, EditImage
from apis.sink import put_all
from providers.common.fair_turns import run_long
from stack.http.answers import json_response
from stack.http.context import HttpContext, Services, require_section
from stack.http.forms import Form, open_form, read_form_fields
from stack.http.parsing import read_request
from stack.http.request_body import charge_request, read_body
from stack.http.route import RESPONSES, Route
from stack.http.routes.chat import encode_stream_error
from stack.http.sse import encode_typed_events
from stack.http.streams import EventStream, run_while_connected

_MAX_FILES: Final = MAX_SOURCE_IMAGES + 4
"""Files of a form that are read, so that one image too many, or an unknown file, is an error with its name."""
_LARGE_CHARS: Final = 256 * 1024
"""Characters of images in an answer that is encoded in the tenant's turn."""
_NO_USAGE: Final = ImageUsage()


async def create_images(http: Request, context: HttpContext, services: Services) -> Response:
    body = await read_body(http)
    request, size_bytes = await read_request(body, CreateImage), len(body)
    request = await charge_request(http, request, size_bytes)
    return await _respond(http, context, services, _Job(request, "image_generation"))


async def edit_images(http: Request, context: HttpContext, services: Services) -> Response:
    async with open_form(http, MAX_SOURCE_BYTES, _MAX_FILES, field="image") as form:
        unknown = dict.fromkeys(form.files.keys() - {"image", "mask"}, "")
        request = read_form_fields({**form.fields, **unknown}, EditImage)
        request = await charge_request(http, request, len(request.prompt))
        generator = _require_generator(services)
        if not generator.capabilities.edits:
            raise Unsupported("The images server of this stack edits no images.", param="image")
        images, mask = await _read_sources(form, context, services, generator.max_image_bytes)
    return await _respond(http, context, services, _Job(request, "image_edit", images, mask))


IMAGE_ROUTES: Final = (
    Route(
        "POST",
        "/images/generations",
        RESPONSES,
        create_images,
        body=CreateImage,
        stores=False,
        tool="image_generation",
    ),
    Route(
        "POST",
        "/images/edits",
        RESPONSES,
        edit_images,
        form=EditImage,
        file_field="image",
        optional_files=("mask",),
        stores=False,
        tool="image_generation",
    ),
)


def _require_generator(services: Services) -> ImageGenerator:
    return require_section(services.stack.image_generator, "makes no images", "image_generator")


async def _read_sources(
    form: Form, context: HttpContext, services: Services, max_bytes: int
) -> tuple[Sequence[SourceImage], SourceImage | None]:
    """Return the images of the form, and its mask. They are counted as a body is: they are in memory."""
    images, masks = form.files["image"], form.files.get("mask", [])
    if len(images) > MAX_SOURCE_IMAGES:
        message = f"At most {MAX_SOURCE_IMAGES} images can be edited together."
        raise InvalidRequest(message, param="image", code="array_above_max_length")
    if len(masks) > 1:
        raise InvalidRequest("An edit has one mask.", param="mask", code="array_above_max_length")
    size_bytes = sum(file.size or 0 for file in (*images, *masks))
    services.shares.add_bytes(context.places, size_bytes, context.tenant)
    names = ["image"] if len(images) == 1 else [f"image[{index}]" for index in range(len(images))]
    sources = [await _read_source(file, name, max_bytes) for file, name in zip(images, names, strict=True)]
    return sources, await _read_source(masks[0], "mask", max_bytes) if masks else None


async def _read_source(file: UploadFile, param: str, max_bytes: int) -> SourceImage:
    try:
        return await asyncio.to_thread(SourceImage.check, await file.read(), max_bytes)
    except InvalidRequest as exc:
        raise InvalidRequest(f"Invalid '{param}': {exc.message}", param=param, code=exc.code) from exc


@dataclass(frozen=True, slots=True)
class _Job:
    """A request, the images that it edits, and the first part of the names of its events."""

    request: CreateImage
    event_prefix: str
    images: Sequence[SourceImage] = ()
    mask: SourceImage | None = None


async def _respond(http: Request, context: HttpContext, services: Services, job: _Job) -> Response:
    generator, request = _require_generator(services), job.request
    generator.capabilities.require(request)
    if request.partial_images and not request.stream:
        message = "Partial images come in a stream: send 'stream': true."
        raise InvalidRequest(message, param="partial_images", code="invalid_value")
    if request.stream and (request.n or 1) > 1:
        raise Unsupported("A stream has one image: send 'n': 1, or several requests.", param="n")
    maker = _ImageMaker(job, generator, context, services)
    if request.stream:
        monitor, record = services.monitor, context.request_record
        return EventStream(
            partial(put_all, maker.stream_events()),
            encode_typed_events,
            monitor,
            record,
            encode_error=encode_stream_error,
        )
    images = await run_while_connected(http, maker.make_all())

    def encode() -> bytes:
        return orjson.dumps(_build_answer(images, request))

    is_large = sum(len(image.base64_data) for image in images) > _LARGE_CHARS
    return json_response(await run_long(encode) if is_large else encode())


class _ImageMaker:
    """Makes the images of one request, one after the other, and records their usage."""

    def __init__(self, job: _Job, generator: ImageGenerator, context: HttpContext, services: Services) -> None:
        request = job.request
        self._job = job
        self._generator = generator
        self._context = context
        self._services = services
        self._request = ImageRequest(
            request.prompt,
            tenant=context.tenant,
            model=request.model,
            options=generator.capabilities.select_options(request),
            images=job.images,
            mask=job.mask,
            partial_images=request.partial_images or 0,
        )

    async def make_all(self) -> Sequence[GeneratedImage]:
        """Return as many images as are asked for. Raises ToolFailed, which is not to be tried again once an image was
        made."""
        images: list[GeneratedImage] = []
        try:
            while len(images) < (self._job.request.n or 1):
                async with aclosing(self._make_one()) as results:
                    images += [image async for image in results if isinstance(image, GeneratedImage)]
        except StackError as exc:
            exc.repeats_work = exc.repeats_work or bool(images)
            raise
        finally:
            if images:
                self._record(images)
        return images

    async def stream_events(self) -> AsyncGenerator[Sequence[dict[str, Any]]]:
        """Yield the events of one image."""
        async with aclosing(self._make_one()) as images:
            async for image in images:
                event = _build_event(self._job.request, image)
                if isinstance(image, PartialImage):
                    kind, facts = "partial_image", {"partial_image_index": image.index}
                else:
                    self._record([image])
                    kind, facts = "completed", {"usage": _usage_to_json(image.usage or _NO_USAGE)}
                yield [{"type": f"{self._job.event_prefix}.{kind}", **event, **facts}]

    async def _make_one(self) -> AsyncGenerator[PartialImage | GeneratedImage]:
        """Yield the images that the generator sends, each counted as bytes in memory."""
        is_finished = False
        async with aclosing(self._generator.generate(self._request)) as images:
            async for image in images:
                self._services.shares.add_bytes(self._context.places, len(image.base64_data), self._context.tenant)
                is_finished = isinstance(image, GeneratedImage)
                yield image
        if not is_finished:
            raise ToolFailed("The images server sent no image.")

    def _record(self, images: Sequence[GeneratedImage]) -> None:
        usage, record = _sum_usage(images) or _NO_USAGE, self._context.request_record
        model = self._request.model or self._generator.capabilities.default_model or ""
        record.record_usage(model, Usage(usage.input_tokens, output_tokens=usage.output_tokens), category="images")
        record.tool_calls = {"image_generation_call": len(images)}


def _build_answer(images: Sequence[GeneratedImage], request: CreateImage) -> dict[str, Any]:
    data: list[dict[str, Any]] = []
    for image in images:
        prompt = {"revised_prompt": image.revised_prompt} if image.revised_prompt else {}
        data.append({"b64_json": image.base64_data, **prompt})
    facts = {name: value for name, value in _build_facts(request, images[0]).items() if value != "auto"}
    usage = _sum_usage(images)
    counted = {} if usage is None else {"usage": _usage_to_json(usage)}
    return {"created": int(time.time()), "data": data, **facts, **counted}


def _build_event(request: CreateImage, image: PartialImage | GeneratedImage) -> dict[str, Any]:
    return {"created_at": int(time.time()), "b64_json": image.base64_data, **_build_facts(request, image)}


def _build_facts(request: CreateImage, image: PartialImage | GeneratedImage) -> dict[str, str]:
    """Return the settings that the images server says it used, else those of the request, else `auto`."""
    names = ("background", "quality", "size")
    facts = {name: getattr(image, name, None) or getattr(request, name) or "auto" for name in names}
    return {**facts, "output_format": image.media_type.rpartition("/")[2]}


def _sum_usage(images: Iterable[GeneratedImage]) -> ImageUsage | None:
    """Return the tokens of all images that were counted; None if none was."""
    usages = [image.usage for image in images if image.usage is not None]
    if not usages:
        return None
    return ImageUsage(
        sum(usage.input_tokens for usage in usages),
        sum(usage.input_image_tokens for usage in usages),
        sum(usage.input_text_tokens for usage in usages),
        sum(usage.output_tokens for usage in usages),
    )


def _usage_to_json(usage: ImageUsage) -> dict[str, Any]:
    details = {"image_tokens": usage.input_image_tokens, "text_tokens": usage.input_text_tokens}
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": details,
        "output_tokens": usage.output_tokens,
        "total_tokens": usage.input_tokens + usage.output_tokens,
    }
