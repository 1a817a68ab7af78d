"""StoredLimiter: limits and their counters in the KVStore, exact over all workers and machines."""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from apis.accounts.limits import LIMIT_FIELDS, NO_LIMIT, Limiter, RateLimit, Reservation, UpdateRateLimit
from apis.errors import InvalidRequest, NotFound, Overloaded, StackError
from apis.storage.keys import id_to_key_part, is_safe_id
from apis.storage.kv_store import ABSENT, Entry, KVStore, Put
from apis.storage.records import decode_record, encode_record
from providers.accounts.audit_log import StoredAuditLog
from providers.accounts.counters import UseCounter, Windows, cap_tokens
from providers.accounts.records import counter_key, limits_key, project_key

_log = logging.getLogger(__name__)
_ATTEMPTS: Final = 200
_MAX_PAUSE_S: Final = 0.02
"""Longest pause before another attempt, after another process has written the same counter."""
_COUNTER_TTL_S: Final = 32 * 24 * 3600.0
_MAX_LIMITS: Final = 1000
LimitTable = dict[str, RateLimit]
_Change = Callable[[Sequence[UseCounter]], list[UseCounter]]


@dataclass(frozen=True, slots=True)
class _ReservedPart:
    """The tokens that a request has reserved under the limit of one subject."""

    subject: str
    limit: RateLimit
    tokens: int


class StoredReservation(Reservation):
    """Tokens of one request under several limits, all reserved in the same windows."""

    def __init__(
        self, limiter: "StoredLimiter", project_id: str, parts: Sequence[_ReservedPart], counters: Sequence[UseCounter]
    ) -> None:
        self._limiter = limiter
        self._is_settled = False
        self.project_id = project_id
        self.parts = parts
        self.windows = [counter.windows for counter in counters]
        self._headers: dict[str, str] = {}
        for part, counter in zip(parts, counters, strict=True):
            own = counter.headers(part.limit)
            for unit in ("requests", "tokens"):
                rest = f"x-ratelimit-remaining-{unit}"
                if rest in own and (rest not in self._headers or int(own[rest]) < int(self._headers[rest])):
                    self._headers |= {name: value for name, value in own.items() if name.endswith(unit)}

    @property
    def headers(self) -> Mapping[str, str]:
        return self._headers

    def settle(self, tokens: int) -> None:
        if not self._is_settled:
            self._is_settled = True
            self._limiter.start_settlement(self, tokens)


