"""Usage by project, key, model and hour, as the SDK's `usage.completions` reads it."""

import asyncio
import time
from contextlib import suppress
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, RateLimitError
from openai.types.admin.organization import UsageCompletionsResponse

from apis.storage.records import decode_record
from providers.accounts.ledger.counters import UseCounter
from tests.support.sdk.client import sdk_client
from tests.support.sdk.websockets import talking
from tests.support.servers.serving import scripted, serving
from tests.support.tenants.accounts import CHAINED, ROOT, new_project, organization_of, serving_accounts, usage_results
from tests.support.waiting import until_ended


async def test_usage_is_what_the_answers_say_on_every_way_to_a_model() -> None:
    async with serving_accounts() as served:
        organization = organization_of(served.client)
        project = await organization.projects.create(name="p")
        account = await organization.projects.service_accounts.create(project.id, name="app")
        since = int(time.time()) // 86_400 * 86_400
        said: Any = [{"role": "user", "content": "hi"}]
        async with sdk_client(served.url, account.api_key.value) as client:
            one = (await client.responses.create(model="scripted", input="one")).usage
            chat = (await client.chat.completions.create(model="scripted", messages=said)).usage
            async with talking(served, client) as talk:
                two = (await talk.ask()).usage
            async with await client.responses.create(model="scripted", input="three", stream=True) as events:
                last: Any = [event async for event in events][-1]
        assert one is not None
        assert chat is not None
        outputs = (one.output_tokens, chat.completion_tokens, two.output_tokens, last.response.usage.output_tokens)
        inputs = (one.input_tokens, chat.prompt_tokens, two.input_tokens, last.response.usage.input_tokens)
        await served.client.responses.create(model="scripted", input="of the operator")
        page = await organization.usage.completions(start_time=since, project_ids=[project.id])
        UsageCompletionsResponse.model_validate(page.to_dict())
        (result,) = usage_results(page)
        assert (result.num_model_requests, result.input_tokens, result.output_tokens) == (4, sum(inputs), sum(outputs))
        grouped = await organization.usage.completions(
            start_time=since, bucket_width="1h", limit=168, group_by=["project_id", "api_key_id", "model"]
        )
        groups = {
            (result.project_id, result.api_key_id, result.model): result.num_model_requests
            for bucket in grouped.data
            for result in bucket.results
        }
        assert groups == {
            (project.id, account.api_key.id, "scripted"): 4,
            ("operator", "key_config_0", "scripted"): 1,
        }
        with pytest.raises(BadRequestError) as refusal:
            await organization.usage.completions(start_time=since, bucket_width="1m")
        assert refusal.value.param == "bucket_width"


async def test_pages_of_buckets_follow_each_other() -> None:
    async with serving_accounts() as served:
        organization = organization_of(served.client)
        starts: list[int] = []
        page = await organization.usage.completions(start_time=0, end_time=5 * 86_400, limit=2)
        while True:
            starts += [bucket.start_time for bucket in page.data]
            if not page.has_more:
                break
            page = await organization.usage.completions(start_time=0, end_time=5 * 86_400, limit=2, page=page.next_page)
        assert starts == [day * 86_400 for day in range(5)]


async def test_background_responses_are_counted_by_what_they_used_when_they_end() -> None:
    async with serving(more=CHAINED, server={"api_keys": [ROOT]}) as served:
        organization = organization_of(served.client)
        limits = {"max_tokens_per_1_month": 100_000, "max_background_responses": 2}
        project_id, key = await new_project(organization, limits)
        total = 0
        async with sdk_client(served.url, key) as client:
            for text in ("one", "two"):
                response = await client.responses.create(model="scripted", input=text, background=True)
                response = await until_ended(client.responses, response.id)
                assert response.usage is not None
                total += response.usage.total_tokens
        page = await organization.usage.completions(start_time=int(time.time()) - 86_400, project_ids=[project_id])
        (result,) = usage_results(page)
        assert (result.num_model_requests, result.input_tokens + result.output_tokens) == (2, total)
        (entry,) = [entry for _, entry in await served.stack.kv_store.scan(f"/accounts/counters/{project_id}/")]
        counter = decode_record(entry, UseCounter)
        assert (counter.month_tokens, counter.background_responses) == (total, 0)


