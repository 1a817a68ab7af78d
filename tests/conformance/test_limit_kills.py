"""Limits and usage while workers are killed: `python -m pytest -m long tests/conformance/test_limit_kills.py`.

STACK_KILL_TRIALS says how many workers are killed (12 by default), STACK_KILL_SEED what is drawn; the seed is printed.
The short form is tests/spec/accounts/test_charges.py.
"""

import asyncio
import os
import random
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, OpenAIError, RateLimitError

from providers.accounts.ledger.stored_ledger import HEARTBEAT_TTL_S
from tests.support.sdk.client import sdk_client
from tests.support.servers.worker_processes import Workers, worker_processes
from tests.support.tenants.accounts import CHAINED, ROOT, new_project, organization_of, sum_usage

SEED = int(os.environ.get("STACK_KILL_SEED", "0")) or random.SystemRandom().getrandbits(32)
LIMIT_TOKENS = 8000
CLIENTS = 6
KILLS = int(os.environ.get("STACK_KILL_TRIALS", "12"))
MORE: dict[str, Any] = {
    **CHAINED,
    "inference": {"provider": "scripted", "turns": [[{"wait_s": 0.02}, {"text": ["word "] * 9}]]},
    "server": {"log_level": "warning", "api_keys": [ROOT]},
    "responses": {"provider": "loop", "background": {"lease_s": 1.5, "poll_s": 0.1, "max_tenant_running": 64}},
}
pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


async def retry(call: Any) -> Any:
    """Return the result of a call, repeated while a worker that dies takes it along."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await call()
            except (OpenAIError, httpx.TransportError):
                await asyncio.sleep(0.1)


class Spender:
    """Clients that spend the budget of one key, by stored responses."""

    def __init__(self, client: AsyncOpenAI, dice: random.Random) -> None:
        self._client = client
        self._dice = dice
        self.background_ids: list[str] = []
        self.refusals = 0

    async def spend(self, stopped: asyncio.Event) -> None:
        while not stopped.is_set():
            words = "w " * self._dice.randrange(1, 12)
            background = self._dice.random() < 0.5
            try:
                response = await self._client.responses.create(
                    model="scripted", input=words, max_output_tokens=16, background=background
                )
                if background:
                    self.background_ids.append(response.id)
            except RateLimitError:
                self.refusals += 1
                await asyncio.sleep(0.2)
            except OpenAIError:
                await asyncio.sleep(0.05)


async def kill_workers(workers: Workers, dice: random.Random) -> int:
    killed = 0
    while killed < KILLS:
        await asyncio.sleep(dice.uniform(0.3, 1.2))
        processes = workers.processes()
        if len(processes) > 1:
            dice.choice(processes).kill()
            killed += 1
    return killed


async def wait_for_end(client: AsyncOpenAI, response_id: str) -> None:
    """Wait until a background response has ended."""
    async with asyncio.timeout(60):
        while (await retry(lambda: client.responses.retrieve(response_id))).status in ("queued", "in_progress"):  # noqa: ASYNC110 - a server sets no event
            await asyncio.sleep(0.1)


async def sum_stored(client: AsyncOpenAI) -> tuple[int, int]:
    """Return the number of stored responses, and the tokens that they say they have used."""
    count = tokens = 0
    after: str | None = None
    while True:
        query: dict[str, object] = {"limit": 100, **({"after": after} if after else {})}
        page: Any = await retry(partial(client.get, "/responses", cast_to=object, options={"params": query}))
        for row in page["data"]:
            response = await retry(lambda row=row: client.responses.retrieve(row["id"]))
            assert response.status in ("completed", "failed"), response.status
            assert response.usage is not None
            count, tokens = count + 1, tokens + response.usage.total_tokens
        if not page["has_more"]:
            return count, tokens
        after = page["last_id"]


async def test_a_budget_is_neither_passed_nor_wasted_and_usage_is_exact(
    shared_store: dict[str, Any], tmp_path: Path
) -> None:
    dice = random.Random(SEED)
    async with worker_processes(tmp_path, shared_store, workers=4, more=MORE) as workers:
        root = sdk_client(workers.url, "sk-root")
        organization = organization_of(root)
        project_id, key = await new_project(organization, {"max_tokens_per_1_month": LIMIT_TOKENS})
        client = sdk_client(workers.url, key, timeout_s=20)
        await asyncio.sleep(1.5)
        spender, stopped = Spender(client, dice), asyncio.Event()
        spending = [asyncio.create_task(spender.spend(stopped)) for _ in range(CLIENTS)]
        killed = await kill_workers(workers, dice)
        await asyncio.sleep(HEARTBEAT_TTL_S + 5)
        stopped.set()
        await asyncio.gather(*spending)
        for response_id in spender.background_ids:
            await wait_for_end(client, response_id)
        # with all settled, the rest of the budget is spent by requests that come one by one
        with suppress(RateLimitError):
            while True:
                try:
                    await client.responses.create(model="scripted", input="w", max_output_tokens=16)
                except RateLimitError:
                    raise
                except OpenAIError:
                    await asyncio.sleep(0.05)
        count, stored_tokens = await sum_stored(client)
        page = await retry(
            lambda: organization.usage.completions(
                start_time=int(time.time()) - 86_400, project_ids=[project_id], bucket_width="1d"
            )
        )
        requests, input_tokens, output_tokens = sum_usage(page)
        counted = input_tokens + output_tokens
        print(
            f"\nseed {SEED}: {killed} workers killed, {count} responses used {stored_tokens} of {LIMIT_TOKENS} tokens, "
            f"{requests} counted with {counted}"
        )
        assert (requests, counted) == (count, stored_tokens)
        assert stored_tokens <= LIMIT_TOKENS
        assert stored_tokens >= 0.99 * LIMIT_TOKENS
        await client.close()
        await root.close()
