"""Work that is done side by side, and tells what happens as it happens."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Final

from apis.events import EventBatch

EmitEvents = Callable[[EventBatch], None]
Job = Callable[[EmitEvents], Awaitable[None]]
_CANCEL_TIMEOUT_S: Final = 5


async def run_concurrently(jobs: Sequence[Job], limit: int) -> AsyncGenerator[EventBatch]:
    """The batches that all jobs put, as they come; at most `limit` jobs are at work at a time. What a job raises is
    raised when all have ended. Leaving early cancels the jobs and waits until they have stopped."""
    queue: asyncio.Queue[EventBatch | None] = asyncio.Queue()
    turnstile = asyncio.Semaphore(limit)

    async def work(job: Job) -> None:
        async with turnstile:
            await job(queue.put_nowait)

    tasks = [asyncio.create_task(work(job)) for job in jobs]
    for task in tasks:
        task.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        working = len(tasks)
        while working:
            events = await queue.get()
            if events is None:
                working -= 1
            else:
                yield events
        for task in tasks:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CANCEL_TIMEOUT_S)
