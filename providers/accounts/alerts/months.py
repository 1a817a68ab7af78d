"""Months of the clock (UTC), and what was spent in them."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Self

from apis.accounts.usage import HOUR_S
from providers.accounts.usage_log import StoredUsageLog

_STEP_S: Final = 6 * HOUR_S
"""Seconds whose rows are in memory at a time."""
_MAX_MONTHS: Final = 2
ALL_PROJECTS: Final = None
Sums = Mapping[str | None, int]
"""The money spent, in NANOS, by project; and by all of them together for ALL_PROJECTS."""
_NOTHING: Final[Sums] = {}


@dataclass(frozen=True, slots=True)
class Month:
    """A month that begins at `start` and ends before `end`, in seconds of Unix time; its name is `2026-11`."""

    name: str
    start: int
    end: int

    @classmethod
    def at(cls, seconds: float) -> Self:
        """Return the month in which the time is."""
        first = datetime.fromtimestamp(seconds, UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
        following = (first + timedelta(days=32)).replace(day=1)
        return cls(f"{first:%Y-%m}", int(first.timestamp()), int(following.timestamp()))


class MonthSums:
    """Sums of the usage log. The hours that are over are added up once an hour, so that a late row is counted too; in
    between only the last ones are read."""

    def __init__(self, usage_log: StoredUsageLog) -> None:
        self._usage_log = usage_log
        self._past: dict[int, tuple[int, Sums]] = {}

    async def read(self, month: Month, now: float) -> Sums:
        """Return what was spent in the month up to `now`. Raises StoreUnavailable."""
        past_end = max(month.start, min(int(now) // HOUR_S * HOUR_S - HOUR_S, month.end))
        summed_end, sums = self._past.get(month.start, (0, _NOTHING))
        if summed_end != past_end:
            sums = await self._add(_NOTHING, month.start, past_end)
            others = [each for each in self._past.items() if each[0] != month.start][1 - _MAX_MONTHS :]
            self._past = {**dict(others), month.start: (past_end, sums)}
        # another process may be ahead by the clock
        return await self._add(sums, past_end, min(int(now) + HOUR_S, month.end))

    async def _add(self, sums: Sums, start: int, end: int) -> Sums:
        """Return the sums and those of the hours from `start` on and before `end`, read step by step."""
        total = dict(sums)
        for step_start in range(start, end, _STEP_S):
            for entry in await self._usage_log.read(step_start, min(step_start + _STEP_S, end)):
                for spender in (entry.subject.project_id, ALL_PROJECTS):
                    total[spender] = total.get(spender, 0) + entry.counts.cost
        return total
