"""Usage against what the inference server generated.

Run `python -m pytest -m long -s tests/conformance/test_usage_totals.py`. STACK_USAGE_REQUESTS says how many
requests are sent to each store (6,000 by default).
"""

import asyncio
import itertools
import os
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.sdk.client import sdk_client
from tests.support.servers.upstream_process import running_upstream
from tests.support.servers.worker_processes import worker_processes
from tests.support.tenants.accounts import CHAINED, ROOT, new_project, organization_of, sum_usage

REQUESTS = int(os.environ.get("STACK_USAGE_REQUESTS", "6000"))
AT_ONCE = 32
PROJECTS = 3
LIMITS = {
    "max_requests_per_1_minute": 1_000_000_000,
    "max_tokens_per_1_month": 900_000_000,
    "max_concurrent_responses": 1000,
}
SEED = 7
pytestmark = [pytest.mark.long, pytest.mark.timeout(300 + REQUESTS // 10)]


def build_sections(port: int) -> Mapping[str, Any]:
    return {
        **CHAINED,
        "server": {"log_level": "warning", "api_keys": [ROOT]},
        "inference": {"provider": "vllm", "base_url": f"http://127.0.0.1:{port}/v1"},
    }


async def send_requests(url: str, keys: list[str]) -> None:
    """Send every request once, `AT_ONCE` at a time: stored and not, streamed and not, of 0 to 40 tokens."""
    numbers = itertools.count()
    dice = random.Random(SEED)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def send() -> None:
            while (number := next(numbers)) < REQUESTS:
                tokens = dice.randrange(41)
                body = {
                    "model": "fake-model",
                    "input": f"n={tokens} d=0",
                    "store": dice.random() < 0.5,
                    "stream": dice.random() < 0.5,
                }
                headers = {"authorization": f"Bearer {keys[number % len(keys)]}"}
                async with http.post(f"{url}/v1/responses", json=body, headers=headers) as answer:
                    content = await answer.read()
                    assert answer.status == 200, content
                    assert b'"status":"completed"' in content, content

        await asyncio.gather(*(send() for _ in range(AT_ONCE)))


async def read_usage(organization: Any) -> dict[str, int]:
    page = await organization.usage.completions(start_time=int(time.time()) - 86_400, bucket_width="1d")
    requests, input_tokens, output_tokens = sum_usage(page)
    return {"answers": requests, "input_tokens": input_tokens, "output_tokens": output_tokens}


async def test_usage_equals_what_the_inference_server_generated(
    shared_store: dict[str, Any], tmp_path: Path, unused_tcp_port: int
) -> None:
    port = unused_tcp_port
    async with (
        running_upstream(port),
        worker_processes(tmp_path, shared_store, workers=4, more=build_sections(port)) as workers,
        sdk_client(workers.url, "sk-root", max_retries=2) as root,
    ):
        organization = organization_of(root)
        keys = [(await new_project(organization, LIMITS))[1] for _ in range(PROJECTS)]
        await asyncio.sleep(1.5)
        began_at = time.monotonic()
        await send_requests(workers.url, keys)
        duration_s = time.monotonic() - began_at
        async with asyncio.timeout(120):  # each worker stores its counts when it can
            while (await read_usage(organization))["answers"] < REQUESTS:  # noqa: ASYNC110 - another process sets no event
                await asyncio.sleep(1)
        await asyncio.sleep(5)  # what is counted twice would follow
        usage = await read_usage(organization)
        async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{port}/counts") as answer:
            generated = await answer.json()
    print(
        f"\n{shared_store['provider']}: {usage} counted, {generated} generated, {REQUESTS / duration_s:.0f} requests/s"
    )
    assert usage == generated
    assert usage["answers"] == REQUESTS
