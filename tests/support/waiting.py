"""Waiting for state whose change sets no event: of a store, of another process, of a server in between."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

ENDED: Final = ("completed", "incomplete", "failed", "cancelled")
"""Statuses of a response at its end."""
_PAUSE_S: Final = 0.005
_TURNS_WITHOUT_PAUSE: Final = 100
"""Turns of the event loop that are looked at one by one, because a state may be short."""
_REQUEST_S: Final = 0.001
"""CPU time of a look that is a request or more. It takes a core from what it waits for, so pauses after it grow."""
_LONGEST_PAUSE_S: Final = 0.05


async def until(holds: Callable[[], object], within_s: float = 10) -> None:
    """Wait until `holds`, a function or a coroutine function, returns a true value. Raises TimeoutError."""
    turns = 0
    async with asyncio.timeout(within_s):
        began = time.thread_time()
        while not (await result if inspect.isawaitable(result := holds()) else result):
            look_s = time.thread_time() - began
            if look_s > _REQUEST_S:
                await asyncio.sleep(min((turns + 3) * look_s, _LONGEST_PAUSE_S))
            else:
                await asyncio.sleep(0 if turns < _TURNS_WITHOUT_PAUSE else _PAUSE_S)
            turns += 1
            began = time.thread_time()


async def until_empty(load: Callable[[], Awaitable[object]], within_s: float = 10) -> None:
    """Wait until a coroutine function returns nothing."""

    async def is_empty() -> bool:
        return not await load()

    await until(is_empty, within_s)


async def until_status(objects: Any, object_id: str, *statuses: str, within_s: float = 10) -> Any:
    """Return an object when it has one of these statuses; `objects` are the responses or batches of a client."""
    current: Any = None

    async def has_status() -> bool:
        nonlocal current
        current = await objects.retrieve(object_id)
        return current.status in statuses

    await until(has_status, within_s)
    return current


async def until_ended(responses: Any, response_id: str, within_s: float = 10) -> Any:
    """Return a background response when it has ended."""
    return await until_status(responses, response_id, *ENDED, within_s=within_s)


async def until_text(responses: Any, response_id: str, within_s: float = 10) -> None:
    """Follow a background response until it has a first text."""
    async with asyncio.timeout(within_s), await responses.retrieve(response_id, stream=True) as events:
        async for event in events:
            if event.type == "response.output_text.delta":
                return
