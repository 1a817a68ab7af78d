"""An images server for tests: OpenAI's routes over HTTP, honest or lying as the test says."""

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import BodyPartReader, web

from tests.support.models.images import GIF, PNG
from tests.support.servers.listening import listening_app

Json = dict[str, Any]
USAGE: Json = {
    "input_tokens": 7,
    "input_tokens_details": {"image_tokens": 2, "text_tokens": 5},
    "output_tokens": 11,
    "total_tokens": 18,
}
Handler = Callable[[web.Request], Any]


def b64(data: bytes = PNG) -> str:
    return base64.b64encode(data).decode()


@dataclass(frozen=True)
class Painted:
    """A request as it came: its fields, and the files of a form by name, in order."""

    path: str
    fields: Json
    files: list[tuple[str, bytes, str]] = field(default_factory=list[tuple[str, bytes, str]])
    key: str | None = None


class ImagesServer:
    """Paints every prompt as PNG, an edit as GIF. `answers` replaces the next answers, one each."""

    def __init__(self) -> None:
        self.received: list[Painted] = []
        self.answers: list[Handler] = []
        self.url = ""
        self.running = 0
        self.most_running = 0
        self.release = asyncio.Event()
        self.release.set()
        self.dropped = asyncio.Event()
        self.reached = asyncio.Event()

    @asynccontextmanager
    async def listening(self) -> AsyncGenerator["ImagesServer"]:
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_post("/v1/images/generations", self._generate)
        app.router.add_post("/v1/images/edits", self._edit)
        app.router.add_get("/files/{name}", self._file)
        async with listening_app(app) as self.url:
            yield self

    def config(self, **fields: Any) -> Json:
        """The section `image_generator` that speaks to this server."""
        return {"provider": "openai_images", "base_url": f"{self.url}/v1", "api_key": "k-images", **fields}

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        fields = await request.json()
        self.received.append(Painted(request.path, fields, key=request.headers.get("authorization")))
        return await self._answer(request, fields, PNG, "image_generation")

    async def _edit(self, request: web.Request) -> web.StreamResponse:
        fields: Json = {}
        files: list[tuple[str, bytes, str]] = []
        async for part in await request.multipart():
            assert isinstance(part, BodyPartReader)
            if part.filename is None:
                fields[str(part.name)] = await part.text()
            else:
                files.append((str(part.name), bytes(await part.read()), part.headers["content-type"]))
        self.received.append(Painted(request.path, fields, files, request.headers.get("authorization")))
        return await self._answer(request, fields, GIF, "image_edit")

    async def _answer(self, request: web.Request, fields: Json, data: bytes, kind: str) -> web.StreamResponse:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.reached.set()
        try:
            await self.release.wait()
            if self.answers:
                answer = self.answers.pop(0)(request)
                return await answer if asyncio.iscoroutine(answer) else answer
            if str(fields.get("stream")).lower() == "true":
                return await self._stream(request, int(fields["partial_images"]), data, kind)
            return web.json_response(
                {"created": 1, "data": [{"b64_json": b64(data)}], "usage": USAGE, "size": "1024x1024", "quality": "low"}
            )
        except asyncio.CancelledError:
            self.dropped.set()
            raise
        finally:
            self.running -= 1

    async def _stream(self, request: web.Request, count: int, data: bytes, kind: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        facts: Json = {"created_at": 1, "output_format": "png", "quality": "low", "size": "512x512"}
        events: list[Json] = [
            {"type": f"{kind}.partial_image", "partial_image_index": index, "b64_json": b64(data), **facts}
            for index in range(count)
        ]
        events.append({"type": f"{kind}.completed", "b64_json": b64(data), "usage": USAGE, **facts})
        for event in events:
            await response.write(f"event: {event['type']}\r\ndata: {json.dumps(event)}\r\n\r\n".encode())
        return response

    async def _file(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=PNG, content_type="image/png")
