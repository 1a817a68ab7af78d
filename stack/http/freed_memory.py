"""Memory that large requests have freed, and that the C library keeps for itself unless it is asked for it."""

import asyncio
import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from apis.fair_share import FairShare

_INTERVAL_S: Final = 2.0
_SIZES: Final = Path("/proc/self/statm")
_LEAST_GROWTH_BYTES: Final = 64 * 1024 * 1024


def find_trim() -> Callable[[int], int] | None:
    """Return the function of the C library that gives free memory back to the system, None where it has none."""
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):  # another library than glibc
        return None
    return trim


async def return_freed_memory(
    held_bytes: FairShare, trim: Callable[[int], int], interval_s: float = _INTERVAL_S
) -> None:
    """Give memory back to the system, until cancelled, when this process has grown and no large body or answer is in
    progress: while there are some, they need it again. It looks once in each interval."""
    expected_bytes = await asyncio.to_thread(_read_resident_bytes)
    while True:
        await asyncio.sleep(interval_s)
        size_bytes = await asyncio.to_thread(_read_resident_bytes)
        if held_bytes.used:
            continue
        if size_bytes > expected_bytes + _LEAST_GROWTH_BYTES:
            await asyncio.to_thread(trim, 0)
            expected_bytes = await asyncio.to_thread(_read_resident_bytes)
        expected_bytes = min(expected_bytes, size_bytes)


def _read_resident_bytes() -> int:
    # psutil would take 5 MiB of them
    return int(_SIZES.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
