"""A stack over a server of images, and models that have it draw."""

import json
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec

from apis.chat import ChatRequest
from apis.deltas import DeltaBatch, Finish, TextDelta, ToolArgumentsDelta, ToolCallStart, Usage
from apis.inference import Model
from providers.inference.scripted import Scripted
from tests.support.sdk.answer_shapes import Script, call
from tests.support.servers.images_server import ImagesServer
from tests.support.servers.serving import Served, serving

Json = dict[str, Any]
IMAGE_TOOL: Json = {"type": "image_generation"}
DONE: Script = [{"text": "Done."}]


class Seeing(Scripted):
    """A scripted model that takes images, and writes the newest id of an image that it read where its script has ID."""

    class Config(Scripted.Config):
        pass

    async def chat(self, request: ChatRequest) -> AsyncGenerator[DeltaBatch]:
        ids = re.findall(r"Its id is (ig_[0-9a-z]+)", request.model_dump_json())
        async with aclosing(super().chat(request)) as batches:
            async for batch in batches:
                yield tuple(
                    msgspec.structs.replace(delta, text=delta.text.replace("ID", ids[-1]))
                    if isinstance(delta, ToolArgumentsDelta) and ids
                    else delta
                    for delta in batch
                )

    async def models(self) -> Sequence[Model]:
        return [replace(model, modalities=frozenset({"image"})) for model in await super().models()]


def draw(prompt: str = "A cat.", *images: str, call_id: str = "c1") -> Json:
    arguments = {"prompt": prompt, "images": [*images]} if images else {"prompt": prompt}
    return call("image_generation", json.dumps(arguments), id=call_id)


class Painter(Seeing):
    """A model that has one image generated for each input, however many inputs come at a time."""

    class Config(Seeing.Config):
        pass

    async def chat(self, request: ChatRequest) -> AsyncGenerator[DeltaBatch]:
        if request.messages[-1].role == "tool":
            yield (TextDelta("Done."), Finish("stop", Usage()))
        else:
            called = (ToolCallStart("c1", "image_generation"), ToolArgumentsDelta("c1", '{"prompt": "A cat."}'))
            yield (*called, Finish("tool_calls", Usage()))


@asynccontextmanager
async def drawing(
    *turns: Script, config: Json | None = None, model: str = "Seeing", **sections: Any
) -> AsyncGenerator[tuple[Served, ImagesServer]]:
    """A stack over a server of images, whose model plays these turns, or one call and its answer."""
    provider = model if model == "scripted" else f"{__name__}:{model}"
    inference = {"provider": provider, "turns": [*turns] or [[draw()], DONE]}
    async with ImagesServer().listening() as server:
        more = {"image_generator": server.config(**(config or {})), "files": {"provider": "kv"}}
        async with serving(inference, more=more, **sections) as served:
            yield served, server


def image_of(response: Any) -> Any:
    (item,) = (item for item in response.output if item.type == "image_generation_call")
    return item
