"""Webhooks of several tenants: those that do not answer leave deliveries to the others."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from apis.documents.fetcher import Fetcher, FetchRequest, FetchResponse, FetchStream
from apis.fair_share import Tenants
from apis.provider import Provider
from apis.storage.records import decode_record, encode_record
from providers.common.state.worker_signs import WorkerSign
from providers.kv_store.memory import Memory
from providers.webhooks.queue import WebhookDelivery, WebhookQueue
from providers.webhooks.receivers import Webhook
from tests.support.servers.webhook_receiver import SECRET
from tests.support.waiting import until


class Hanging(Fetcher):
    """A network on which no server answers; `opened` are the URLs that were requested."""

    def __init__(self, config: Provider.Config) -> None:
        self.opened: list[str] = []
        self.quiet_came = asyncio.Event()

    async def fetch(self, request: FetchRequest) -> FetchResponse:
        raise NotImplementedError

    @asynccontextmanager
    async def open(self, request: FetchRequest) -> AsyncGenerator[FetchStream]:
        self.opened.append(request.url)
        if "quiet" in request.url:
            self.quiet_came.set()
        await asyncio.Event().wait()
        raise NotImplementedError
        yield


async def test_webhooks_of_one_tenant_that_hang_do_not_delay_anothers() -> None:
    """Each tenant has a share of the deliveries at a time, however many webhooks it has."""
    hooks = [
        Webhook.model_validate({"url": f"https://{tenant}.example/{number}", "secret": SECRET, "tenant": tenant})
        for tenant, count in (("loud", 6), ("quiet", 1))
        for number in range(count)
    ]
    kv, network = Memory(Memory.Config()), Hanging(Provider.Config())
    for hook in hooks:
        for number in range(5):
            await store_delivery(kv, hook, str(number))
    queue = WebhookQueue(kv, hooks, network, WorkerSign(kv, 0.1), Tenants(frozenset({"loud", "quiet"})))
    queue.start()
    try:
        async with asyncio.timeout(5):
            await network.quiet_came.wait()
        assert sum("loud" in url for url in network.opened) <= 8
    finally:
        await queue.close()


async def store_delivery(kv: Memory, hook: Webhook, name: str, **fields: Any) -> str:
    """Store a due delivery, and return its key."""
    delivery = WebhookDelivery(
        id=f"wh_{hook.queue_name}{name}", body="{}", created_at=time.time(), response_id="resp_1", **fields
    )
    key = f"/webhook/{hook.queue_name}/{int(time.time() * 1000) - 1000:015d}/{delivery.id}"
    await kv.put(key, encode_record(delivery))
    return key


async def test_a_delivery_that_has_cost_three_workers_fails() -> None:
    """Attempts are counted in the store before they begin, and one that a worker leaves as it ends is none."""
    hook = Webhook.model_validate({"url": "https://quiet.example", "secret": SECRET})
    kv, network = Memory(Memory.Config()), Hanging(Provider.Config())
    poison = await store_delivery(kv, hook, "1", attempts=3, workers=["first", "second", "ended"])
    other = await store_delivery(kv, hook, "2", attempts=2, workers=["first", "ended"])
    sign = WorkerSign(kv, 0.02)
    queue = WebhookQueue(kv, [hook], network, sign)
    queue.start()
    async with asyncio.timeout(5):
        await network.quiet_came.wait()
        while await kv.get(poison) is not None:  # noqa: ASYNC110 - a store sets no event
            await asyncio.sleep(0.01)
    entry = await kv.get(other)
    assert entry is not None
    sent = decode_record(entry, WebhookDelivery)
    assert (sent.workers, len(network.opened)) == (["first", "ended", sign.name], 1)
    await queue.close()
    entry = await kv.get(other)
    assert entry is not None
    assert decode_record(entry, WebhookDelivery).workers == ["first", "ended"]


@pytest.mark.parametrize("damaged", [b"\xff\xfejunk", b'[{"a":1}]'])
async def test_a_damaged_delivery_stops_no_other_webhook(damaged: bytes) -> None:
    """Those of the same queue and of others are sent."""
    hooks = [
        Webhook.model_validate({"url": f"https://{name}.example", "secret": SECRET, "tenant": name})
        for name in ("loud", "quiet")
    ]
    kv, network = Memory(Memory.Config()), Hanging(Provider.Config())
    for hook in hooks:
        await kv.put(await store_delivery(kv, hook, "1"), damaged)
        await store_delivery(kv, hook, "2")
    queue = WebhookQueue(kv, hooks, network, WorkerSign(kv, 0.1))
    queue.start()
    await until(lambda: len(network.opened) >= 2)
    await queue.close()
