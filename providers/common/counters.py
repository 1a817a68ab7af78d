"""ProcessCounter: a count that code without a request or a provider makes, shown on `/metrics` from the start."""

from typing import Final


class ProcessCounter:
    """A number that only grows while the process lives. It has no labels, so that its first step is seen as one."""

    def __init__(self, name: str, about: str) -> None:
        self.name = name
        self.about = about
        self.count = 0

    def add(self, count: int = 1) -> None:
        """Count one, or several at once."""
        self.count += count


DAMAGED_RECORDS: Final = ProcessCounter(
    "stack_damaged_records_total",
    "Stored records that could not be read and were skipped; each process counts each of them once.",
)
WATCHER_FAILURES: Final = ProcessCounter(
    "stack_watcher_failures_total", "Failures of background work, which was started again after a pause."
)
HARMONY_REPAIRS: Final = ProcessCounter(
    "stack_harmony_repairs_total", "Places where a model's Harmony deviated from its format and was corrected."
)
PROCESS_COUNTERS: Final = (DAMAGED_RECORDS, WATCHER_FAILURES, HARMONY_REPAIRS)
