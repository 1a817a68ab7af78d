"""Affinity: one server per key, equal in every process, within the bounds of the load."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest
from pydantic import ValidationError

from apis.chat import ChatRequest
from providers.inference.chat_completions.affinity import (
    MAX_MOVED_KEYS,
    ServersByKey,
    affinity_key,
    in_flight_bound,
    rank_servers,
)
from providers.inference.vllm import VLLM
from tests.conformance.inference import drain
from tests.providers.inference.remote import chat_request, started
from tests.support.servers.prefix_cache_server import PrefixCacheServer
from tests.support.servers.upstream_server import error_answer
from tests.support.waiting import until

KEYS = [f"key {number}" for number in range(2000)]
URLS = [f"http://10.0.0.{number}/v1" for number in range(4)]
LONG = "You are a careful assistant of the harbour office. " * 30


def first_url(key: str, urls: list[str]) -> str:
    return urls[rank_servers(key, urls)[0]]


def test_the_order_of_the_servers_in_a_config_does_not_matter() -> None:
    assert all(first_url(key, URLS) == first_url(key, URLS[::-1]) for key in KEYS)


def test_keys_are_spread_evenly() -> None:
    homes = [first_url(key, URLS) for key in KEYS]
    assert all(400 < homes.count(url) < 600 for url in URLS)


def test_a_server_that_is_added_or_removed_moves_only_its_own_keys() -> None:
    more = [*URLS, "http://10.0.0.9/v1"]
    moved = [key for key in KEYS if first_url(key, URLS) != first_url(key, more)]
    assert 300 < len(moved) < 500
    assert {first_url(key, more) for key in moved} == {more[-1]}


def test_the_bound_is_a_quarter_above_the_mean() -> None:
    assert in_flight_bound([0, 0]) == 8  # so few are never a reason to lose a prefix
    assert in_flight_bound([50, 49]) == 63
    assert in_flight_bound([100, 0, 0, 99]) == 63


async def test_a_hot_key_stays_within_the_bounded_load() -> None:
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(PrefixCacheServer()) for _ in range(4)]
        gate = asyncio.Event()
        for server in servers:
            server.open_gate = gate
        vllm = await stack.enter_async_context(started([server.base_url for server in servers]))
        async with asyncio.TaskGroup() as tasks:
            for _ in range(80):
                tasks.create_task(drain(vllm, chat_request(prompt_cache_key="hot")))
            await until(lambda: sum(len(server.chats) for server in servers) >= 80)
            loads = sorted(len(server.chats) for server in servers)
            gate.set()
        assert loads[-1] <= 25  # 1.25 times the mean
        assert loads[-1] > 20  # and not in turn
        for server in servers:
            server.received.clear()
        for _ in range(3):
            await drain(vllm, chat_request(prompt_cache_key="hot"))
        assert sorted(len(server.chats) for server in servers) == [0, 0, 0, 3]  # the load counts what is in flight


async def test_a_retry_goes_to_the_next_in_rank_and_the_same_for_every_process() -> None:
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(PrefixCacheServer()) for _ in range(4)]
        urls = [server.base_url for server in servers]
        workers = [await stack.enter_async_context(started(list(order))) for order in (urls, urls[::-1])]
        request = chat_request(prompt_cache_key="k")
        order = [servers[index] for index in rank_servers(str(affinity_key(request)), urls)]
        for worker in workers:
            await drain(worker, request)
        assert [len(server.chats) for server in order] == [2, 0, 0, 0]
        order[0].routes["/v1/chat/completions"] = error_answer(503)
        for worker in workers:
            await drain(worker, request)
        assert [len(server.chats) for server in order] == [4, 2, 0, 0]


async def test_requests_without_a_key_take_turns() -> None:
    async with PrefixCacheServer() as one, PrefixCacheServer() as other:
        async with started([one.base_url, other.base_url]) as vllm:
            for _ in range(6):
                await drain(vllm, chat_request())
        assert (len(one.chats), len(other.chats)) == (3, 3)


def history(*texts: str) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    turns = [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
    return [{"role": "system", "content": LONG}, *turns]


def test_a_conversation_that_is_sent_whole_each_time_keeps_its_key() -> None:
    key = affinity_key(chat_request(messages=history("Where is the ship?")))
    assert key == affinity_key(chat_request(messages=history("Where is the ship?", "At sea.", "And now?")))
    assert key != affinity_key(chat_request(messages=history("Who are you?")))
    assert affinity_key(chat_request(messages=[{"role": "user", "content": "short"}])) is None


def test_keys_differ_between_tenants_and_kinds() -> None:
    def key(**fields: Any) -> str | None:
        return affinity_key(ChatRequest.model_validate({**chat_request().model_dump(exclude_none=True), **fields}))

    keys = [
        key(prompt_cache_key="a"),
        key(prompt_cache_key="a", cache_salt="tenant-one"),
        key(prompt_cache_key="a", cache_salt="tenant-two"),
        key(cache_root="a"),
        key(cache_root="a", cache_salt="tenant-one"),
    ]
    assert len({*keys}) == len(keys)
    assert key(prompt_cache_key="a", cache_root="b") == key(prompt_cache_key="a")
    # a client's own salt divides the cache of its tenant, not the replicas
    assert key(prompt_cache_key="a", cache_salt="one.x") == key(prompt_cache_key="a", cache_salt="one.y")


@pytest.mark.parametrize("name", ["Authorization", "content-length", "a header", "x:y", ""])
def test_a_header_that_cannot_carry_the_key_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="llm-d, dynamo, sglang, litellm"):
        VLLM.Config.model_validate({"affinity_headers": name})


def test_a_key_that_has_moved_stays_until_it_is_back() -> None:
    urls = [f"http://replica-{number}" for number in range(4)]
    moved = ServersByKey(urls)
    ranked = rank_servers("k", urls)
    assert moved.rank("k") == ranked
    moved.record("k", ranked[2])
    assert moved.rank("k") == [ranked[2], ranked[0], ranked[1], ranked[3]]
    moved.record("k", ranked[0])
    assert moved.rank("k") == ranked


def test_the_newest_servers_by_key_are_remembered() -> None:
    urls = ["http://a", "http://b"]
    moved = ServersByKey(urls)
    keys = [f"k{number}" for number in range(MAX_MOVED_KEYS + 10)]
    for key in keys:
        moved.record(key, rank_servers(key, urls)[1])
    assert moved.rank(keys[0]) == rank_servers(keys[0], urls)
    assert moved.rank(keys[-1]) == rank_servers(keys[-1], urls)[::-1]


async def test_a_chain_that_was_given_away_does_not_come_back_to_an_idle_server() -> None:
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(PrefixCacheServer()) for _ in range(2)]
        gate = asyncio.Event()
        for server in servers:
            server.open_gate = gate
        vllm = await stack.enter_async_context(started([server.base_url for server in servers]))
        key = str(affinity_key(chat_request(prompt_cache_key="chain")))
        first, second = (servers[index] for index in rank_servers(key, [server.base_url for server in servers]))
        others = [f"other {number}" for number in range(60)]
        urls = [server.base_url for server in servers]
        homes = {name: rank_servers(str(affinity_key(chat_request(prompt_cache_key=name))), urls)[0] for name in others}
        async with asyncio.TaskGroup() as tasks:
            for name in [name for name in others if servers[homes[name]] is first][:8]:
                tasks.create_task(drain(vllm, chat_request(prompt_cache_key=name)))
            async with asyncio.timeout(10):
                await until(lambda: len(first.chats) >= 8)
                tasks.create_task(drain(vllm, chat_request(prompt_cache_key="chain")))
                await until(lambda: second.chats)
            gate.set()
        for _ in range(2):
            await drain(vllm, chat_request(prompt_cache_key="chain"))
        assert (len(first.chats), len(second.chats)) == (8, 3)
