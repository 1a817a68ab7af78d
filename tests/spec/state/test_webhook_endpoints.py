"""Webhook endpoints through the SDK's `client.webhooks`: their life, their secrets, and the events that they get."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, InvalidWebhookSignatureError, NotFoundError
from openai.types.webhooks import WebhookEndpoint, WebhookEndpointTestResult, WebhookEndpointWithSecret
from openai.types.webhooks.unwrap_webhook_event import UnwrapWebhookEvent
from openai.types.webhooks.webhook_event_type_list import WebhookEventTypeList
from pydantic import TypeAdapter

from apis.storage.kv_store import Put
from apis.webhooks import WEBHOOK_EVENTS
from providers.webhooks.endpoints import WebhookEndpointOptions
from tests.spec.state.test_webhooks import nothing_left
from tests.support.sdk.batch_files import batch_line, create_batch
from tests.support.sdk.client import sdk_client
from tests.support.sdk.requests import create
from tests.support.servers.serving import Served, scripted, serving
from tests.support.servers.webhook_receiver import Receiver, receiving

KEYS = [{"key": f"key-of-{name}", "tenant": name} for name in ("a", "b")]
PRIVATE = {"private": True, "retry_s": 0.05, "timeout_s": 5}
ENDED = ["response.completed"]


@asynccontextmanager
async def served_with_receiver(**more: Any) -> AsyncGenerator[tuple[Served, Receiver]]:
    options = {"responses": {"background": {"poll_s": 0.05, "lease_s": 1}}, "webhooks": {"endpoints": PRIVATE}}
    async with receiving() as receiver, serving(server={"api_keys": KEYS}, **options, **more) as served:
        yield served, receiver


def endpoints(client: AsyncOpenAI) -> Any:
    return client.webhooks


async def test_an_endpoint_is_created_listed_changed_and_deleted() -> None:
    async with served_with_receiver() as (served, _):
        own, url = endpoints(served.client), "https://example.com/hook"
        first = await own.create(name="one", url=url, event_types=[*ENDED, *ENDED])
        WebhookEndpointWithSecret.model_validate(first.to_dict(), strict=True)
        assert first.event_types == ENDED
        assert first.signing_secret.startswith("whsec_")
        assert first.signing_secret_hint == f"whsec_...{first.signing_secret[-4:]}"
        others = [await own.create(name=f"n{number}", url=url, event_types=ENDED) for number in range(3)]
        newest_first = [others[2].id, others[1].id, others[0].id, first.id]
        assert [each.id async for each in own.list(limit=2)] == newest_first
        read = await own.retrieve(first.id)
        WebhookEndpoint.model_validate(read.to_dict(), strict=True)
        assert first.signing_secret not in read.to_json()
        renamed = await own.update(first.id, name="two", event_types=["batch.completed"])
        assert (renamed.name, renamed.event_types, renamed.url) == ("two", ["batch.completed"], url)
        same = await own.update(first.id, name="two")
        assert same.updated_at == renamed.updated_at
        types = await own.event_types.list()
        WebhookEventTypeList.model_validate(types.to_dict(), strict=True)
        assert {"response.completed", "batch.expired"} <= set(types.data)
        deletion = await own.delete(first.id)
        assert (deletion.deleted, deletion.object) == (True, "webhook_endpoint.deleted")
        async with sdk_client(served.url, "key-of-b") as stranger:
            assert [each async for each in endpoints(stranger).list()] == []
            for refused in (
                endpoints(stranger).retrieve(others[0].id),
                endpoints(stranger).update(others[0].id, name="mine"),
                endpoints(stranger).delete(others[0].id),
                endpoints(stranger).rotate_secret(others[0].id),
                endpoints(stranger).test(others[0].id, event_type="batch.failed"),
                own.retrieve(first.id),
            ):
                with pytest.raises(NotFoundError):
                    await refused
        assert len([each async for each in own.list()]) == 3


async def test_bad_endpoints_are_refused_by_the_name_of_the_field() -> None:
    async with serving(webhooks={"endpoints": {"max_per_tenant": 1}}) as served:
        own = endpoints(served.client)
        good: dict[str, Any] = {"name": "n", "url": "https://example.com/x", "event_types": ENDED}
        for field, value in (
            ("url", "http://example.com/x"),
            ("url", "ftp://example.com"),
            ("url", "https://example.com/a b"),
            ("url", "https://"),
            ("url", "https:///path"),
            ("url", "https://example.com:99999/"),
            ("url", "https://[::1/"),
            ("name", ""),
            ("event_types", []),
            ("event_types", ["video.completed"]),
        ):
            with pytest.raises(BadRequestError) as refusal:
                await own.create(**{**good, field: value})
            assert refusal.value.param == field
        with pytest.raises(BadRequestError) as refusal:
            await own.create(**{**good, "event_types": [*ENDED, "safety.alert.created"]})
        assert refusal.value.param == "event_types[1]"
        await own.create(**good)
        with pytest.raises(BadRequestError, match="at most 1"):
            await own.create(**good)
    async with serving(webhooks={"endpoints": {"max_per_tenant": 0}}) as served:
        with pytest.raises(BadRequestError, match=r"webhooks\.endpoints"):
            await endpoints(served.client).list()


async def test_an_endpoint_that_cannot_be_read_stops_nothing_that_ends_with_an_event() -> None:
    """A damaged endpoint of a tenant gets no events; its responses still end, and the others get theirs."""
    async with serving(scripted([{"wait_s": 600}])) as served:
        own = endpoints(served.client)
        endpoint = await own.create(name="n", url="https://example.com/x", event_types=ENDED)
        kv = served.stack.kv_store
        [(key, entry)] = await kv.scan("default/webhook_endpoint/", limit=2)
        await kv.write([Put(key, entry.value.replace(b"https://example.com/x", b"nonsense"))])
        response = await served.client.responses.create(model="scripted", input="hi", background=True)
        cancelled = await served.client.responses.cancel(response.id)
        assert cancelled.status == "cancelled"
        await own.delete(endpoint.id)


async def test_events_reach_the_endpoints_of_their_tenant_that_want_them() -> None:
    async with served_with_receiver() as (served, receiver), receiving() as other:
        own = endpoints(served.client)
        hook = await own.create(name="mine", url=receiver.url, event_types=ENDED)
        await own.create(name="deaf", url=other.url, event_types=["response.cancelled"])
        async with sdk_client(served.url, "key-of-b") as stranger:
            await endpoints(stranger).create(name="theirs", url=other.url, event_types=ENDED)
            queued = await create(served, background=True)
            await receiver.arrival(1)
            event = receiver.unwrap(*receiver.requests[0], hook.signing_secret)
            assert (event.type, event.data.id) == ("response.completed", queued.id)
            await nothing_left(served)
            assert other.requests == []
        await own.delete(hook.id)
        await create(served, background=True)
        assert len(receiver.requests) == 1


async def test_the_end_of_a_batch_reaches_the_endpoints() -> None:
    more = {"files": {"provider": "kv"}, "batches": {"provider": "leased", "poll_s": 0.05}}
    async with served_with_receiver(more=more) as (served, receiver):
        hook = await endpoints(served.client).create(
            name="batches", url=receiver.url, event_types=["batch.completed", "batch.failed"]
        )
        completed = await create_batch(served.client, [batch_line("one")])
        await receiver.arrival(1)
        failed = await create_batch(served.client, ["no JSON"])
        await receiver.arrival(2)
        events = [receiver.unwrap(*each, hook.signing_secret) for each in receiver.requests]
        assert [(event.type, event.data.id) for event in events] == [
            ("batch.completed", completed.id),
            ("batch.failed", failed.id),
        ]


async def test_a_new_url_and_secret_hold_for_an_event_that_waits() -> None:
    async with served_with_receiver() as (served, receiver), receiving() as other:
        other.answer = lambda: 500
        own = endpoints(served.client)
        hook = await own.create(name="mine", url=other.url, event_types=ENDED)
        await create(served, background=True)
        await other.arrival(2)
        await own.update(hook.id, url=receiver.url)
        rotated = await own.rotate_secret(hook.id)
        await receiver.arrival(1)
        receiver.unwrap(*receiver.requests[-1], rotated.signing_secret)


async def test_a_rotated_secret_signs_with_the_old_one_for_a_day_where_that_is_requested() -> None:
    async with served_with_receiver() as (served, receiver):
        own = endpoints(served.client)
        hook = await own.create(name="mine", url=receiver.url, event_types=ENDED)
        secrets = [hook.signing_secret]
        for keep in (True, False):
            rotated = await own.rotate_secret(hook.id, keep_old_secret_active_for_24_hours=keep)
            WebhookEndpointWithSecret.model_validate(rotated.to_dict(), strict=True)
            secrets.append(rotated.signing_secret)
            await own.test(hook.id, event_type="batch.completed")
        assert len(set(secrets)) == 3
        both, newest = receiver.requests
        for secret in secrets[:2]:
            receiver.unwrap(*both, secret)
        assert len(both[0]["webhook-signature"].split()) == 2
        receiver.unwrap(*newest, secrets[2])
        with pytest.raises(InvalidWebhookSignatureError):
            receiver.unwrap(*newest, secrets[1])


async def test_a_test_event_reports_the_answer_of_the_endpoint() -> None:
    async with served_with_receiver() as (served, receiver):
        own = endpoints(served.client)
        hook = await own.create(name="mine", url=receiver.url, event_types=ENDED)
        for status in (200, 418):
            receiver.answer = lambda status=status: status
            result = await own.test(hook.id, event_type="batch.completed")
            WebhookEndpointTestResult.model_validate(result.to_dict(), strict=True)
            assert (result.status_code, result.event_type) == (status, "batch.completed")
        event = receiver.unwrap(*receiver.requests[0], hook.signing_secret)
        assert (event.type, event.object) == ("batch.completed", "event")
        gone = await own.create(name="gone", url="http://127.0.0.1:1/x", event_types=ENDED)
        with pytest.raises(BadRequestError) as refusal:
            await own.test(gone.id, event_type="batch.completed")
        assert refusal.value.code == "no_answer"
        with pytest.raises(BadRequestError) as refusal:
            await own.test(hook.id, event_type="video.completed")
        assert refusal.value.param == "event_type"


@pytest.mark.parametrize("event_type", WEBHOOK_EVENTS)
async def test_a_test_event_of_every_type_is_one_that_the_sdk_reads(event_type: str) -> None:
    async with served_with_receiver() as (served, receiver):
        hook = await endpoints(served.client).create(name="mine", url=receiver.url, event_types=[event_type])
        result = await endpoints(served.client).test(hook.id, event_type=event_type)
        assert (result.status_code, result.event_type) == (200, event_type)
    [(headers, body)] = receiver.requests
    assert receiver.unwrap(headers, body, hook.signing_secret).type == event_type
    read: Any = TypeAdapter(UnwrapWebhookEvent).validate_json(body)
    assert read.type == event_type


async def test_without_private_an_endpoint_in_the_network_of_the_server_is_never_connected_to() -> None:
    async with receiving() as receiver, serving() as served:
        own = endpoints(served.client)
        for host in ("127.0.0.1", "169.254.169.254", "localhost"):
            port = receiver.url.split(":")[2].split("/")[0]
            hook = await own.create(name="in", url=f"https://{host}:{port}/x", event_types=ENDED)
            with pytest.raises(BadRequestError) as refusal:
                await own.test(hook.id, event_type="batch.completed")
            assert refusal.value.code == "no_answer"
        assert receiver.requests == []
        assert not WebhookEndpointOptions().private
