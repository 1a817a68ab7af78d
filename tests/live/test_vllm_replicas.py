"""One stack with two real vLLM servers: chains find their prefixes cached, also after a replica died and returned."""

import asyncio
import sys
from collections.abc import Generator
from typing import Any

import pytest

from tests.live.asking import create
from tests.live.smollm2 import MODEL, smollm2_folder
from tests.live.vllm_server import OPTIONS, VLLMServer, vllm_python
from tests.support.servers.serving import Served, serving

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800, func_only=True)]

USERS = 8
TURNS = 4
BLOCK_TOKENS = 128
"""vLLM's block on a CPU: it caches whole blocks only."""
SHARE_OF_POSSIBLE_HITS = 0.95


@pytest.fixture(scope="module")
def replicas(vllm: VLLMServer) -> Generator[list[VLLMServer]]:
    """The server that all tests here share, and a second one like it."""
    python = vllm_python(print)
    second = VLLMServer(python, smollm2_folder(python, print), MODEL, *OPTIONS)
    try:
        second.start()
        yield [vllm, second]
    finally:
        second.stop()


def inference(replicas: list[VLLMServer]) -> dict[str, Any]:
    urls = [f"{replica.url}/v1" for replica in replicas]
    return {"provider": "vllm", "base_url": urls, "health_interval_s": 0.25, "breaker_window_s": 1}


class Chains:
    """Chains of several users, each with a long beginning of its own. Every turn of each must succeed."""

    def __init__(self, served: Served, name: str, *, is_placed_by_chance: bool = False) -> None:
        self._served = served
        self._name = name
        self._is_placed_by_chance = is_placed_by_chance
        self._turn = 0
        self._newest: dict[int, Any] = {}

    async def take_turn(self) -> tuple[int, int]:
        """Take the next turn of every user; return the cached tokens and those that could have been cached: the whole
        blocks of the previous turn's prompt."""
        self._turn += 1
        hits = possible_hits = 0
        for user in range(USERS):
            previous = self._newest.get(user)
            fields: dict[str, Any] = {} if previous is None else {"previous_response_id": previous.id}
            if self._is_placed_by_chance:
                fields["prompt_cache_key"] = f"{self._name} {user} {self._turn}"
            beginning = f"Harbour {self._name} number {user} has its own rules. " * 40
            said = f"User {user} asks in turn {self._turn}: where is the ship {user}-{self._turn} bound? " * 6
            response = await create(self._served, said, instructions=beginning, max_output_tokens=16, **fields)
            if previous is not None:
                possible_hits += previous.usage.input_tokens // BLOCK_TOKENS * BLOCK_TOKENS
                hits += response.usage.input_tokens_details.cached_tokens
            self._newest[user] = response
        return hits, possible_hits

    async def share_of_hits(self, turns: int) -> float:
        taken = [await self.take_turn() for _ in range(turns)]
        hits, possible_hits = (sum(numbers) for numbers in zip(*taken, strict=True))
        sys.stderr.write(f"\n{self._name}: {hits} of {possible_hits} possible hits\n")
        return hits / possible_hits


async def test_chains_find_their_prefixes_by_affinity_and_by_chance_often_not(replicas: list[VLLMServer]) -> None:
    async with serving(inference(replicas)) as served:
        assert await Chains(served, "by affinity").share_of_hits(TURNS) >= SHARE_OF_POSSIBLE_HITS
        by_chance = await Chains(served, "by chance", is_placed_by_chance=True).share_of_hits(TURNS)
        assert by_chance < 0.85


async def test_hits_recover_after_a_replica_died_and_returned_and_nothing_fails(replicas: list[VLLMServer]) -> None:
    async with serving(inference(replicas)) as served:
        chains = Chains(served, "with a death")
        assert await chains.share_of_hits(2) >= SHARE_OF_POSSIBLE_HITS
        await asyncio.to_thread(replicas[0].kill)
        await chains.take_turn()  # half of the chains move, and compute their prompts again
        assert await chains.share_of_hits(1) >= SHARE_OF_POSSIBLE_HITS
        await asyncio.to_thread(replicas[0].start)
        await asyncio.sleep(2)  # some checks of its health
        await chains.take_turn()  # those chains are back where nothing is cached
        assert await chains.share_of_hits(1) >= SHARE_OF_POSSIBLE_HITS
