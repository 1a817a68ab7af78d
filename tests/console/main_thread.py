"""The tasks of a page's main thread, by the processor time that each of them took, from Chromium's own trace.

Processor time is that of the thread alone: what other processes do meanwhile makes a task last longer by the clock,
but not by this measure. What remains of a slow or a shared machine (caches, hyper-threads, a lower clock) is measured
in the same trace, by a fixed piece of work that does what the page does: it reads JSON, and it lays text out.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from playwright.async_api import Page

_CATEGORIES: Final = ["disabled-by-default-devtools.timeline", "blink.user_timing", "toplevel", "mojom"]
_HARNESS: Final = "blink.mojom.DevToolsSession"
"""Interface by which the test itself works in the page: its searches for elements are no work of the page."""
_REFERENCE_MS: Final = 25.0
"""Processor time of the fixed work on the machine with two cores on which the bound of 50 ms holds."""
_CALIBRATE: Final = """
() => new Promise((resolve) => setTimeout(() => {
  performance.mark("calibration");
  const text = JSON.stringify({ type: "response.output_text.delta", delta: "word ".repeat(20), number: 7 });
  let sum = 0;
  for (let turn = 0; turn < 6000; turn += 1) sum += JSON.parse(text).delta.split(/ /).length;
  const box = document.createElement("div");
  box.textContent = "word ".repeat(3000);
  document.body.append(box);
  for (let width = 300; width < 310; width += 1) {
    box.style.width = `${width}px`;
    sum += box.offsetHeight;
  }
  box.remove();
  resolve(sum);
}))
"""


@dataclass
class Tasks:
    """Filled when the trace ends: processor time in ms of every task but the test's own, longest first."""

    cpu_ms: list[float]
    slowdown: float
    """Processor time of the fixed work as a multiple of _REFERENCE_MS, 1 at least: the bound's only factor."""


@asynccontextmanager
async def traced(page: Page) -> AsyncGenerator[Tasks]:
    """Trace the page's main thread, and run the fixed work before and after."""
    assert page.context.browser is not None
    session: Any = await page.context.browser.new_browser_cdp_session()
    events: list[dict[str, Any]] = []
    ended: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

    def on_part(part: dict[str, Any]) -> None:
        events.extend(part["value"])

    def on_end(end: dict[str, Any]) -> None:
        ended.set_result(end)

    session.on("Tracing.dataCollected", on_part)
    session.on("Tracing.tracingComplete", on_end)
    config = {"includedCategories": _CATEGORIES, "recordMode": "recordUntilFull"}
    for _ in range(3):  # the work is compiled before it is timed
        await page.evaluate(_CALIBRATE)
    await session.send("Tracing.start", {"transferMode": "ReportEvents", "traceConfig": config})
    tasks = Tasks([], 1.0)
    await page.evaluate(_CALIBRATE)
    yield tasks
    for _ in range(2):
        await page.evaluate(_CALIBRATE)
    await session.send("Tracing.end")
    end = await asyncio.wait_for(ended, 30)
    assert not end.get("dataLossOccurred"), "the trace is not whole"
    _read(events, tasks)


def _read(events: list[dict[str, Any]], tasks: Tasks) -> None:
    marks = [event for event in events if event["name"] == "calibration"]
    threads = {(mark["pid"], mark["tid"]) for mark in marks}
    assert len(threads) == 1, "the marks are those of one page"
    own = [event for event in events if (event["pid"], event["tid"]) in threads]
    run = [event for event in own if event["name"] == "RunTask" and "tdur" in event]
    fixed = [task for task in run if any(_is_within(mark, task) for mark in marks)]
    assert fixed, "no calibration is in the trace"
    commands = [event for event in own if event["name"] == "Receive mojo message" and _HARNESS in str(event["args"])]
    page = [task for task in run if not any(_is_within(event, task) for event in (*marks, *commands))]
    tasks.slowdown = max(1.0, *(task["tdur"] / 1000 / _REFERENCE_MS for task in fixed))
    tasks.cpu_ms = sorted((task["tdur"] / 1000 for task in page), reverse=True)


def _is_within(event: dict[str, Any], task: dict[str, Any]) -> bool:
    return 0 <= event["ts"] - task["ts"] <= task["dur"]
