"""Conversations over each of the stores: nothing lost, nothing twice, one turn at a time, whoever asks and whenever."""

import asyncio
from collections.abc import Sequence
from typing import Any

import orjson
import pytest

from apis.conversations import AddItems, CreateConversation, ItemListParams, UpdateConversation
from apis.errors import ConversationLocked, NotFound, StackError
from apis.responses import CreateResponse
from apis.storage.kv_store import KVStore
from providers.responses.context.conversations import StoredConversations
from providers.responses.store.conversation_lock import LEASE_S, ConversationLock, release_lock
from providers.responses.store.history import History
from tests.conformance.kv_store import Backend

TENANT = "t"


def items(*texts: str) -> AddItems:
    return AddItems.model_validate({"items": [{"role": "user", "content": text} for text in texts]})


def turn(conversation_id: str, **fields: Any) -> CreateResponse:
    return CreateResponse.model_validate({"model": "m", "conversation": conversation_id, **fields})


def given(*texts: str) -> bytes:
    return orjson.dumps(
        [{"type": "message", "id": f"msg_{text}", "role": "user", "content": [part(text)]} for text in texts]
    )


def part(text: str) -> dict[str, str]:
    return {"type": "input_text", "text": text}


def over(store: KVStore) -> StoredConversations:
    history = History(store, retention_s=1000, max_turns=10, cache_bytes=0)
    return StoredConversations(store, history, background_s=3600)


async def begin(
    conversations: StoredConversations, conversation_id: str, response_id: str, **fields: Any
) -> ConversationLock:
    floor = await conversations.acquire_lock(turn(conversation_id, **fields), response_id, tenant=TENANT)
    assert floor is not None
    return floor


async def texts(conversations: StoredConversations, conversation_id: str) -> list[str]:
    page = ItemListParams.model_validate({"order": "asc", "limit": 100})
    found = await conversations.list_items(conversation_id, page, tenant=TENANT)
    assert not found.has_more
    return [item["content"][0]["text"] for item in found.data]


async def settled(*asked: Any) -> Sequence[Any]:
    """What came of all; what is not a StackError is raised."""
    told = await asyncio.gather(*asked, return_exceptions=True)
    for each in told:
        if isinstance(each, BaseException) and not isinstance(each, StackError):
            raise each
    return told


