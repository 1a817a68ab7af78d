"""LoadingReport: writes the progress of a checkpoint's loading, and a summary, to the terminal."""

import sys
import time
from collections.abc import Callable
from typing import Final, TextIO

from providers.inference.gpt_oss.checkpoint.checkpoint import Progress

LINE_INTERVAL_S: Final = 5.0
FRAME_INTERVAL_S: Final = 0.1
CLEAR_LINE: Final = "\r\x1b[K"
GIB: Final = 2**30


class LoadingReport:
    """Rewrites one line on a terminal; elsewhere prints a line every LINE_INTERVAL_S, and none for a load that is
    quick."""

    def __init__(self, name: str, out: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._out = out or sys.stderr
        self._clock = clock
        self._start_s = clock()
        self._is_terminal = self._out.isatty()
        self._next_report_s = self._start_s + (0 if self._is_terminal else LINE_INTERVAL_S)

    def show(self, progress: Progress) -> None:
        """Write the progress; calls within the interval since the last line write nothing."""
        now = self._clock()
        if now < self._next_report_s:
            return
        self._next_report_s = now + (FRAME_INTERVAL_S if self._is_terminal else LINE_INTERVAL_S)
        remaining = ""
        if progress.bytes:
            remaining_s = (now - self._start_s) * (progress.bytes_total - progress.bytes) / progress.bytes
            remaining = f", {remaining_s:.0f} s left"
        line = (
            f"{self._name}: layer {progress.layers} of {progress.layers_total}, "
            f"{progress.bytes / GIB:.1f} of {progress.bytes_total / GIB:.1f} GiB{remaining}"
        )
        self._out.write(f"{CLEAR_LINE}{line}" if self._is_terminal else f"{line}\n")
        self._out.flush()

    def finish(self, summary: str) -> None:
        """Write the last line."""
        seconds = self._clock() - self._start_s
        self._out.write(
            f"{CLEAR_LINE if self._is_terminal else ''}{self._name}: {summary}, loaded in {seconds:.1f} s\n"
        )
        self._out.flush()
