"""Conversations over each of the stores: nothing lost, nothing twice, one turn at a time, across processes."""

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


def to_items(*texts: str) -> bytes:
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
    return await conversations.acquire_lock(turn(conversation_id, **fields), response_id, tenant=TENANT)


async def texts(conversations: StoredConversations, conversation_id: str) -> list[str]:
    page = ItemListParams.model_validate({"order": "asc", "limit": 100})
    item_texts = await conversations.list_items(conversation_id, page, tenant=TENANT)
    assert not item_texts.has_more
    return [item["content"][0]["text"] for item in item_texts.data]


async def settled(*tasks: Any) -> Sequence[Any]:
    """Return the results and the StackErrors of all tasks; any other error is raised."""
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    for each in outcomes:
        if isinstance(each, BaseException) and not isinstance(each, StackError):
            raise each
    return outcomes


class ConversationPromises:
    """The promises of conversations over any store."""

    @pytest.fixture
    async def store(self, backend: Backend) -> KVStore:
        return await backend.open()

    @pytest.fixture
    async def conversations(self, store: KVStore) -> StoredConversations:
        return over(store)

    @pytest.fixture
    async def elsewhere(self, backend: Backend) -> StoredConversations:
        """The conversations of the store as another process reads them."""
        return over(await backend.open())

    @pytest.fixture
    async def created_conversation(self, conversations: StoredConversations) -> str:
        return (await conversations.create(CreateConversation.model_validate({}), tenant=TENANT)).id

    async def test_what_is_added_at_once_is_all_there(
        self, conversations: StoredConversations, elsewhere: StoredConversations, created_conversation: str
    ) -> None:
        both = (conversations, elsewhere)
        await asyncio.gather(
            *(both[n % 2].add_items(created_conversation, items(f"{n}a", f"{n}b"), tenant=TENANT) for n in range(16))
        )
        item_texts = await texts(elsewhere, created_conversation)
        assert sorted(item_texts[::2]) == sorted(f"{n}a" for n in range(16))
        assert [each[:-1] for each in item_texts[::2]] == [each[:-1] for each in item_texts[1::2]]

    async def test_of_two_that_would_have_the_turn_one_has_it(
        self, conversations: StoredConversations, elsewhere: StoredConversations, created_conversation: str
    ) -> None:
        tasks = [
            each.acquire_lock(turn(created_conversation), f"resp_{n}", tenant=TENANT)
            for n, each in enumerate((conversations, elsewhere) * 4)
        ]
        outcomes = await settled(*tasks)
        assert sum(isinstance(each, ConversationLock) for each in outcomes) == 1
        assert {type(each) for each in outcomes} == {ConversationLock, ConversationLocked}

    async def test_items_cannot_be_changed_by_others_during_a_turn(
        self, conversations: StoredConversations, elsewhere: StoredConversations, created_conversation: str
    ) -> None:
        (item,) = await conversations.add_items(created_conversation, items("a"), tenant=TENANT)
        floor = await begin(conversations, created_conversation, "resp_1")
        for ask in (
            elsewhere.add_items(created_conversation, items("b"), tenant=TENANT),
            elsewhere.delete_item(created_conversation, item["id"], tenant=TENANT),
            elsewhere.acquire_lock(turn(created_conversation), "resp_2", tenant=TENANT),
        ):
            with pytest.raises(ConversationLocked):
                await ask
        await elsewhere.update(created_conversation, UpdateConversation(metadata={"a": "b"}), tenant=TENANT)
        await floor.release()
        await elsewhere.add_items(created_conversation, items("b"), tenant=TENANT)
        assert await texts(conversations, created_conversation) == ["a", "b"]

    async def test_a_turn_is_added_once_and_ends(
        self, store: KVStore, conversations: StoredConversations, created_conversation: str
    ) -> None:
        floor = await begin(conversations, created_conversation, "resp_1")
        ops = await floor.build_append_and_release_ops(to_items("q"), to_items("a"), {})
        assert await store.write(ops) is not None
        assert await store.write(ops) is None
        assert await texts(conversations, created_conversation) == ["q", "a"]
        await begin(conversations, created_conversation, "resp_2")

    async def test_a_turn_that_was_given_up_adds_nothing(
        self, store: KVStore, conversations: StoredConversations, created_conversation: str
    ) -> None:
        floor = await begin(conversations, created_conversation, "resp_1")
        ops = await floor.build_append_and_release_ops(to_items("q"), to_items("a"), {})
        await release_lock(store, TENANT, created_conversation, "resp_1")
        assert await store.write(ops) is None
        assert not await floor.is_held()
        assert await texts(conversations, created_conversation) == []

    async def test_only_its_own_response_gives_a_turn_up(
        self, store: KVStore, conversations: StoredConversations, created_conversation: str
    ) -> None:
        floor = await begin(conversations, created_conversation, "resp_1")
        await release_lock(store, TENANT, created_conversation, "resp_2")
        assert await floor.is_held()

    async def test_another_worker_goes_on_with_a_turn_of_the_background(
        self,
        store: KVStore,
        conversations: StoredConversations,
        elsewhere: StoredConversations,
        created_conversation: str,
    ) -> None:
        first = await begin(conversations, created_conversation, "resp_1", background=True)
        async with first.hand_over() as ops:
            assert await store.write(ops) is not None
        second = await begin(elsewhere, created_conversation, "resp_1", background=True)
        third = await begin(conversations, created_conversation, "resp_1", background=True)
        assert await store.write(await second.build_append_and_release_ops(to_items("q"), to_items("a"), {})) is None
        assert await store.write(await third.build_append_and_release_ops(to_items("q"), to_items("a"), {})) is not None
        assert await texts(conversations, created_conversation) == ["q", "a"]

    async def test_a_turn_does_not_end_in_a_conversation_that_is_deleted(
        self,
        store: KVStore,
        conversations: StoredConversations,
        elsewhere: StoredConversations,
        created_conversation: str,
    ) -> None:
        await conversations.add_items(created_conversation, items("a", "b"), tenant=TENANT)
        floor = await begin(conversations, created_conversation, "resp_1")
        await elsewhere.delete(created_conversation, tenant=TENANT)
        assert await store.write(await floor.build_append_and_release_ops(to_items("q"), to_items("a"), {})) is None
        assert await store.scan("") == []

    async def test_deleting_while_others_add_leaves_nothing(
        self,
        store: KVStore,
        conversations: StoredConversations,
        elsewhere: StoredConversations,
        created_conversation: str,
    ) -> None:
        added = [elsewhere.add_items(created_conversation, items(str(n)), tenant=TENANT) for n in range(10)]
        outcomes = await settled(*added[:5], conversations.delete(created_conversation, tenant=TENANT), *added[5:])
        assert {type(each) for each in outcomes if isinstance(each, StackError)} <= {NotFound}
        assert await store.scan("") == []

    async def test_two_that_delete_leave_nothing(
        self,
        store: KVStore,
        conversations: StoredConversations,
        elsewhere: StoredConversations,
        created_conversation: str,
    ) -> None:
        await conversations.add_items(created_conversation, items(*"abcdefgh"), tenant=TENANT)
        outcomes = await settled(
            *(each.delete(created_conversation, tenant=TENANT) for each in (conversations, elsewhere))
        )
        assert None in outcomes
        assert await store.scan("") == []

    async def test_a_changed_conversation_cannot_come_back_from_its_deletion(
        self,
        store: KVStore,
        conversations: StoredConversations,
        elsewhere: StoredConversations,
        created_conversation: str,
    ) -> None:
        changed = [
            elsewhere.update(created_conversation, UpdateConversation(metadata={"n": str(n)}), tenant=TENANT)
            for n in range(8)
        ]
        await settled(*changed, conversations.delete(created_conversation, tenant=TENANT))
        with pytest.raises(NotFound):
            await elsewhere.get(created_conversation, tenant=TENANT)
        assert await store.scan("") == []

    async def test_a_deletion_that_was_cut_off_can_be_asked_for_again(
        self, store: KVStore, conversations: StoredConversations, created_conversation: str
    ) -> None:
        await conversations.add_items(created_conversation, items("a"), tenant=TENANT)
        await store.put(
            f"{TENANT}/conversation/{created_conversation}", b'{"created_at":1,"metadata":{},"is_deleted":true}'
        )
        for ask in (
            conversations.get(created_conversation, tenant=TENANT),
            conversations.add_items(created_conversation, items("b"), tenant=TENANT),
        ):
            with pytest.raises(NotFound):
                await ask
        await conversations.delete(created_conversation, tenant=TENANT)
        assert await store.scan("t/conversation_item/") == []
        with pytest.raises(NotFound):
            await conversations.delete(created_conversation, tenant=TENANT)


class TestOverMemory(ConversationPromises):
    @pytest.fixture
    def backend(self, memory_backend: Backend) -> Backend:
        return memory_backend

    async def test_the_turn_of_a_dead_process_passes_and_what_it_would_write_then_does_not_hold(
        self, backend: Backend, store: KVStore, conversations: StoredConversations, created_conversation: str
    ) -> None:
        dead = await begin(conversations, created_conversation, "resp_1")
        with pytest.raises(ConversationLocked):
            await begin(conversations, created_conversation, "resp_2")
        await backend.elapse(LEASE_S)
        await begin(conversations, created_conversation, "resp_2")
        assert await store.write(await dead.build_append_and_release_ops(to_items("q"), to_items("a"), {})) is None

    async def test_a_turn_of_the_background_lives_as_long_as_such_a_response_can(
        self, backend: Backend, store: KVStore, conversations: StoredConversations, created_conversation: str
    ) -> None:
        floor = await begin(conversations, created_conversation, "resp_1", background=True)
        async with floor.hand_over() as ops:
            assert await store.write(ops) is not None
        await backend.elapse(3599)
        with pytest.raises(ConversationLocked):
            await begin(conversations, created_conversation, "resp_2")


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
