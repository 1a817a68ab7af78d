"""StoreClock: the one clock of the processes that share an SQLite file; setting the machine's clock does not move it.

It is the time since the machine was started plus an offset that all processes read from the file, so leases end at
the same moment for all of them. The first process after a start of the machine chooses the offset by the wall clock.
The clock never goes back, not even over a restart of the machine: each write stores the time, and a process that is
earlier than a stored time continues from there. A time that a process with a wrong clock has stored therefore delays
the end of no lease.
"""

import math
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

_STORED: Final = struct.Struct(">16sdd")
"""Start of the machine, offset and time, in seconds."""
_UPTIME_CLOCK: Final[int | None] = getattr(time, "CLOCK_BOOTTIME", None)
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class StoreClock:
    """Seconds since the epoch, nearly: the wall clock at the first use after the machine was started, and from there
    the time that has passed. The arguments are for tests."""

    def __init__(
        self,
        *,
        wall_clock: Callable[[], float] = time.time,
        uptime: Callable[[], float] | None = None,
        boot_id: bytes | None = None,
    ) -> None:
        self._uptime = uptime or machine_uptime
        self._boot_id = boot_id  # read at first use, which may block
        self._offset_s = wall_clock() - self._uptime()

    def __call__(self) -> float:
        return self._uptime() + self._offset_s

    def adopt(self, stored: bytes) -> None:
        """Continue from what another process, or this one, has stored; a damaged or absent record is ignored."""
        if len(stored) != _STORED.size:
            return
        boot_id, offset_s, time_s = _STORED.unpack(stored)
        if not (math.isfinite(offset_s) and math.isfinite(time_s)):
            return
        if boot_id == self._read_boot_id():
            self._offset_s = offset_s
        lag_s = time_s - self()
        if lag_s > 0:
            self._offset_s += lag_s

    def encode(self) -> bytes:
        """Return the record to store with each write."""
        return _STORED.pack(self._read_boot_id(), self._offset_s, self())

    def _read_boot_id(self) -> bytes:
        if self._boot_id is None:
            self._boot_id = read_boot_id()
        return self._boot_id


def machine_uptime() -> float:
    """Return the seconds since the machine was started, the same for all its processes. Sleep counts where the system
    has such a clock."""
    return time.monotonic() if _UPTIME_CLOCK is None else time.clock_gettime(_UPTIME_CLOCK)


def read_boot_id() -> bytes:
    """Return 16 bytes that change with each start of the machine; zeros where the system does not say."""
    try:
        return bytes.fromhex(_BOOT_ID.read_text().strip().replace("-", ""))
    except (OSError, ValueError):
        return bytes(16)
