"""Pages of the stored events of a background response, read from the batches of its log."""

from collections.abc import Iterator, Sequence
from typing import Final

from apis.errors import InvalidRequest
from apis.events import LoggedEvent
from apis.observation.background import EventListParams
from apis.storage.kv_store import Entry, KVStore
from apis.storage.pages import Page
from apis.storage.records import PAGE_BYTES
from providers.common.state.event_logs import decode_batch
from providers.responses.background.event_log import event_prefix

_BATCHES: Final = 64
"""Batches that one scan reads."""


async def read_event_page(kv: KVStore, tenant: str, response_id: str, params: EventListParams) -> Page[LoggedEvent]:
    """Return a page of the events that are stored now. Raises InvalidRequest if there is no log."""
    prefix = event_prefix(tenant, response_id)
    is_reversed = params.order == "desc"
    cursor = int(params.after) if params.after is not None else None
    after, before = await _find_bounds(kv, prefix, cursor, is_reversed=is_reversed)
    events: list[tuple[int, LoggedEvent]] = []
    size_bytes = 0
    while rows := await kv.scan(
        prefix, after=after, before=before, limit=_BATCHES, reverse=is_reversed, max_bytes=PAGE_BYTES
    ):
        for number, event in _numbered_events(rows, cursor, is_reversed=is_reversed):
            size_bytes += len(event.data)
            if len(events) == params.limit or (events and size_bytes > PAGE_BYTES):
                return _page(events, has_more=True)
            events.append((number, event))
        after, before = (after, rows[-1][0]) if is_reversed else (rows[-1][0], before)
    if not events and not await kv.scan(prefix, limit=1):
        raise InvalidRequest(
            "No events are stored of this response: it was not made with `background`, or too long ago.",
            param="response_id",
            code="unsupported_value",
        )
    return _page(events, has_more=False)


async def _find_bounds(kv: KVStore, prefix: str, cursor: int | None, *, is_reversed: bool) -> tuple[str, str]:
    """Return the bounds of the scan whose first batch may hold the first event after the cursor."""
    if cursor is None:
        return "", ""
    if is_reversed:
        return "", f"{prefix}{cursor:08d}"
    # the batch that holds the next event begins with it, or before it
    rows = await kv.scan(prefix, before=f"{prefix}{cursor + 2:08d}", limit=1, reverse=True)
    first = int(rows[0][0][-8:]) if rows else 0
    return (f"{prefix}{first - 1:08d}" if first else ""), ""


def _numbered_events(
    rows: Sequence[tuple[str, Entry]], cursor: int | None, *, is_reversed: bool
) -> Iterator[tuple[int, LoggedEvent]]:
    """Yield the events after the cursor in their order, with their sequence numbers."""
    for key, entry in rows:
        numbered = [*enumerate(decode_batch(entry.value), int(key[-8:]))]
        for number, event in reversed(numbered) if is_reversed else numbered:
            if cursor is None or (number < cursor if is_reversed else number > cursor):
                yield number, event


def _page(events: Sequence[tuple[int, LoggedEvent]], *, has_more: bool) -> Page[LoggedEvent]:
    return Page([event for _, event in events], has_more, str(events[-1][0]) if events else None)
