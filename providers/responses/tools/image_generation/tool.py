"""The tool `image_generation` as a request declares it: what the model is offered, and what the images server gets."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson
from openai.types.responses.response import ToolUsageImageGen, ToolUsageImageGenInputTokensDetails
from openai.types.responses.response_output_item import ImageGenerationCall as ImageGenerationItem

from apis.chat import ChatFunctionTool, FunctionDefinition, NativeToolName
from apis.deltas import ToolCallStart
from apis.documents.reader import Reader
from apis.errors import InvalidRequest, StackError, ToolFailed
from apis.image_generator import ImageGenerator, ImageRequest, SourceImage
from apis.wire.image_tools import ImageGenerationTool
from apis.wire.item_parts import InputImage
from apis.wire.tool_items import ImageGenerationCallItem
from providers.responses.events.tool_result import ToolResultRecord
from providers.responses.tools.call import HostedCall, ToolFunctions, TypedTool
from providers.responses.tools.image_generation.call import GenerationArguments, ImageGenerationCall, success_text
from providers.responses.tools.image_generation.sources import NEWEST, SourceImages, load_image
from providers.responses.tools.tool_context import ToolContext

_NAME: Final = "image_generation"
_GENERATES: Final = "Generates an image from a prompt, and shows it to the user."
_EDITS: Final = "Edits images of the conversation as a prompt says, and shows the new image to the user."
_PROMPT: Final = {"type": "string", "description": "The whole image in words: subject, style, composition, text in it."}
_IMAGES: Final = (
    "{} Each is the id of a generated image (ig_…), `input_1`, `input_2`, … for the images of the messages in their "
    f"order, or `{NEWEST}` for the newest image."
)


def _create_tool(declaration: ImageGenerationTool, context: ToolContext) -> TypedTool:
    if context.image_generator is None or context.reader is None:
        raise context.not_configured_error(
            "No image generation is configured: give the run config an `image_generator` section."
        )
    _refuse_unsupported(declaration, context.image_generator, context.param)
    return ImageGeneration(declaration, context, context.image_generator, context.reader)


def _refuse_unsupported(declaration: ImageGenerationTool, generator: ImageGenerator, param: str) -> None:
    """Raise Unsupported or InvalidRequest, naming the field, for one that the images server does not have."""
    capabilities = generator.capabilities
    capabilities.require(declaration, f"{param}.")
    if not capabilities.edits and declaration.action == "edit":
        capabilities.refuse(f"{param}.action")
    if not capabilities.edits and declaration.input_image_mask is not None:
        capabilities.refuse(f"{param}.input_image_mask")


class ImageGeneration(TypedTool):
    """Image generation as one request declares it."""

    def __init__(
        self, declaration: ImageGenerationTool, context: ToolContext, generator: ImageGenerator, reader: Reader
    ) -> None:
        self.generator = generator
        self.declaration = declaration
        self._param = context.param
        self._tenant = context.tenant
        self._reader = reader
        self._mask: SourceImage | None = None
        self.sources = SourceImages(context.items, reader, max_bytes=generator.max_image_bytes, tenant=context.tenant)

    @property
    def _can_edit(self) -> bool:
        return self.generator.capabilities.edits and self.declaration.action != "generate"

    @property
    def offered_tools(self) -> Sequence[ChatFunctionTool]:
        properties: dict[str, Any] = {"prompt": _PROMPT}
        description = _EDITS if self.declaration.action == "edit" else _GENERATES
        if self._can_edit:
            must = "The images to edit." if self.declaration.action == "edit" else "Only to edit images: which ones."
            images = {"type": "array", "items": {"type": "string"}, "description": _IMAGES.format(must)}
            properties["images"] = images
        parameters: dict[str, Any] = {
            "type": "object",
            "properties": properties,
            "required": ["prompt"],
            "additionalProperties": False,
        }
        return [
            ChatFunctionTool(function=FunctionDefinition(name=_NAME, description=description, parameters=parameters))
        ]

    async def check_declaration(self) -> None:
        """Load the mask, so that a missing one is an error of the request."""
        mask = self.declaration.input_image_mask
        if mask is None:
            return
        param = f"{self._param}.input_image_mask"
        if bool(mask.image_url) == bool(mask.file_id):
            message = "A mask is an `image_url` or a `file_id`."
            raise InvalidRequest(message, param=param, code="invalid_value")
        part = InputImage(type="input_image", image_url=mask.image_url, file_id=mask.file_id)
        try:
            self._mask = await load_image(
                part, self._reader, max_bytes=self.generator.max_image_bytes, tenant=self._tenant
            )
        except StackError as exc:
            field = "file_id" if mask.file_id else "image_url"
            raise InvalidRequest(
                f"The mask cannot be used: {exc.message}", param=f"{param}.{field}", code="invalid_value"
            ) from exc

    def create_call(self, start: ToolCallStart) -> HostedCall:
        return ImageGenerationCall(self, start)

    async def build_request(self, arguments: GenerationArguments) -> ImageRequest:
        """Return the request of a call. Raises ToolFailed for images that the conversation does not have."""
        declaration = self.declaration
        names = arguments.images if self._can_edit else ()
        if declaration.action == "edit" and not names:
            if self.sources.newest_name is None:
                raise ToolFailed("There is no image to edit: the conversation has none.")
            names = [NEWEST]
        images = await self.sources.load(names)
        options = self.generator.capabilities.select_options(declaration)
        if not images:
            options.pop("input_fidelity", None)
        return ImageRequest(
            arguments.prompt,
            tenant=self._tenant,
            model=declaration.model,
            options=options,
            images=images,
            mask=self._mask if images else None,
            partial_images=declaration.partial_images or 0,
        )


def _call_from_item(item: ImageGenerationCallItem, native_tools: frozenset[NativeToolName]) -> ToolResultRecord:
    arguments = {"prompt": item.revised_prompt} if item.revised_prompt else {}
    output = success_text(item.id or "") if item.result else "The image could not be generated."
    return ToolResultRecord(item.id or "", _NAME, orjson.dumps(arguments).decode(), output)


def _sum_usage(
    items: Sequence[ImageGenerationItem], tool_results: Mapping[str, ToolResultRecord]
) -> Mapping[str, ToolUsageImageGen]:
    """Return the tokens of the images, where their server counts them."""
    states: list[Any] = [result.state for item in items if (result := tool_results.get(item.id)) is not None]
    usages: list[dict[str, int]] = [state["image_usage"] for state in states if state and "image_usage" in state]
    if not usages:
        return {}
    total = {name: sum(usage[name] for usage in usages) for name in usages[0]}
    details = ToolUsageImageGenInputTokensDetails(
        image_tokens=total["input_image_tokens"], text_tokens=total["input_text_tokens"]
    )
    image_gen = ToolUsageImageGen(
        input_tokens=total["input_tokens"],
        input_tokens_details=details,
        output_tokens=total["output_tokens"],
        total_tokens=total["input_tokens"] + total["output_tokens"],
    )
    return {"image_gen": image_gen}


IMAGE_GENERATION: Final = ToolFunctions(_create_tool, _call_from_item, sum_usage=_sum_usage)
