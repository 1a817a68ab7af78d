"""Webhooks: a receiver gets the end of each background response, as an event that the SDK's `unwrap` accepts."""

import asyncio
import logging
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
from openai import InvalidWebhookSignatureError

from apis.errors import ConfigError
from apis.storage.kv_store import KVStore, Put
from stack.config import StackConfig
from stack.wiring import wire_providers, wiring_lines
from tests.support.sdk.client import sdk_client
from tests.support.sdk.requests import create, responses
from tests.support.servers.serving import MEMORY, SCRIPTED, Served, scripted, serving
from tests.support.servers.webhook_receiver import SECRET, receiving
from tests.support.waiting import until, until_empty

SOON = {"poll_s": 0.05, "lease_s": 1}
SLOW = scripted([{"text": "a"}, {"wait_s": 30}])
KEYS = [{"key": f"key-of-{name}", "tenant": name} for name in ("a", "b")]


def webhooks_section(*hooks: dict[str, Any]) -> dict[str, Any]:
    return {"responses": {"background": SOON}, "webhooks": {"receivers": [*hooks]}}


async def begin(served: Served, **fields: Any) -> Any:
    return await create(served, background=True, **fields)


async def test_the_webhook_of_a_completed_response_is_signed() -> None:
    async with receiving() as receiver, serving(**webhooks_section(receiver.hook())) as served:
        queued = await begin(served, input="a b")
        (event,) = await receiver.come(1)
        assert (event.type, event.object, event.data.id) == ("response.completed", "event", queued.id)
        assert (await responses(served).retrieve(event.data.id)).status == "completed"
        headers, body = receiver.requests[0]
        assert headers["webhook-id"].startswith("wh_")
        assert event.id.startswith("evt_")
        with pytest.raises(InvalidWebhookSignatureError):
            receiver.unwrap(headers, body.replace(b"completed", b"cancelled"))
        with pytest.raises(InvalidWebhookSignatureError):
            receiver.unwrap(headers, body, "whsec_" + "A" * 64)


async def test_every_ending_has_its_event() -> None:
    turns = [[{"text": "a"}, {"fail": "it broke"}], [{"text": ["a"] * 30}], [{"text": "a"}, {"wait_s": 30}]]
    async with receiving() as receiver, serving(scripted(*turns), **webhooks_section(receiver.hook())) as served:
        ids = [(await begin(served)).id]
        await receiver.come(1)
        ids.append((await begin(served, max_output_tokens=16)).id)
        await receiver.come(2)
        ids.append((await begin(served)).id)
        await responses(served).cancel(ids[-1])
        events = await receiver.come(3)
    assert [(event.type, event.data.id) for event in events] == [
        ("response.failed", ids[0]),
        ("response.incomplete", ids[1]),
        ("response.cancelled", ids[2]),
    ]


async def test_only_background_responses_and_the_chosen_events_are_delivered() -> None:
    async with (
        receiving() as receiver,
        serving(**webhooks_section(receiver.hook(events=["response.cancelled"]))) as served,
    ):
        await create(served)
        done = await begin(served)
        async with asyncio.timeout(10):
            async for _ in await responses(served).retrieve(done.id, stream=True):
                pass
        assert await served.stack.kv_store.scan("/webhook") == []
        assert receiver.requests == []


async def test_each_tenant_gets_its_own_webhooks() -> None:
    async with receiving() as receiver, receiving() as other:
        hooks = webhooks_section(receiver.hook(tenant="a"), other.hook(tenant="b"))
        async with serving(**hooks, server={"api_keys": KEYS}) as served:
            mine = await begin(served)
            async with sdk_client(served.url, "key-of-b") as client:
                theirs = await client.responses.create(model="scripted", input="hi", background=True)
            assert [event.data.id for event in await receiver.come(1)] == [mine.id]
            assert [event.data.id for event in await other.come(1)] == [theirs.id]


async def test_what_was_not_taken_is_sent_again_under_the_same_id() -> None:
    async with receiving() as receiver:
        statuses = chain([500, 307, 404], repeat(204))
        receiver.answer = lambda: next(statuses)
        async with serving(**webhooks_section(receiver.hook())) as served:
            await begin(served)
            await receiver.come(4)
            await nothing_left(served)
    assert len({headers["webhook-id"] for headers, _ in receiver.requests}) == 1
    assert len({body for _, body in receiver.requests}) == 1


