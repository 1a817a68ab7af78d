"""The conditional update: load, edit, write on the condition that nothing came in between, else again after a pause."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from apis.errors import Overloaded, StackError
from apis.storage.kv_store import ABSENT, KVStore, Op, Put
from apis.storage.records import decode_record, encode_record

RecordT = TypeVar("RecordT")

Edit = Callable[[RecordT | None], RecordT | None]
"""Takes the stored record, None where there is none, and returns the one to store; None changes nothing. It may run
several times, and raises the error of a change that the record does not allow."""

MAX_ATTEMPTS: Final = 40
_FIRST_PAUSE_S: Final = 0.001
_MAX_PAUSE_S: Final = 0.1


async def change(
    kv: KVStore,
    key: str,
    record_type: type[RecordT],
    edit: Edit[RecordT],
    *,
    also: Sequence[Op] | Callable[[RecordT], Sequence[Op]] = (),
    ttl_s: float | Callable[[RecordT], float] | None = None,
) -> RecordT | None:
    """Store the record that `edit` returns, and `also` in the same write; return it, or None if `edit` returned None.

    `also` and `ttl_s` may be functions of the new record. Raises StorageCorrupt for a damaged record, and Overloaded
    after MAX_ATTEMPTS, if something changed before each of them or a condition in `also` does not hold.
    """
    changed: RecordT | None = None

    async def prepare() -> Sequence[Op] | None:
        nonlocal changed
        entry = await kv.get(key)
        changed = edit(None if entry is None else decode_record(entry, record_type))
        if changed is None:
            return None
        version = ABSENT if entry is None else entry.version
        more = also(changed) if callable(also) else also
        life_s = ttl_s(changed) if callable(ttl_s) else ttl_s
        return [Put(key, encode_record(changed), life_s, version), *more]

    await write_prepared(kv, prepare)
    return changed


async def change_existing(
    kv: KVStore,
    key: str,
    record_type: type[RecordT],
    edit: Callable[[RecordT], RecordT],
    not_found: StackError,
    *,
    also: Callable[[RecordT], Sequence[Op]] = lambda _: (),
    ttl_s: float | None = None,
) -> RecordT:
    """Store the record that `edit` makes of the stored one, as `change` does, and return it. Raises `not_found` where
    there is none."""

    def edit_stored(record: RecordT | None) -> RecordT:
        if record is None:
            raise not_found
        return edit(record)

    changed = await change(kv, key, record_type, edit_stored, also=also, ttl_s=ttl_s)
    assert changed is not None  # every edit returns a record
    return changed


async def write_prepared(kv: KVStore, prepare: Callable[[], Awaitable[Sequence[Op] | None]]) -> bool:
    """Write the conditional operations that `prepare` returns, and prepare them again as long as a condition does not
    hold: for changes of several records at once. Returns False, without a change, if `prepare` returned None.

    Raises Overloaded after MAX_ATTEMPTS.
    """
    has_changes = True

    async def attempt() -> bool:
        nonlocal has_changes
        ops = await prepare()
        has_changes = ops is not None
        return ops is None or await kv.write(ops) is not None

    await repeat_until_true(attempt)
    return has_changes


async def repeat_until_true(attempt: Callable[[], Awaitable[bool]]) -> None:
    """Repeat a conditional write of any form until it returns True, with pauses that grow and differ between callers.

    Raises Overloaded after MAX_ATTEMPTS.
    """
    for number in range(MAX_ATTEMPTS):
        if number:
            longest_s = min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2.0**number)
            await asyncio.sleep(random.uniform(0, longest_s))  # noqa: S311 - not a secret
        if await attempt():
            return
    raise Overloaded("Too many changes of the same object at once. Try again.", retry_after_s=1)