async def test_steered_responses_and_those_that_follow_are_counted_one_by_one() -> None:
    model = scripted(*([{"text": "a"}, {"wait_s": 0.6}], [{"text": "b"}]) * 3)
    async with serving(model, more=CHAINED, server={"api_keys": [ROOT]}) as served:
        organization = organization_of(served.client)
        limits = {"max_tokens_per_1_month": 100_000, "max_background_responses": 3}
        project_id, key = await new_project(organization, limits)
        total = 0
        kinds: tuple[dict[str, Any], ...] = ({"background": True}, {"stream": True}, {})
        async with sdk_client(served.url, key) as client, talking(served, client) as talk:
            for fields in kinds:
                if fields:
                    first_id, _connection = await begin(client, **fields)
                else:
                    await talk.send()
                    first_id = (await talk.until("response.created")).response.id
                await talk.connection.response.steer(previous_response_id=first_id, input="more")
                successor_id = f"resp_{(await talk.until('response.steer.accepted')).steer.id[6:50]}"
                for response_id in (first_id, successor_id):
                    total += (await ended_of(client, response_id)).usage.total_tokens
        page = await organization.usage.completions(start_time=int(time.time()) - 86_400, project_ids=[project_id])
        (result,) = usage_results(page)
        assert (result.num_model_requests, result.input_tokens + result.output_tokens) == (6, total)
        (entry,) = [entry for _, entry in await served.stack.kv_store.scan(f"/accounts/counters/{project_id}/")]
        counter = decode_record(entry, UseCounter)
        assert (counter.month_tokens, counter.background_responses) == (total, 0)


async def test_a_limit_refuses_the_response_that_was_to_follow() -> None:
    """On a WebSocket its input comes back; in the background it fails."""
    model = scripted([{"text": "a"}, {"wait_s": 0.6}])
    async with serving(model, more=CHAINED, server={"api_keys": [ROOT]}) as served:
        organization = organization_of(served.client)
        for fields in ({"background": True}, {}):
            _, key = await new_project(organization, {"max_requests_per_1_day": 1})
            async with sdk_client(served.url, key) as client, talking(served, client) as talk:
                if fields:
                    first_id, _connection = await begin(client, **fields)
                else:
                    await talk.send()
                    first_id = (await talk.until("response.created")).response.id
                await talk.connection.response.steer(previous_response_id=first_id, input="more")
                accepted = await talk.until("response.steer.accepted")
                assert (await ended_of(client, first_id)).status == "completed"
                if fields:
                    refused = await ended_of(client, f"resp_{accepted.steer.id[6:50]}")
                    assert (refused.status, refused.error.code) == ("failed", "rate_limit_exceeded")
                    (item,) = (await client.responses.input_items.list(refused.id)).data
                    assert item.to_dict()["content"] == [{"type": "input_text", "text": "more"}]
                else:
                    failed = await talk.until("response.steer.failed")
                    assert (failed.error.code, failed.steer.id) == ("successor_creation_failed", accepted.steer.id)
                    assert failed.steer.input == "more"
                    numbers = [event.sequence_number for event in talk.events]
                    assert numbers == [*range(len(numbers))]
        assert not [key for key, _ in await served.stack.kv_store.scan("") if "/mailbox/" in key]


async def begin(client: Any, **fields: Any) -> tuple[str, Any]:
    """Return the id of a response, as soon as there is one, and the connection that it may need."""
    created = await client.responses.create(model="scripted", input="hi", **fields)
    return (created.id if fields.get("background") else (await anext(aiter(created))).response.id), created


async def ended_of(client: Any, response_id: str) -> Any:
    """Return a response at its end, once there is one."""
    async with asyncio.timeout(10):
        while True:
            with suppress(NotFoundError):
                response = await client.responses.retrieve(response_id)
                if response.status not in ("queued", "in_progress"):
                    return response
            await asyncio.sleep(0.02)


async def test_a_background_response_that_is_cancelled_while_it_waits_uses_nothing() -> None:
    background = {"max_running": 1, "max_tenant_running": 1}
    slow = scripted([{"wait_s": 30}, {"text": "late"}])
    async with serving(slow, more=CHAINED, server={"api_keys": [ROOT]}, responses={"background": background}) as served:
        organization = organization_of(served.client)
        project_id, key = await new_project(organization, {"max_background_responses": 2})
        async with sdk_client(served.url, key) as client:
            first = await client.responses.create(model="scripted", input="hi " * 50, background=True)
            waiting = await client.responses.create(model="scripted", input="hi", background=True)
            with pytest.raises(RateLimitError, match="max_background_responses"):
                await client.responses.create(model="scripted", input="hi", background=True)
            await client.responses.cancel(waiting.id)
            # after a refusal the limits are looked at again a moment later
            patient = client.with_options(max_retries=5)
            again = await patient.responses.create(model="scripted", input="hi", background=True)
            await client.responses.cancel(again.id)
            await organization.usage.completions(start_time=1, end_time=int(time.time()))
            (entry,) = [entry for _, entry in await served.stack.kv_store.scan(f"/accounts/counters/{project_id}/")]
            reserved = decode_record(entry, UseCounter)
            assert reserved.background_responses == 1
            assert 1024 < reserved.month_tokens < 1200  # the one that runs
            await client.responses.cancel(first.id)