async def test_what_was_taken_is_not_sent_again_where_its_log_is_damaged() -> None:
    async with receiving() as receiver:
        statuses = chain([500], repeat(204))
        receiver.answer = lambda: next(statuses)
        async with serving(**webhooks_section(receiver.hook(retry_s=1))) as served:
            await begin(served)
            await receiver.come(1)
            kv = served.stack.kv_store
            await until(lambda: _is_logged(kv))
            [(key, _)] = await kv.scan("default/webhook_delivery/")
            await kv.write([Put(key, b"no record")])
            await receiver.come(2)
            await nothing_left(served)
    assert len(receiver.requests) == 2


async def _is_logged(kv: KVStore) -> bool:
    return b'"attempt_count":1' in (await kv.scan("default/webhook_delivery/"))[0][1].value


async def nothing_left(served: Served) -> None:
    await until_empty(lambda: served.stack.kv_store.scan("/webhook"))


async def test_what_is_too_old_is_given_up() -> None:
    async with receiving() as receiver:
        receiver.answer = lambda: 500
        async with serving(**webhooks_section(receiver.hook(max_age_s=0.5))) as served:
            await begin(served)
            await receiver.come(1)
            await nothing_left(served)


async def test_a_receiver_that_never_answers_delays_no_other() -> None:
    async with receiving() as stuck, receiving() as receiver:
        stuck.answer = lambda: None
        async with serving(**webhooks_section(stuck.hook(timeout_s=30), receiver.hook())) as served:
            for _ in range(10):
                await begin(served)
            assert len(await receiver.come(10)) == 10
            assert len(stuck.requests) == 4  # the rest waits


async def test_a_private_receiver_is_refused_unless_the_config_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "providers")
    async with receiving() as receiver, serving(**webhooks_section(receiver.hook(private=False))) as served:
        await begin(served)
        await until(lambda: "again in" in caplog.text)
        assert receiver.requests == []
    assert "127.0.0.1" in caplog.text
    assert SECRET not in caplog.text
    assert "of-the-url" not in caplog.text


async def test_what_was_not_sent_is_sent_after_a_restart(tmp_path: Path) -> None:
    store = {"provider": "sqlite", "path": str(tmp_path / "store.db")}
    async with receiving() as receiver:
        receiver.answer = lambda: None
        async with serving(kv_store=store, **webhooks_section(receiver.hook(timeout_s=60))) as served:
            queued = await begin(served)
            await receiver.come(1)
        receiver.answer = lambda: 200
        async with serving(kv_store=store, **webhooks_section(receiver.hook(timeout_s=60))) as served:
            events = await receiver.come(2)
            await nothing_left(served)
    assert {event.data.id for event in events} == {queued.id}
    assert len({headers["webhook-id"] for headers, _ in receiver.requests}) == 1


@pytest.mark.parametrize("secret", ["plain-secret", "whsec_", "whsec_dG9vIHNob3J0", "whsec_!!!!"])
def test_an_invalid_secret_is_refused_and_not_quoted(secret: str) -> None:
    with pytest.raises(ConfigError, match="24 to 64 random bytes") as caught:
        wire_providers(configured({"secret": secret}))
    assert secret.removeprefix("whsec_") == "" or secret not in str(caught.value)


def test_two_receivers_of_a_tenant_with_one_url_are_refused_and_the_url_is_not_quoted() -> None:
    """Their events would wait in one queue, and only the later one would be sent any."""
    with pytest.raises(ConfigError, match=r"receivers.*\[2\] has the tenant and the url of one before it") as caught:
        wire_providers(configured({}, {"tenant": "other"}, {"events": ["response.failed"]}))
    assert "of-the-url" not in str(caught.value)


def test_the_lines_printed_of_the_config_hold_no_secret() -> None:
    printed = "\n".join(wiring_lines(wire_providers(configured({}))))
    assert "receivers=hooks.example" in printed
    assert "of-the-url" not in printed
    assert SECRET not in printed


def configured(*receivers: dict[str, Any]) -> StackConfig:
    """A run config with receivers of one URL."""
    hook = {"url": "https://hooks.example/?token=of-the-url", "secret": SECRET}
    webhooks = {"provider": "kv", "receivers": [{**hook, **fields} for fields in receivers]}
    return StackConfig.model_validate({"inference": SCRIPTED, "kv_store": MEMORY, "webhooks": webhooks})
