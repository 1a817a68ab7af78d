"""The limit in time of one response."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from apis.errors import UpstreamTimeout


@asynccontextmanager
async def time_limit(limit_s: float, setting: str) -> AsyncGenerator[None]:
    """End the work within the context after `limit_s`. Raises UpstreamTimeout then, which names the setting."""
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            yield
    except TimeoutError as exc:
        if limit.expired():
            raise UpstreamTimeout(f"The response took longer than {limit_s:g} s (`{setting}`).") from exc
        raise
