"""Runs the load of a plan: clients in one event loop, until the duration is over or all requests have been sent."""

import asyncio
import gc
import math
import resource
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from apis.errors import UpstreamError
from stack.bench.connection import LoadClient
from stack.bench.figures import RequestFailed, Tally
from stack.bench.modes import MODES, VirtualClient
from stack.bench.plan import BenchPlan
from stack.bench.report import RunFigures
from stack.bench.server_load import ServerLoad

_STARTS_PER_S: Final = 2000
"""Connections that are opened per second: more at once would overflow the server's queue of new connections."""
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 2.0
"""Pauses of a client after errors: a failing server is not flooded, and the errors are counted all the same."""
_SPARE_FILES: Final = 64
Show = Callable[[str], None]


class _Schedule:
    """Decides whether another request begins."""

    def __init__(self, plan: BenchPlan) -> None:
        lines_of_one = plan.lines if plan.mode == "batches" else 1
        self._waiting = math.inf if plan.requests is None else math.ceil(plan.requests / lines_of_one)
        self._until = math.inf if plan.duration_s is None else time.perf_counter() + plan.duration_s

    def take(self) -> bool:
        if self._waiting < 1 or time.perf_counter() >= self._until:
            return False
        self._waiting -= 1
        return True


async def run_load(plan: BenchPlan, show: Show) -> RunFigures:
    """Run the load and return its figures; `show` gets the progress once a second. Raises UpstreamError if the server
    cannot be reached, or refuses the first request, which is not counted."""
    _allow_open_files(plan.clients + _SPARE_FILES)
    plan = await _prepare(plan)
    server = ServerLoad(plan.url, plan.metrics_key)
    tally = Tally()
    clients = [VirtualClient(plan, LoadClient(plan.url, plan.key, plan.timeout_s), tally) for _ in range(plan.clients)]
    gc.freeze()
    await server.start()
    started, cpu_before = time.perf_counter(), time.process_time()
    watch = asyncio.create_task(server.watch())
    progress = asyncio.create_task(_show_progress(tally, show))
    try:
        await _drive_all(clients, _Schedule(plan))
    finally:
        elapsed_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_before
        for task in (watch, progress):
            task.cancel()
        for client in clients:
            await client.http.close()
        gc.unfreeze()
    await server.stop()
    return RunFigures(plan, tally, server, elapsed_s, cpu_s)


async def _prepare(plan: BenchPlan) -> BenchPlan:
    """Return the plan with its model, after one request that shows whether the server takes such requests."""
    http = LoadClient(plan.url, plan.key, plan.timeout_s)
    try:
        if plan.model is None:
            models = await http.load_json("GET", "/models")
            if not models["data"]:
                raise UpstreamError(f"{plan.url} lists no model.")
            plan = plan.with_model(models["data"][0]["id"])
        await MODES["requests"](VirtualClient(plan, http, Tally()))
    except RequestFailed as exc:
        raise UpstreamError(f"{plan.url}: {exc.kind}: {exc.message}") from exc
    finally:
        await http.close()
    return plan


async def _drive_all(clients: list[VirtualClient], schedule: _Schedule) -> None:
    """Drive all clients to their end; SIGINT ends them at once."""
    tasks = [
        asyncio.create_task(_drive(client, schedule, number / _STARTS_PER_S)) for number, client in enumerate(clients)
    ]

    def interrupt() -> None:
        for task in tasks:
            task.cancel()

    loop = asyncio.get_running_loop()
    with suppress(ValueError, RuntimeError):  # no signals outside of the main thread
        loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        results = await asyncio.gather(*tasks, return_exceptions=True)
    except asyncio.CancelledError:
        interrupt()
        raise
    finally:
        with suppress(ValueError, RuntimeError):
            loop.remove_signal_handler(signal.SIGINT)
    for result in results:
        if isinstance(result, Exception):
            raise result


async def _drive(client: VirtualClient, schedule: _Schedule, delay_s: float) -> None:
    run_once = MODES[client.plan.mode]
    pause_s = _FIRST_PAUSE_S
    await asyncio.sleep(delay_s)
    while schedule.take():
        try:
            await run_once(client)
            pause_s = _FIRST_PAUSE_S
        except RequestFailed as exc:
            client.tally.count_error(exc.kind)
            await asyncio.sleep(min(_LONGEST_PAUSE_S, max(pause_s, exc.retry_after_s)))
            pause_s = min(_LONGEST_PAUSE_S, pause_s * 2)


async def _show_progress(tally: Tally, show: Show) -> None:
    seconds = 0
    while True:
        await asyncio.sleep(1)
        seconds += 1
        show(f"{seconds} s  {tally.responses:,} responses  {tally.errors.total():,} errors")


def _allow_open_files(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        wanted_count = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted_count, hard))
