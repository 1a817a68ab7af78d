"""Usage by project, key, model and hour, as the SDK's `usage.completions` reads it."""

import time
from typing import Any

import pytest
from openai import BadRequestError
from openai.types.admin.organization import UsageCompletionsResponse

from apis.accounts.usage import HOUR_S, UsageCounts, UsageSubject
from apis.errors import StoreUnavailable
from providers.accounts.usage_log import StoredUsageLog
from providers.kv_store.memory import Memory
from tests.support.sdk.client import sdk_client
from tests.support.sdk.websockets import talking
from tests.support.tenants.accounts import serving_accounts


async def test_usage_is_what_the_answers_say_on_every_way_to_a_model() -> None:
    async with serving_accounts() as served:
        organization: Any = served.client.with_options(admin_api_key="sk-root").admin.organization
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
        (result,) = [result for bucket in page.data for result in bucket.results]
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
        organization: Any = served.client.with_options(admin_api_key="sk-root").admin.organization
        starts: list[int] = []
        page = await organization.usage.completions(start_time=0, end_time=5 * 86_400, limit=2)
        while True:
            starts += [bucket.start_time for bucket in page.data]
            if not page.has_more:
                break
            page = await organization.usage.completions(start_time=0, end_time=5 * 86_400, limit=2, page=page.next_page)
        assert starts == [day * 86_400 for day in range(5)]


async def test_sums_of_several_processes_add_up_and_wait_for_a_store_that_is_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Memory(Memory.Config())
    logs = [StoredUsageLog(store, 1), StoredUsageLog(store, 1)]
    subject = UsageSubject("p", "key/1", "org/model")
    write = store.write

    async def fail(*_: object, **__: object) -> None:
        raise StoreUnavailable("The store is down.")

    monkeypatch.setattr(store, "write", fail)
    logs[0].add(subject, UsageCounts(1, 10, 2, 5, 1, {"web_search_call": 2}))
    await logs[0].flush()
    monkeypatch.setattr(store, "write", write)
    for log in logs:
        log.add(subject, UsageCounts(1, 1, 0, 1, 0, {"web_search_call": 1}))
        await log.close()
    restarted = StoredUsageLog(store, 1)
    restarted.add(subject, UsageCounts(requests=1))
    hour = int(time.time()) // HOUR_S * HOUR_S
    entries = await restarted.read(hour - HOUR_S, hour + HOUR_S)
    total = UsageCounts()
    for entry in entries:
        assert entry.subject == subject
        total = total.plus(entry.counts)
    assert total == UsageCounts(4, 12, 2, 7, 1, {"web_search_call": 4})
    assert await restarted.read(hour + HOUR_S, hour + 2 * HOUR_S) == []
    await restarted.close()