class ConversationPromises:
    """What conversations keep over any store."""

    @pytest.fixture
    async def store(self, backend: Backend) -> KVStore:
        return await backend.open()

    @pytest.fixture
    async def conversations(self, store: KVStore) -> StoredConversations:
        return over(store)

    @pytest.fixture
    async def elsewhere(self, backend: Backend) -> StoredConversations:
        """The same conversations as another process has them."""
        return over(await backend.open())

    @pytest.fixture
    async def made(self, conversations: StoredConversations) -> str:
        return (await conversations.create(CreateConversation.model_validate({}), tenant=TENANT)).id

    async def test_what_is_added_at_once_is_all_there(
        self, conversations: StoredConversations, elsewhere: StoredConversations, made: str
    ) -> None:
        both = (conversations, elsewhere)
        await asyncio.gather(*(both[n % 2].add_items(made, items(f"{n}a", f"{n}b"), tenant=TENANT) for n in range(16)))
        found = await texts(elsewhere, made)
        assert sorted(found[::2]) == sorted(f"{n}a" for n in range(16))
        assert [each[:-1] for each in found[::2]] == [each[:-1] for each in found[1::2]]

    async def test_of_two_that_would_have_the_turn_one_has_it(
        self, conversations: StoredConversations, elsewhere: StoredConversations, made: str
    ) -> None:
        asked = [
            each.acquire_lock(turn(made), f"resp_{n}", tenant=TENANT)
            for n, each in enumerate((conversations, elsewhere) * 4)
        ]
        told = await settled(*asked)
        assert sum(isinstance(each, ConversationLock) for each in told) == 1
        assert {type(each) for each in told} == {ConversationLock, ConversationLocked}

    async def test_nobody_else_changes_items_during_a_turn(
        self, conversations: StoredConversations, elsewhere: StoredConversations, made: str
    ) -> None:
        (item,) = await conversations.add_items(made, items("a"), tenant=TENANT)
        floor = await begin(conversations, made, "resp_1")
        for ask in (
            elsewhere.add_items(made, items("b"), tenant=TENANT),
            elsewhere.delete_item(made, item["id"], tenant=TENANT),
            elsewhere.acquire_lock(turn(made), "resp_2", tenant=TENANT),
        ):
            with pytest.raises(ConversationLocked):
                await ask
        await elsewhere.update(made, UpdateConversation(metadata={"a": "b"}), tenant=TENANT)
        await floor.release()
        await elsewhere.add_items(made, items("b"), tenant=TENANT)
        assert await texts(conversations, made) == ["a", "b"]

    async def test_a_turn_is_added_once_and_ends(
        self, store: KVStore, conversations: StoredConversations, made: str
    ) -> None:
        floor = await begin(conversations, made, "resp_1")
        ops = await floor.build_append_and_release_ops(given("q"), given("a"), {})
        assert await store.write(ops) is not None
        assert await store.write(ops) is None
        assert await texts(conversations, made) == ["q", "a"]
        await begin(conversations, made, "resp_2")

    async def test_a_turn_that_was_given_up_adds_nothing(
        self, store: KVStore, conversations: StoredConversations, made: str
    ) -> None:
        floor = await begin(conversations, made, "resp_1")
        ops = await floor.build_append_and_release_ops(given("q"), given("a"), {})
        await release_lock(store, TENANT, made, "resp_1")
        assert await store.write(ops) is None
        assert not await floor.is_held()
        assert await texts(conversations, made) == []

    async def test_only_its_own_response_gives_a_turn_up(
        self, store: KVStore, conversations: StoredConversations, made: str
    ) -> None:
        floor = await begin(conversations, made, "resp_1")
        await release_lock(store, TENANT, made, "resp_2")
        assert await floor.is_held()

    async def test_another_worker_goes_on_with_a_turn_of_the_background(
        self, store: KVStore, conversations: StoredConversations, elsewhere: StoredConversations, made: str
    ) -> None:
        first = await begin(conversations, made, "resp_1", background=True)
        async with first.hand_over() as ops:
            assert await store.write(ops) is not None
        second = await begin(elsewhere, made, "resp_1", background=True)
        third = await begin(conversations, made, "resp_1", background=True)
        assert await store.write(await second.build_append_and_release_ops(given("q"), given("a"), {})) is None
        assert await store.write(await third.build_append_and_release_ops(given("q"), given("a"), {})) is not None
        assert await texts(conversations, made) == ["q", "a"]

    async def test_a_turn_does_not_end_in_a_conversation_that_is_deleted(
        self, store: KVStore, conversations: StoredConversations, elsewhere: StoredConversations, made: str
    ) -> None:
        await conversations.add_items(made, items("a", "b"), tenant=TENANT)
        floor = await begin(conversations, made, "resp_1")
        await elsewhere.delete(made, tenant=TENANT)
        assert await store.write(await floor.build_append_and_release_ops(given("q"), given("a"), {})) is None
        assert await store.scan("") == []

    async def test_deleting_while_others_add_leaves_nothing(
        self, store: KVStore, conversations: StoredConversations, elsewhere: StoredConversations, made: str
    ) -> None:
        added = [elsewhere.add_items(made, items(str(n)), tenant=TENANT) for n in range(10)]
        told = await settled(*added[:5], conversations.delete(made, tenant=TENANT), *added[5:])
        assert {type(each) for each in told if isinstance(each, StackError)} <= {NotFound}
        assert await store.scan("") == []

    async def test_two_that_delete_leave_nothing(
        self, store: KVStore, conversations: StoredConversations, elsewhere: StoredConversations, made: str
    ) -> None:
        await conversations.add_items(made, items(*"abcdefgh"), tenant=TENANT)
        told = await settled(*(each.delete(made, tenant=TENANT) for each in (conversations, elsewhere)))
        assert None in told
        assert await store.scan("") == []

    async def test_a_changed_conversation_cannot_come_back_from_its_deletion(
        self, store: KVStore, conversations: StoredConversations, elsewhere: StoredConversations, made: str
    ) -> None:
        changed = [elsewhere.update(made, UpdateConversation(metadata={"n": str(n)}), tenant=TENANT) for n in range(8)]
        await settled(*changed, conversations.delete(made, tenant=TENANT))
        with pytest.raises(NotFound):
            await elsewhere.get(made, tenant=TENANT)
        assert await store.scan("") == []

    async def test_a_deletion_that_was_cut_off_can_be_asked_for_again(
        self, store: KVStore, conversations: StoredConversations, made: str
    ) -> None:
        await conversations.add_items(made, items("a"), tenant=TENANT)
        await store.put(f"{TENANT}/conversation/{made}", b'{"created_at":1,"metadata":{},"is_deleted":true}')
        for ask in (conversations.get(made, tenant=TENANT), conversations.add_items(made, items("b"), tenant=TENANT)):
            with pytest.raises(NotFound):
                await ask
        await conversations.delete(made, tenant=TENANT)
        assert await store.scan("t/conversation_item/") == []
        with pytest.raises(NotFound):
            await conversations.delete(made, tenant=TENANT)


class TestOverMemory(ConversationPromises):
    @pytest.fixture
    def backend(self, memory_backend: Backend) -> Backend:
        return memory_backend

    async def test_the_turn_of_a_dead_process_passes_and_what_it_would_write_then_does_not_hold(
        self, backend: Backend, store: KVStore, conversations: StoredConversations, made: str
    ) -> None:
        dead = await begin(conversations, made, "resp_1")
        with pytest.raises(ConversationLocked):
            await begin(conversations, made, "resp_2")
        await backend.elapse(LEASE_S)
        await begin(conversations, made, "resp_2")
        assert await store.write(await dead.build_append_and_release_ops(given("q"), given("a"), {})) is None

    async def test_a_turn_of_the_background_lives_as_long_as_such_a_response_can(
        self, backend: Backend, store: KVStore, conversations: StoredConversations, made: str
    ) -> None:
        floor = await begin(conversations, made, "resp_1", background=True)
        async with floor.hand_over() as ops:
            assert await store.write(ops) is not None
        await backend.elapse(3599)
        with pytest.raises(ConversationLocked):
            await begin(conversations, made, "resp_2")


class TestOverSQLite(ConversationPromises):
    @pytest.fixture
    def backend(self, sqlite_backend: Backend) -> Backend:
        return sqlite_backend


class TestOverRedis(ConversationPromises):
    @pytest.fixture
    def backend(self, redis_backend: Backend) -> Backend:
        return redis_backend


class TestOverPostgres(ConversationPromises):
    @pytest.fixture
    def backend(self, postgres_backend: Backend) -> Backend:
        return postgres_backend
