"""Supervised background work: a failure is logged and counted, and the work is started again after a pause."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Final

from providers.common.counters import WATCHER_FAILURES

_log = logging.getLogger(__name__)
FIRST_PAUSE_S: Final = 0.5
MAX_PAUSE_S: Final = 60.0


def supervise(
    name: str,
    run: Callable[[], Awaitable[None]],
    *,
    first_pause_s: float = FIRST_PAUSE_S,
    max_pause_s: float = MAX_PAUSE_S,
) -> "asyncio.Task[None]":
    """Return a task that runs `run`, and again after each exception, until it returns or the task is cancelled.

    The pause doubles with each failure, up to `max_pause_s`, and is short again after a run that lasted longer than
    that. `name` is that of the task, for the log.
    """
    return asyncio.create_task(_run_again(name, run, first_pause_s, max_pause_s), name=name)


async def _run_again(name: str, run: Callable[[], Awaitable[None]], first_pause_s: float, max_pause_s: float) -> None:
    loop = asyncio.get_running_loop()
    pause_s = first_pause_s
    while True:
        started_at = loop.time()
        try:
            return await run()
        except Exception:  # noqa: BLE001 - the outer edge of a watcher: all tenants need the work to go on
            if loop.time() - started_at > max_pause_s:
                pause_s = first_pause_s
            WATCHER_FAILURES.add()
            _log.exception("%s failed and starts again in %.1f seconds", name, pause_s)
        await asyncio.sleep(pause_s * random.uniform(0.8, 1))  # noqa: S311 - not a secret
        pause_s = min(max_pause_s, 2 * pause_s)