class StoredLimiter(Limiter):
    """One record per subject holds its use in the current minute, day and month. All counters of a request are written
    in one step on the condition that none has changed meanwhile. Requests of one process to one project take turns, so
    only other processes can be in the way. While the store is down nothing is admitted."""

    def __init__(self, kv_store: KVStore, audit_log: StoredAuditLog) -> None:
        self._kv = kv_store
        self._audit = audit_log
        self._locks: dict[str, asyncio.Lock] = {}
        self._settlements: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Wait for the settlements that run."""
        if self._settlements:
            await asyncio.wait(self._settlements)

    async def reserve(self, project_id: str, limits: Mapping[str, RateLimit], requested_tokens: int) -> Reservation:
        parts = [
            _ReservedPart(subject, limit, cap_tokens(limit, requested_tokens)) for subject, limit in limits.items()
        ]

        def count(counters: Sequence[UseCounter]) -> list[UseCounter]:
            for part, counter in zip(parts, counters, strict=True):
                counter.require_room(part.limit, part.tokens, _subject_name(project_id, part.subject))
            return [counter.add(1, part.tokens) for part, counter in zip(parts, counters, strict=True)]

        counters = await self._update(project_id, [part.subject for part in parts], count)
        return StoredReservation(self, project_id, parts, counters)

    def start_settlement(self, reservation: StoredReservation, tokens: int) -> None:
        """Settle the reservation in a task of its own, which a client that leaves does not cancel."""
        task = asyncio.create_task(self._settle(reservation, tokens))
        self._settlements.add(task)
        task.add_done_callback(self._settlements.discard)

    async def _settle(self, reservation: StoredReservation, tokens: int) -> None:
        parts = reservation.parts

        def count(counters: Sequence[UseCounter]) -> list[UseCounter]:
            return [
                counter.settle(tokens - part.tokens, windows)
                for part, counter, windows in zip(parts, counters, reservation.windows, strict=True)
            ]

        try:
            await self._update(reservation.project_id, [part.subject for part in parts], count)
        except StackError as exc:
            _log.warning("a request of a limited project counts with its reserved tokens: %s", exc.message)

    async def _update(self, project_id: str, subjects: Sequence[str], change: _Change) -> list[UseCounter]:
        """Return the counters after `change`, written in one atomic step. Its errors leave all as it was."""
        keys = [counter_key(project_id, id_to_key_part(subject)) for subject in subjects]
        lock = self._locks.setdefault(project_id, asyncio.Lock())
        async with lock:
            for _ in range(_ATTEMPTS):
                entries = await self._kv.get_many(keys)
                now = Windows.at(time.time())
                counters = change([_read_counter(entry, now).advance(now) for entry in entries])
                puts = [
                    Put(key, encode_record(counter), _COUNTER_TTL_S, ABSENT if entry is None else entry.version)
                    for key, counter, entry in zip(keys, counters, entries, strict=True)
                ]
                if await self._kv.write(puts, durable=False) is not None:
                    return counters
                await asyncio.sleep(random.uniform(0, _MAX_PAUSE_S))  # noqa: S311 - no secret
        raise Overloaded("Too many requests of this project arrive at the same time.", retry_after_s=1)

    async def list_limits(self, project_id: str) -> LimitTable:
        return read_limits((await self._load(project_id))[0])

    async def set_limit(self, project_id: str, subject: str, update: UpdateRateLimit) -> RateLimit:
        if not is_safe_id(subject):
            raise InvalidRequest("A limit is for '*', a model or 'key:KEY_ID'.", param="rate_limit_id")
        for _ in range(_ATTEMPTS):
            entry, key = await self._load(project_id)
            limits = read_limits(entry)
            limits[subject] = limit = _apply(limits.get(subject, RateLimit()), update)
            if len(limits) > _MAX_LIMITS:
                raise InvalidRequest(f"A project has at most {_MAX_LIMITS} limits.", param="rate_limit_id")
            version = ABSENT if entry is None else entry.version
            changes = {"changes_requested": update.model_dump(exclude_none=True)}
            record = self._audit.put("rate_limit.updated", f"rl-{subject}", project_id, changes)
            if await self._kv.write([Put(key, encode_record(limits), expect=version), record]) is not None:
                return limit
        raise Overloaded("Others are changing the same limits. Try again.", retry_after_s=1)

    async def _load(self, project_id: str) -> tuple[Entry | None, str]:
        name = project_id if is_safe_id(project_id) and "/" not in project_id else "."
        project, limits = await self._kv.get_many((project_key(name), limits_key(name)))
        if project is None:
            raise NotFound(f"No project found with id '{project_id[:128]}'.")
        return limits, limits_key(name)


def read_limits(entry: Entry | None) -> LimitTable:
    """Return the limits in the record of a project, by subject."""
    return {} if entry is None else decode_record(entry, LimitTable)


def _read_counter(entry: Entry | None, now: Windows) -> UseCounter:
    return UseCounter(now) if entry is None else decode_record(entry, UseCounter)


def _apply(limit: RateLimit, update: UpdateRateLimit) -> RateLimit:
    sent: dict[str, int | None] = {field: getattr(update, name) for name, field in LIMIT_FIELDS.items()}
    changes = {field: None if value >= NO_LIMIT else value for field, value in sent.items() if value is not None}
    return replace(limit, **changes)


def _subject_name(project_id: str, subject: str) -> str:
    return f"project {project_id}" if subject == "*" else f"{subject} in project {project_id}"
