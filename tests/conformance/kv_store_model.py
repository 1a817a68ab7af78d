"""A dictionary that does what a KVStore should, and sequences of steps to run on both."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from hypothesis import strategies as st

from apis.storage.kv_store import ABSENT, Delete, Entry, KVStore, Op, Put

LIFE_S = 0.004


@dataclass(frozen=True)
class Change:
    """`expects` is what the writer believes: nothing, what is there, that the key is absent, or something wrong."""

    key: str
    value: bytes | None
    expects: str
    dies: bool


@dataclass(frozen=True)
class Write:
    changes: tuple[Change, ...]
    durable: bool


@dataclass(frozen=True)
class Scan:
    prefix: str
    after: str
    before: str
    limit: int
    reverse: bool


@dataclass(frozen=True)
class Sweep:
    pass


Step = Write | Scan | Sweep

some_keys = st.sampled_from(["a", "a/", "a/b", "a0", "b", "%", "_", "é", "\uffff", "\U00010000", "\U0010ffff"])
any_keys = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=4)
keys = some_keys | any_keys
bounds = st.just("") | keys
changes = st.builds(
    Change,
    key=keys,
    value=st.none() | st.binary(max_size=8),
    expects=st.sampled_from(["nothing", "nothing", "what is there", "absent", "wrong"]),
    dies=st.sampled_from([False, False, False, True]),
)
writes = st.builds(Write, st.lists(changes, max_size=4, unique_by=lambda change: change.key).map(tuple), st.booleans())
scans = st.builds(Scan, bounds, bounds, bounds, st.integers(0, 5) | st.just(1000), st.booleans())
steps = st.lists(st.one_of(writes, writes, scans, st.builds(Sweep)), max_size=25)


class Model:
    """Runs every step on the store and on the dictionary, and asserts that both end alike."""

    def __init__(self, store: KVStore, elapse: Callable[[float], Awaitable[None]]) -> None:
        self._store = store
        self._elapse = elapse
        self._entries: dict[str, Entry] = {}
        self._given: set[tuple[str, int]] = set()

    async def take(self, step: Step) -> None:
        match step:
            case Write():
                await self._write(step)
            case Scan():
                await self._scan(step)
            case Sweep():
                await self._store.sweep()
        assert dict(await self._store.scan("")) == self._entries

    async def _write(self, step: Write) -> None:
        holds = all(self._holds(change) for change in step.changes)
        versions = await self._store.write([self._op(change) for change in step.changes], durable=step.durable)
        assert (versions is not None) == holds
        for change, version in zip(step.changes, versions or (), strict=holds):
            self._entries.pop(change.key, None)
            if change.value is None:
                assert version == ABSENT
            else:
                assert version > ABSENT
                assert (change.key, version) not in self._given
                self._given.add((change.key, version))
                self._entries[change.key] = Entry(change.value, version)
        if holds and any(change.dies for change in step.changes):
            await self._elapse(2 * LIFE_S)
            for change in step.changes:
                if change.dies:
                    self._entries.pop(change.key, None)
        keys = [change.key for change in step.changes]
        assert await self._store.get_many(keys) == [self._entries.get(key) for key in keys]

    def _version(self, key: str) -> int:
        entry = self._entries.get(key)
        return ABSENT if entry is None else entry.version

    def _expected(self, change: Change) -> int | None:
        there = self._version(change.key)
        return {"nothing": None, "what is there": there, "absent": ABSENT, "wrong": there + 1}[change.expects]

    def _holds(self, change: Change) -> bool:
        return self._expected(change) in {None, self._version(change.key)}

    def _op(self, change: Change) -> Op:
        if change.value is None:
            return Delete(change.key, self._expected(change))
        return Put(change.key, change.value, LIFE_S if change.dies else None, self._expected(change))

    async def _scan(self, step: Scan) -> None:
        records = await self._store.scan(
            step.prefix, after=step.after, before=step.before, limit=step.limit, reverse=step.reverse
        )
        expected = [
            (key, entry)
            for key, entry in sorted(self._entries.items(), reverse=step.reverse)
            if key.startswith(step.prefix) and key > step.after and (not step.before or key < step.before)
        ]
        assert records == expected[: step.limit]
