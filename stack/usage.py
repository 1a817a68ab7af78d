"""The command `stack usage`: tokens, requests, tool calls and costs by day, project, key and model, from the store."""

import asyncio
import csv
import io
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Final

from apis.accounts.limits import NANOS
from apis.accounts.requests import UsageQuery
from apis.accounts.usage import UsageEntry, UsageSubject, sum_by_group
from stack.keys import LoadedConfig, load_accounts_config, open_accounts, require_organization

_DAY_S: Final = 86_400
_COLUMNS: Final = (
    *("day", "project", "key", "model", "requests", "input_tokens", "cached_tokens", "output_tokens"),
    *("reasoning_tokens", "tool_calls", "category", "service_tier", "batch", "cost"),
)


def usage_lines(file: str, *, days: int, as_csv: bool) -> Iterator[str]:
    """Yield the sums of each day (UTC), oldest first, as a table or as CSV (RFC 4180). Raises ConfigError."""
    rows = [_COLUMNS, *_rows(asyncio.run(_read(load_accounts_config(file), days)))]
    if as_csv:
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows(map(_guard_cells, rows))
        yield text.getvalue().rstrip("\n")
        return
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


async def _read(loaded: LoadedConfig, days: int) -> list[UsageEntry]:
    async with open_accounts(loaded) as accounts:
        usage_log = require_organization(loaded, accounts).usage_log
        now = int(time.time())
        first_day = now // _DAY_S - days + 1
        return await usage_log.read(first_day * _DAY_S, now + 1)


def _rows(entries: Sequence[UsageEntry]) -> Iterator[tuple[str, ...]]:
    query = UsageQuery(start_time=0, group_by=["project_id", "api_key_id", "model", "batch", "service_tier"])
    groups = {(entry.start_time // _DAY_S, entry.subject.category) for entry in entries}
    for day, category in sorted(groups):
        own = (each for each in entries if (each.start_time // _DAY_S, each.subject.category) == (day, category))
        sums = sum_by_group(own, query)
        date = datetime.fromtimestamp(day * _DAY_S, UTC).strftime("%Y-%m-%d")
        for subject in sorted(sums, key=_sort_key):
            counts = sums[subject]
            numbers = (counts.requests, counts.input_tokens, counts.cached_tokens, counts.output_tokens)
            tools = " ".join(f"{name}={count}" for name, count in sorted(counts.tool_calls.items()))
            names = (subject.project_id, subject.key_id, subject.model)
            way = (category or "completions", subject.service_tier, "yes" if subject.is_batch else "no")
            cost = f"{counts.cost / NANOS:.9f}"
            yield (date, *names, *map(str, numbers), str(counts.reasoning_tokens), tools, *way, cost)


def _sort_key(subject: UsageSubject) -> tuple[str, str, str, str, bool]:
    return subject.project_id, subject.key_id, subject.model, subject.service_tier, subject.is_batch


def _guard_cells(row: Sequence[str]) -> list[str]:
    """Quote cells that a spreadsheet would run as a formula: a model's name is a client's text."""
    return [f"'{cell}" if cell[:1] in ("=", "+", "-", "@", "\t", "\r") else cell for cell in row]
