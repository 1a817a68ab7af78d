"""A benchmark's parts, one after the other: one that fails or has no time left says so in the figures, the others go
on, and all figures so far are written after each."""

import gc
import json
import logging
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

from tests.bench.gpu_machine import clocks
from tests.bench.gpu_report import write

LAST_LINES: Final = 4

logger = logging.getLogger("gpt_oss_gpu")


class Parts:
    """Fills `found`, and writes it to `folder` where there is one."""

    def __init__(self, results: dict[str, Any], folder: Path | None, seconds: float) -> None:
        """`seconds` from now on no part begins that needs more than what is left."""
        self.results = results
        self._folder = folder
        self._ends = time.monotonic() + seconds
        self._took: dict[str, float] = {}
        results["seconds"] = self._took
        results["clocks"] = {"before": clocks()}

    @property
    def left_s(self) -> float:
        return self._ends - time.monotonic()

    def run(self, name: str, work: Callable[[], Any], needs_s: float = 0.0) -> bool:
        """Run `work` and keep its figures in `results[name]`, or an error; return true for figures."""
        if self.left_s < needs_s:
            self._keep(name, {"skipped": f"it needs {needs_s:.0f} s, and {self.left_s:.0f} s are left"})
            return False
        began = time.monotonic()
        try:
            result: Any = work()
        except Exception as exc:  # noqa: BLE001 - on a card that was never tried before, every failure is a result
            result = failed(exc)
        self._took[name] = round(time.monotonic() - began, 1)
        self.results["clocks"][name] = clocks()
        self._keep(name, result)
        # What failed may hold much memory: its frames did until now.
        gc.collect()
        return not _is_none(result)

    def _keep(self, name: str, result: Any) -> None:
        self.results[name] = result
        summary = json.dumps(result) if _is_none(result) else f"{self._took[name]:.1f} s"
        logger.info("%s: %s", name, summary)
        if self._folder is not None:
            write(self._folder, self.results)


def _is_none(result: object) -> bool:
    return isinstance(result, dict) and not {"failed", "skipped"}.isdisjoint(cast("dict[str, Any]", result))


def failed(exc: BaseException) -> dict[str, str]:
    """Return the error and its traceback, each of a bounded length."""
    frames = traceback.format_exception(exc, limit=-LAST_LINES)
    return {"failed": repr(exc)[:2000], "where": "".join(frames)[-4000:]}
