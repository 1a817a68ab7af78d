"""The floor of a conversation while a response is made: renewed, through an outage of the store too."""

import asyncio
from collections.abc import Sequence

import pytest

from apis.conversations import CreateConversation
from apis.errors import StoreUnavailable
from apis.storage.kv_store import KVStore, Op
from providers.kv_store.memory import Memory
from providers.responses.context.conversations import StoredConversations
from providers.responses.store.conversation_items import ConversationKeys
from providers.responses.store.conversation_lock import ConversationLock
from providers.responses.store.history import History
from tests.support.waiting import until, until_empty

LEASE_S = 0.9
"""A machine with other work stands still for less."""


class Unsure(Memory):
    """A store that now and then does not say whether it has written."""

    def __init__(self, config: Memory.Config) -> None:
        super().__init__(config)
        self.before = 0
        self.after = 0

    async def write(self, ops: Sequence[Op], *, durable: bool = True) -> list[int] | None:
        if self.before:
            self.before -= 1
            raise StoreUnavailable("away")
        written = await super().write(ops, durable=durable)
        if self.after:
            self.after -= 1
            raise StoreUnavailable("away")
        return written


@pytest.fixture
def store() -> Unsure:
    return Unsure(Memory.Config())


@pytest.fixture
async def floor(store: Unsure) -> ConversationLock:
    history = History(store, retention_s=1000, max_turns=10, cache_bytes=0)
    conversations = StoredConversations(store, history, background_s=10)
    conversation = await conversations.create(CreateConversation.model_validate({}), tenant="t")
    floor = ConversationLock(store, ConversationKeys("t", conversation.id), "resp_1", 10, LEASE_S)
    await floor.acquire()
    return floor


async def renewals(store: KVStore, floor: ConversationLock, number: int) -> None:
    """Wait until the floor was renewed so often; it must not pass in between."""
    visited: set[int] = set()
    async with asyncio.timeout(10):
        while len(visited) <= number:
            entry = await store.get(floor.ref.record_key("conversation_floor"))
            assert entry is not None
            visited.add(entry.version)
            await asyncio.sleep(0.005)


async def ends(store: KVStore, floor: ConversationLock) -> bool:
    return await store.write(await floor.build_append_and_release_ops(b"[]", b"[]", {})) is not None


async def test_it_is_renewed_for_longer_than_it_would_live(store: Unsure, floor: ConversationLock) -> None:
    async with floor:
        await renewals(store, floor, 4)
        assert await ends(store, floor)
    assert await store.get(floor.ref.record_key("conversation_floor")) is None


async def test_it_is_given_up_with_its_context(store: Unsure, floor: ConversationLock) -> None:
    async with floor:
        await renewals(store, floor, 1)
    assert await store.get(floor.ref.record_key("conversation_floor")) is None
    assert not await ends(store, floor)


@pytest.mark.parametrize(("before", "after"), [(1, 0), (0, 1), (0, 2)])
async def test_a_renewal_of_unknown_outcome_does_no_harm(
    store: Unsure, floor: ConversationLock, before: int, after: int
) -> None:
    async with floor:
        store.before, store.after = before, after
        await until(lambda: not store.before and not store.after)
        await renewals(store, floor, 2)
        assert await ends(store, floor)


async def test_it_can_end_right_after_a_renewal_of_unknown_outcome(store: Unsure, floor: ConversationLock) -> None:
    async with floor:
        store.after = 1
        await until(lambda: not store.after)
        assert await ends(store, floor)


async def test_giving_it_up_during_an_outage_is_no_error_and_it_passes_with_its_time(
    store: Unsure, floor: ConversationLock
) -> None:
    async with floor:
        store.before = 100
    assert await floor.is_held()
    await until_empty(floor.is_held)
