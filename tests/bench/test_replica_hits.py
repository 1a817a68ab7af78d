"""Prints the share of possible prefix hits that chains find over three real llama.cpp servers, by the engines' own
figures: `usage` of their answers. `test_replica_choice.py` simulates engines of a card, and more of them.

Each run is made twice: with the product's choice, and with a random `prompt_cache_key` for each turn, which spreads the
turns of a chain. `pytest -m bench -s`.
"""

import asyncio
import random
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from providers.inference.model_files.packages import PACKAGED_MODELS, models_dir
from tests.bench.test_llama_cpp_tax import running_llama_server
from tests.support.sdk.client import sdk_client
from tests.support.servers.stack_process import running_stack

pytestmark = [pytest.mark.bench, pytest.mark.timeout(600)]
ENGINES: Final = 3
CLIENTS: Final = (1, 4, 16)
TURNS: Final = 4
CHAINS: Final = 1
WORDS: Final = ("whale", "ship", "bread", "salt", "river", "stone", "cloud", "paper", "green", "seven", "walk", "open")


@dataclass
class Hits:
    """Tokens of later turns: those that the engines had cached, and those that the turns before had computed."""

    cached: int = 0
    possible: int = 0
    requests: int = 0


async def take_chain(client: Any, model: str, hits: Hits, *, is_spread: bool) -> None:
    """Let a chain go through its turns. Its first prompt is of its own."""
    dice = random.Random()
    previous, computed = None, 0
    text = " ".join(dice.choices(WORDS, k=80))
    for _ in range(TURNS):
        fields = {"prompt_cache_key": f"key-{dice.random()}"} if is_spread else {}
        response = await client.responses.create(
            model=model, input=text, max_output_tokens=16, previous_response_id=previous, **fields
        )
        hits.requests += 1
        if computed:
            hits.cached += response.usage.input_tokens_details.cached_tokens
            hits.possible += computed
        previous, computed = response.id, response.usage.total_tokens
        text = " ".join(dice.choices(WORDS, k=10))


async def test_hits_of_chains_over_real_engines(tmp_path: Path) -> None:
    path = models_dir() / PACKAGED_MODELS["smollm2-135m-instruct"].filename
    async with AsyncExitStack() as running:
        urls = [(await running.enter_async_context(running_llama_server(path)))[0] for _ in range(ENGINES)]
        config = {
            "server": {"log_level": "warning"},
            "inference": {"provider": "vllm", "base_url": [f"{url}/v1" for url in urls]},
            "kv_store": {"provider": "memory"},
        }
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
        url, _ = await running.enter_async_context(running_stack("run.yaml", cwd=tmp_path))
        client = await running.enter_async_context(sdk_client(url, timeout_s=250))
        model = (await client.models.list()).data[0].id
        shares: dict[bool, list[float]] = {False: [], True: []}
        for count in CLIENTS:
            for is_spread in (False, True):
                hits = Hits()

                async def take_chains(hits: Hits = hits, is_spread: bool = is_spread) -> None:
                    for _ in range(CHAINS):
                        await take_chain(client, model, hits, is_spread=is_spread)

                await asyncio.gather(*(take_chains() for _ in range(count)))
                shares[is_spread].append(hits.cached / hits.possible)
                keys = "a random key for each turn" if is_spread else "the product's choice"
                print(f"{count} clients, {hits.requests} requests, {keys}: {shares[is_spread][-1]:.1%} of the hits")
    assert min(shares[False]) > max(shares[True])
