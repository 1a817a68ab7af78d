"""How a stream begins: its first events, and the moment in which a refusal can still be an HTTP status."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

from openai.types.responses import Response, ResponseCreatedEvent

from apis.events import EventBatch
from providers.responses.run.pending_response import in_progress_event

_EARLY_FAILURE_WAIT_S: Final = 0.04
"""How long the first event waits for the model, so that what is refused at once is refused by an HTTP status."""


@asynccontextmanager
async def peek_first_batch(batches: AsyncGenerator[EventBatch]) -> AsyncGenerator[asyncio.Task[EventBatch]]:
    """The first batch, under way. It is waited for briefly, so that what the model refuses at once is raised here."""

    async def first() -> EventBatch:
        try:
            return await anext(batches)
        except StopAsyncIteration:  # anext's own default may not be a tuple: Python 3.11 fails on it
            return ()

    task = asyncio.create_task(first())
    try:
        await asyncio.wait({task}, timeout=_EARLY_FAILURE_WAIT_S)
        if task.done():
            task.result()
        yield task
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


def build_first_events(response: Response) -> EventBatch:
    """The events that a stream begins with."""
    return [
        ResponseCreatedEvent(type="response.created", response=response, sequence_number=0),
        in_progress_event(response),
    ]
