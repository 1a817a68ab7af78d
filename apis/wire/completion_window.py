"""CompletionWindow: the time in which a batch or a background response is to be executed, such as `2h`."""

import re
from typing import Annotated, Final

from pydantic import AfterValidator

MIN_WINDOW_S: Final = 60
MAX_WINDOW_S: Final = 7 * 86_400
SOONEST: Final = "soonest"
"""The window of a background response without a deadline, which waits for no other work."""
_WINDOW: Final = re.compile(r"([1-9]\d{0,5})([mhd])")
_UNIT_S: Final = {"m": 60, "h": 3600, "d": 86_400}


def window_to_seconds(window: str) -> int:
    """Return the length of a completion window in seconds, 0 for a text that is none."""
    match = _WINDOW.fullmatch(window)
    return int(match[1]) * _UNIT_S[match[2]] if match else 0


def _has_length(window: str) -> bool:
    return MIN_WINDOW_S <= window_to_seconds(window) <= MAX_WINDOW_S


def _check_batch_window(window: str) -> str:
    if not _has_length(window):
        raise ValueError('expected "24h", or another number of minutes, hours or days (30m, 2h, 3d) up to 7d')
    return window


def _check_background_window(window: str) -> str:
    if window != SOONEST and not _has_length(window):
        raise ValueError(
            'expected "soonest", "2h", "8h", or another number of minutes, hours or days (30m, 3d) up to 7d'
        )
    return window


BatchWindow = Annotated[str, AfterValidator(_check_batch_window)]
BackgroundWindow = Annotated[str, AfterValidator(_check_background_window)]
