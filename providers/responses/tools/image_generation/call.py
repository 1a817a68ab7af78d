"""One call of `image_generation`: its item, its events and its result."""

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast

from openai.types.responses.response_output_item import ImageGenerationCall as ImageGenerationItem

from apis.deltas import ToolCallStart
from apis.errors import ToolFailed
from apis.events import EventList, ResponseStreamEvent
from apis.image_generator import (
    MAX_PROMPT_CHARS,
    GeneratedImage,
    ImageGenerator,
    ImageRequest,
    ImageUsage,
    PartialImage,
)
from apis.wire.image_tools import ImageGenerationTool
from providers.responses.events.output import ResponseOutput
from providers.responses.tools.call import Emit, HostedCall
from providers.responses.tools.image_generation.sources import SourceImages

_LOADING_TIMEOUT_S: Final = 30.0
"""Seconds for the loading of images to edit, besides those that the ImageGenerator may take."""


@dataclass(frozen=True, slots=True)
class GenerationArguments:
    """The arguments of a call. `images` are names of images to edit; empty for a new image."""

    prompt: str
    images: Sequence[str] = ()


class GenerationTool(Protocol):
    """The tool that a call belongs to."""

    declaration: ImageGenerationTool
    generator: ImageGenerator
    sources: SourceImages

    async def build_request(self, arguments: GenerationArguments) -> ImageRequest: ...


class ImageGenerationCall(HostedCall):
    """A call that generates or edits one image."""

    item_type = "image_generation_call"

    def __init__(self, tool: GenerationTool, start: ToolCallStart) -> None:
        super().__init__(start)
        self._tool = tool
        self.timeout_s = tool.generator.timeout_s + _LOADING_TIMEOUT_S
        self._prompt: str | None = None
        self._is_edit: bool | None = None
        self._image: GeneratedImage | None = None
        self._error: ToolFailed | None = None

    def item(self, status: str) -> ImageGenerationItem:
        fields: dict[str, Any] = {
            "id": self.id,
            "type": self.item_type,
            "status": "failed" if status == "incomplete" else status,  # the API has no incomplete image
            "result": None,
        }
        if status == "in_progress":
            return ImageGenerationItem.model_validate(fields)
        image = self._image if status == "completed" else None
        if self._is_edit is not None:
            fields["action"] = "edit" if self._is_edit else "generate"
        if image is not None:
            fields |= {"result": image.base64_data, "output_format": _output_format(image.media_type)}
            fields |= self._used_settings(image)
        if self._prompt is not None:
            fields["revised_prompt"] = (image.revised_prompt if image is not None else None) or self._prompt
        if self._error is not None:
            fields["error"] = {
                "type": "image_generation_error",
                "code": self._error.code,
                "message": self._error.message,
            }
        return ImageGenerationItem.model_validate(fields)

    def _used_settings(self, image: GeneratedImage) -> dict[str, str]:
        """Return the settings that the server says it used, else those that the request asks for."""
        declared = self._tool.declaration
        settings = {
            "background": image.background or declared.background,
            "quality": image.quality or declared.quality,
            "size": image.size or declared.size,
        }
        return {name: value for name, value in settings.items() if value is not None}

    async def run(self, output: ResponseOutput, emit: Emit) -> None:
        await emit([self.phase_event("generating")])
        arguments = self._read_arguments()
        self._prompt = arguments.prompt
        request = await self._tool.build_request(arguments)
        self._is_edit = bool(request.images)
        async with aclosing(self._tool.generator.generate(request)) as images:
            async for image in images:
                if isinstance(image, PartialImage):
                    await emit([self._partial_event(image)])
                else:
                    self._image = image
        if self._image is None:
            raise ToolFailed("The images server sent no image.")
        self._tool.sources.add_generated(self.id, self._image.base64_data)
        self.record_result(success_text(self.id), state=_usage_to_state(self._image.usage))

    def fail(self, error: ToolFailed) -> EventList:
        self._error = error
        return super().fail(error)

    def _read_arguments(self) -> GenerationArguments:
        """Return the arguments that the model wrote. Raises ToolFailed."""
        arguments = self.parse_arguments()
        prompt: Any = arguments.get("prompt")
        if not isinstance(prompt, str) or not prompt.strip() or len(prompt) > MAX_PROMPT_CHARS:
            raise ToolFailed(f"`{self.name}` needs `prompt`, a text of 1 to {MAX_PROMPT_CHARS} characters.")
        images: Any = arguments.get("images") or []
        names = cast(list[Any], images) if isinstance(images, list) else [images]
        if not all(isinstance(name, str) for name in names):
            raise ToolFailed(f"`images` of `{self.name}` is a list of names of images.")
        return GenerationArguments(prompt, names)

    def _partial_event(self, image: PartialImage) -> ResponseStreamEvent:
        return self.phase_event(
            "partial_image",
            partial_image_b64=image.base64_data,
            partial_image_index=image.index,
            output_format=_output_format(image.media_type),
        )


def success_text(item_id: str) -> str:
    """Return the output that the model reads of a generated image."""
    return f"The image was generated, and the user sees it. Its id is {item_id}."


def _output_format(media_type: str) -> str:
    return media_type.rpartition("/")[2]


def _usage_to_state(usage: ImageUsage | None) -> Mapping[str, Mapping[str, int]] | None:
    """Return the usage of an image as the state of its call, from which the response's own usage is summed."""
    if usage is None:
        return None
    return {
        "image_usage": {
            "input_tokens": usage.input_tokens,
            "input_image_tokens": usage.input_image_tokens,
            "input_text_tokens": usage.input_text_tokens,
            "output_tokens": usage.output_tokens,
        }
    }
