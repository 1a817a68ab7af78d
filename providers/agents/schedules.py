"""Schedules: the times of a cron expression in a time zone, and of one moment.

Times are seconds of Unix time. Where clocks are set forward, a time that does not exist comes right after the gap.
Where they are set back, a fixed time comes once, and one of every few minutes goes on, as with Debian's cron.
"""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from apis.errors import InvalidRequest

_CRON_FIELDS: Final = 5
_MAX_CHARS: Final = 256
_zones: dict[str, ZoneInfo] = {}


async def load_zone(name: str) -> None:
    """Read a time zone from the disk, before the functions below use it. Raises InvalidRequest for an unknown one."""
    if name not in _zones:
        try:
            _zones[name] = await asyncio.to_thread(ZoneInfo, name)
        except (ZoneInfoNotFoundError, ValueError, OSError) as exc:
            raise _unknown_zone_error() from exc


def check_schedule(expression: str, timezone: str, moment: float) -> None:
    """Raise InvalidRequest for an expression that cron does not know, or that never comes after the moment."""
    if len(expression) > _MAX_CHARS or len(expression.split()) != _CRON_FIELDS:
        raise InvalidRequest(
            "A cron expression has five fields: minute, hour, day of the month, month, day of the week.",
            param="expression",
        )
    try:
        CronSim(expression, datetime.fromtimestamp(moment, UTC))
    except CronSimError as exc:
        raise InvalidRequest(f"The cron expression cannot be read: {exc}.", param="expression") from exc
    if not list_next(expression, timezone, moment, 1):
        raise InvalidRequest("The cron expression names a time that never comes.", param="expression")


def list_next(expression: str, timezone: str, moment: float, count: int) -> Sequence[int]:
    """Return the next times after a moment, at most `count`."""
    start = datetime.fromtimestamp(moment, _find_zone(timezone))
    return [int(each.timestamp()) for each in islice(CronSim(expression, start), count)]


def find_last(expression: str, timezone: str, moment: float) -> int | None:
    """Return the last time that is not after a moment."""
    start = datetime.fromtimestamp(int(moment) + 1, _find_zone(timezone))
    last = next(CronSim(expression, start, reverse=True), None)
    return None if last is None else int(last.timestamp())


def _find_zone(name: str) -> ZoneInfo:
    """Return a time zone that was loaded. Raises InvalidRequest for one that this machine does not know."""
    if name not in _zones:
        raise _unknown_zone_error()
    return _zones[name]


def _unknown_zone_error() -> InvalidRequest:
    return InvalidRequest(
        "Unknown time zone: send a name of the IANA database, such as 'Europe/Berlin'.", param="timezone"
    )
