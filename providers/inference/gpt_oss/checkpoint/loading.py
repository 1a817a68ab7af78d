"""Tells the terminal how far a checkpoint's loading has come, and what was loaded."""

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
    """On a terminal one line that moves; elsewhere a line now and then, and none for what loads at once."""

    def __init__(self, name: str, out: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._out = out or sys.stderr
        self._clock = clock
        self._start_s = clock()
        self._is_terminal = self._out.isatty()
        self._next_report_s = self._start_s + (0 if self._is_terminal else LINE_INTERVAL_S)

    def show(self, progress: Progress) -> None:
        """May be called as often as one likes."""
        now = self._clock()
        if now < self._next_report_s:
            return
        self._next_report_s = now + (FRAME_INTERVAL_S if self._is_terminal else LINE_INTERVAL_S)
        left = ""
        if progress.bytes:
            left_s = (now - self._start_s) * (progress.bytes_total - progress.bytes) / progress.bytes
            left = f", {left_s:.0f} s left"
        told = (
            f"{self._name}: layer {progress.layers} of {progress.layers_total}, "
            f"{progress.bytes / GIB:.1f} of {progress.bytes_total / GIB:.1f} GiB{left}"
        )
        self._out.write(f"{CLEAR_LINE}{told}" if self._is_terminal else f"{told}\n")
        self._out.flush()

    def finish(self, summary: str) -> None:
        """The last line."""
        seconds = self._clock() - self._start_s
        self._out.write(
            f"{CLEAR_LINE if self._is_terminal else ''}{self._name}: {summary}, loaded in {seconds:.1f} s\n"
        )
        self._out.flush()
