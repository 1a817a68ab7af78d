"""Servers of aiohttp that live as long as a context."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from aiohttp import web


@asynccontextmanager
async def listening_app(app: web.Application) -> AsyncGenerator[str]:
    """Serve the app on a free port of this machine, and yield its URL. A client that leaves cancels its handler."""
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
