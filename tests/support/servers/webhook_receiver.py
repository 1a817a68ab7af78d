"""A receiver of webhooks on a loopback port: records its requests, and answers with `answer`."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from openai import DefaultHttpxClient, OpenAI

from tests.support.sdk.client import TLS

SECRET = "whsec_" + "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw" * 2


@dataclass
class Receiver:
    """`answer` gives the status for each request; None never answers."""

    url: str = ""
    answer: Callable[[], int | None] = lambda: 200
    requests: list[tuple[Mapping[str, str], bytes]] = field(default_factory=list[tuple[Mapping[str, str], bytes]])
    _came: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.read()
        async with self._came:
            self.requests.append((dict(request.headers), body))
            self._came.notify_all()
        status = self.answer()
        if status is None:
            await asyncio.Event().wait()
        assert status is not None
        return web.Response(status=status, headers={"location": "/elsewhere"} if status == 307 else {})

    async def come(self, count: int, within_s: float = 10) -> list[Any]:
        """That many requests, as the SDK reads and checks them."""
        await self.arrival(count, within_s)
        return [self.unwrap(*each) for each in self.requests]

    async def arrival(self, count: int, within_s: float = 10) -> None:
        """Wait for that many requests, whichever secret signs them."""
        async with asyncio.timeout(within_s), self._came:
            await self._came.wait_for(lambda: len(self.requests) >= count)

    async def hear_of(self, ids: Iterable[str], within_s: float) -> None:
        """Wait until a webhook for each of these responses has come, at least once."""
        expected = set(ids)
        async with asyncio.timeout(within_s), self._came:
            await self._came.wait_for(lambda: expected <= {each for _, each in self.list_deliveries()})

    def list_deliveries(self) -> list[tuple[str, str]]:
        """The webhook ids of the requests so far, and the responses that they are about."""
        return [(headers["webhook-id"], json.loads(body)["data"]["id"]) for headers, body in self.requests]

    def unwrap(self, headers: Mapping[str, str], body: bytes, secret: str = SECRET) -> Any:
        with OpenAI(api_key="none", http_client=DefaultHttpxClient(verify=TLS)) as client:
            return client.webhooks.unwrap(body, headers, secret=secret)

    def hook(self, **fields: Any) -> dict[str, Any]:
        """The run config's entry for it."""
        return {"url": self.url, "secret": SECRET, "private": True, "retry_s": 0.05, **fields}


@asynccontextmanager
async def receiving() -> AsyncGenerator[Receiver]:
    receiver = Receiver()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", receiver.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}/hook?token=of-the-url"
    try:
        yield receiver
    finally:
        await runner.cleanup()
