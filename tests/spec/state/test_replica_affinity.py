"""Chains over several replicas with prefix caches: through the official SDK, over real upstream servers."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.sdk.requests import create
from tests.support.servers.prefix_cache_server import BLOCK_CHARS, CHARS_PER_TOKEN, PrefixCache, PrefixCacheServer
from tests.support.servers.serving import Served, serving

INSTRUCTIONS = "You answer questions about the harbour. " * 40
USERS = 20
TURNS = 5
SHARE_OF_ONE_SERVER = 0.9
"""Less than 1, because a chain leaves a replica that is busier than the others at that moment."""

Ask = Callable[[str | None, str], Awaitable[Any]]


def inference_over(servers: list[PrefixCacheServer], **config: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"provider": "vllm", "base_url": [server.base_url for server in servers], **config}
    return {**base, "retry_delay_s": 0.001, "health_interval_s": 0.25, "breaker_window_s": 0.1}


@asynccontextmanager
async def replicas(
    count: int = 2, **config: Any
) -> AsyncGenerator[tuple[Served, list[PrefixCacheServer], PrefixCache]]:
    possible = PrefixCache()
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(PrefixCacheServer(possible)) for _ in range(count)]
        served = await stack.enter_async_context(serving(inference_over(servers, **config)))
        yield served, servers, possible


def question(user: int, turn: int) -> str:
    return f"User {user} asks in turn {turn}: " + f"where is the ship {user}-{turn} bound? " * 12


async def converse(users: range, turns: int, ask: Callable[[int, int, str | None], Awaitable[Any]]) -> None:
    """Chains of all users, whose turns alternate; a few at a time."""
    newest: dict[int, str] = {}
    places = asyncio.Semaphore(6)

    async def take_turn(user: int, turn: int) -> None:
        async with places:
            newest[user] = (await ask(user, turn, newest.get(user))).id

    for turn in range(turns):
        await asyncio.gather(*(take_turn(user, turn) for user in users))


async def share_of_reused_turns(served: Served, *, is_placed_by_chance: bool) -> float:
    """Return the share of the later turns whose replica had the whole prompt of the turn before in its cache."""
    prompt_tokens: dict[str, int] = {}
    reused: list[bool] = []

    async def ask(user: int, turn: int, previous: str | None) -> Any:
        fields: dict[str, Any] = {"prompt_cache_key": f"{user}/{turn}"} if is_placed_by_chance else {}
        response = await create(
            served,
            model="fake-model",
            instructions=INSTRUCTIONS,
            input=question(user, turn),
            previous_response_id=previous,
            **fields,
        )
        prompt_tokens[response.id] = response.usage.input_tokens
        if previous is not None:
            cached = response.usage.input_tokens_details.cached_tokens
            reused.append(cached > prompt_tokens[previous] - 2 * BLOCK_CHARS // CHARS_PER_TOKEN)
        return response

    await converse(range(USERS), TURNS, ask)
    assert len(reused) == USERS * (TURNS - 1)
    return sum(reused) / len(reused)


async def test_a_chain_stays_with_its_replica() -> None:
    """Nearly all possible hits; where every request has a key of its own, about half of the turns find theirs."""
    async with replicas() as (served, servers, possible):
        assert await share_of_reused_turns(served, is_placed_by_chance=False) >= SHARE_OF_ONE_SERVER
        assert all(len(server.chats) > TURNS for server in servers)
        assert sum(server.cache.hit_tokens for server in servers) >= SHARE_OF_ONE_SERVER * possible.hit_tokens
    async with replicas() as (served, servers, possible):
        assert 0.25 < await share_of_reused_turns(served, is_placed_by_chance=True) < 0.75


async def test_a_branch_and_a_conversation_stay_with_their_replica() -> None:
    async with replicas(4) as (served, servers, _):

        async def ask(**fields: Any) -> Any:
            return await create(served, model="fake-model", **fields)

        first = await ask(input=question(1, 0))
        second = await ask(input=question(1, 1), previous_response_id=first.id)
        for branch in range(4):
            await ask(input=question(1, branch + 2), previous_response_id=first.id)
            await ask(input=question(1, branch + 2), previous_response_id=second.id)
        assert sorted(len(server.chats) for server in servers) == [0, 0, 0, 10]

        conversation = await served.client.conversations.create()
        before = [len(server.chats) for server in servers]
        for turn in range(4):
            await ask(input=question(2, turn), conversation=conversation.id)
        added = [len(server.chats) - count for server, count in zip(servers, before, strict=True)]
        assert sorted(added) == [0, 0, 0, 4]


async def test_a_key_of_the_client_comes_before_the_chain() -> None:
    async with replicas(4) as (served, servers, _):
        for number in range(6):
            await create(served, model="fake-model", input=question(number, 0), prompt_cache_key="my key")
        assert sorted(len(server.chats) for server in servers) == [0, 0, 0, 6]


async def test_chains_with_the_same_long_beginning_share_a_replica_until_they_are_many() -> None:
    async with replicas(4) as (served, servers, _):
        for number in range(16):
            first = await create(served, model="fake-model", input=f"q{number}", instructions=INSTRUCTIONS * 4)
            if number < 4:
                await create(
                    served,
                    model="fake-model",
                    input="and?",
                    instructions=INSTRUCTIONS * 4,
                    previous_response_id=first.id,
                )
                assert sorted(len(server.chats) for server in servers) == [0, 0, 0, 2 * number + 2]
        assert sum(bool(server.chats) for server in servers) > 1


async def test_chains_recover_from_a_replica_that_dies_and_returns() -> None:
    async with replicas(3) as (served, servers, _):
        dead = servers[0]

        async def ask(user: int, turn: int, previous: str | None) -> Any:
            return await create(served, model="fake-model", input=question(user, turn), previous_response_id=previous)

        newest: dict[int, str] = {}
        while min(len(server.chats) for server in servers) < 2:
            newest[len(newest)] = (await ask(len(newest), 0, None)).id

        async def take_turns(turns: range) -> None:
            for turn in turns:
                for user, previous in newest.items():
                    newest[user] = (await ask(user, turn, previous)).id

        await take_turns(range(1, 2))
        homes = {server: len(server.chats) for server in servers}
        await dead.stop()
        await take_turns(range(2, 4))  # nothing fails
        assert len(dead.chats) == homes[dead]
        await dead.restart()
        dead.received.clear()
        await asyncio.wait_for(dead.until_received(2), 5)  # two checks of its health
        caches = [server.cache.hit_tokens for server in servers]
        await take_turns(range(4, 6))
        assert not dead.chats  # its chains stay where their prefixes are now
        assert all(server.cache.hit_tokens > before for server, before in zip(servers[1:], caches[1:], strict=True))
        for user in range(100, 140):  # and new ones come
            newest[user] = (await ask(user, 0, None)).id
            if dead.chats:
                break
        assert dead.chats


async def test_a_replica_that_is_added_takes_only_its_own_chains(tmp_path: Path) -> None:
    """Two machines with one store and one after the other: the second has one replica more."""
    store = {"provider": "sqlite", "path": str(tmp_path / "store.db")}
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(PrefixCacheServer()) for _ in range(3)]
        before = await stack.enter_async_context(serving(inference_over(servers[:2]), kv_store=store))
        after = await stack.enter_async_context(serving(inference_over(servers), kv_store=store))

        async def take_turn(served: Served, chain: int, turn: int, previous: str | None) -> tuple[str, set[int]]:
            counts = [len(server.chats) for server in servers]
            response = await create(
                served, model="fake-model", input=question(chain, turn), previous_response_id=previous
            )
            return response.id, {at for at, server in enumerate(servers) if len(server.chats) > counts[at]}

        moves: list[bool] = []
        while len(moves) < 12 or not any(moves) or all(moves):
            first_id, first_home = await take_turn(before, len(moves), 0, None)
            second_id, second_home = await take_turn(after, len(moves), 1, first_id)
            _, third_home = await take_turn(after, len(moves), 2, second_id)
            assert third_home == second_home
            assert second_home in (first_home, {2})
            moves.append(second_home == {2})


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("llm-d", ["x-session-id"]),
        ("dynamo", ["x-dynamo-session-id"]),
        ("sglang", ["x-smg-routing-key"]),
        (["litellm", "X-My-Router"], ["x-litellm-session-id", "x-my-router"]),
    ],
)
async def test_a_router_gets_the_key_of_the_chain_as_a_header(names: str | list[str], expected: list[str]) -> None:
    async with replicas(1, affinity_headers=names) as (served, [server], _):
        first = await create(served, model="fake-model", input="hi")
        await create(served, model="fake-model", input="more", previous_response_id=first.id)
        await create(served, model="fake-model", input="hi")
        keys = [[chat.headers[name] for name in expected] for chat in server.chats]
        assert keys[0] == keys[1] != keys[2]
        assert len({*keys[0]}) == 1
        assert first.id.removeprefix("resp_") not in keys[0][0]
