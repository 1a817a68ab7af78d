"""Batches through the official SDK: every line has one result, in order, and faults are named by their line."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.support.sdk.batch_files import batch_line, create_batch, read_results, upload_lines, wait_for_end
from tests.support.sdk.client import sdk_client
from tests.support.servers.serving import Served, scripted, serving
from tests.support.servers.webhook_receiver import receiving
from tests.support.waiting import until_status

BATCHES: dict[str, Any] = {
    "files": {"provider": "kv"},
    "batches": {"provider": "leased", "poll_s": 0.05, "retry_s": 0.1},
}
KEYS = [{"key": "key-a", "tenant": "a"}, {"key": "key-b", "tenant": "b"}]
SLOW = scripted([{"wait_s": 30}, {"text": "late"}])


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving(scripted([{"text": "hello"}]), more=BATCHES) as served:
        yield served


async def test_every_line_has_one_result_in_the_order_of_the_input(served: Served) -> None:
    client = served.client
    lines = [batch_line(f"line {number}") for number in range(40)]
    lines[7]["body"]["temperature"] = 17
    batch = await create_batch(
        client, lines, metadata={"job": "x"}, output_expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"job": "x"})
    assert batch.expires_at == batch.created_at + 86_400
    batch = await wait_for_end(client, batch)
    assert (batch.status, batch.model, batch.errors) == ("completed", "scripted", None)
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 40, "completed": 39, "failed": 1}
    assert batch.usage is not None
    assert batch.usage.total_tokens == batch.usage.input_tokens + batch.usage.output_tokens > 0
    assert batch.in_progress_at is not None
    assert batch.finalizing_at is not None
    assert batch.completed_at is not None
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    output = await read_results(client, batch.output_file_id)
    assert [line["custom_id"] for line in output] == [f"line {n}" for n in range(40) if n != 7]
    assert len({line["id"] for line in output}) == 39
    for line in output:
        assert line["error"] is None
        assert line["response"]["status_code"] == 200
        stored = await client.responses.retrieve(line["response"]["body"]["id"])
        assert stored.output_text == "hello"
    [error] = await read_results(client, batch.error_file_id)
    assert (error["custom_id"], error["response"]["status_code"]) == ("line 7", 400)
    assert error["response"]["body"]["error"]["param"] == "temperature"
    file = await client.files.retrieve(str(batch.output_file_id))
    assert (file.purpose, file.expires_at) == ("batch_output", file.created_at + 3600)
    for prefix in ("default/batch_", "/batch_"):
        assert await served.stack.kv_store.scan(prefix) == []


async def test_each_endpoint_answers_its_lines_as_its_route_does(served: Served) -> None:
    client = served.client
    chat = batch_line("a", "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}])
    batch = await wait_for_end(client, await create_batch(client, [chat], endpoint="/v1/chat/completions"))
    [line] = await read_results(client, batch.output_file_id)
    assert line["response"]["body"]["choices"][0]["message"]["content"] == "hello"
    for url, body in (("/v1/embeddings", {"input": "x"}), ("/v1/completions", {"prompt": "x"})):
        batch = await wait_for_end(client, await create_batch(client, [batch_line("a", url, **body)], endpoint=url))
        [line] = await read_results(client, batch.error_file_id)
        assert line["response"]["status_code"] == 400, line  # the scripted model has neither
        assert batch.output_file_id is None


async def test_lines_may_use_hosted_tools() -> None:
    turns = [[{"call": "web_search", "arguments": '{"query": "a"}'}], [{"text": "found"}]]
    search = {"provider": "tests.support.servers.stepping_provider:Search", "slow_s": 0}
    async with serving(scripted(*turns), tool_runtime=search, more=BATCHES) as served:
        # one line, because the script is of the whole server
        batch = await create_batch(served.client, [batch_line("a", tools=[{"type": "web_search"}])])
        [line] = await read_results(served.client, (await wait_for_end(served.client, batch)).output_file_id)
        types = [item["type"] for item in line["response"]["body"]["output"]]
        assert types == ["web_search_call", "message"]


FAULTS: dict[str, tuple[dict[str, Any] | str, str, str | None]] = {
    "not JSON": ("{", "invalid_json_line", None),
    "not an object": ("[1]", "invalid_json_line", None),
    "no id": ({**batch_line("x1"), "custom_id": None}, "missing_required_parameter", "custom_id"),
    "an id that is a number": ({**batch_line("x2"), "custom_id": 3}, "invalid_custom_id", "custom_id"),
    "an id twice": (batch_line("first"), "duplicate_custom_id", "custom_id"),
    "another method": ({**batch_line("x3"), "method": "GET"}, "invalid_method", "method"),
    "another endpoint": (batch_line("x4", "/v1/embeddings"), "invalid_url", "url"),
    "no body": ({"custom_id": "x", "method": "POST", "url": "/v1/responses"}, "missing_required_parameter", "body"),
    "a body that is a list": ({**batch_line("x5"), "body": []}, "invalid_request", "body"),
    "no model": ({**batch_line("x6"), "body": {"input": "x"}}, "missing_required_parameter", "body.model"),
    "an unknown model": (batch_line("x7", model="gpt-unknown"), "model_not_found", "body.model"),
    "a stream": (batch_line("x8", stream=True), "unsupported_parameter", "body.stream"),
    "a background response": (batch_line("x9", background=True), "unsupported_parameter", "body.background"),
}


async def test_every_fault_of_a_file_is_named_with_its_line(served: Served) -> None:
    lines = [batch_line("first"), "", *(line for line, _, _ in FAULTS.values()), batch_line("last")]
    batch = await wait_for_end(served.client, await create_batch(served.client, lines))
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    assert batch.failed_at is not None
    assert batch.errors is not None
    assert batch.errors.data is not None
    reported = [(error.line, error.code, error.param) for error in batch.errors.data]
    assert reported == [(3 + n, code, param) for n, (_, code, param) in enumerate(FAULTS.values())]
    assert all(error.message for error in batch.errors.data)
    for prefix in ("default/batch_", "/batch_"):
        assert await served.stack.kv_store.scan(prefix) == []


async def test_a_file_that_is_no_input_is_refused_at_once(served: Served) -> None:
    client = served.client
    other = await client.files.create(file=("a.jsonl", b"{}"), purpose="user_data")
    for file_id in (other.id, "file-unknown"):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.batches.create(input_file_id=file_id, endpoint="/v1/responses", completion_window="24h")
        assert refused.value.param == "input_file_id"
    wrong: Any
    for wrong in ("0h", "1000h", "soon"):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.batches.create(input_file_id=other.id, endpoint="/v1/responses", completion_window=wrong)
        assert refused.value.param == "completion_window"
    wrong = "/v1/moderations"
    with pytest.raises(openai.BadRequestError) as refused:
        await client.batches.create(input_file_id=other.id, endpoint=wrong, completion_window="24h")
    assert refused.value.param == "endpoint"
    empty = await wait_for_end(client, await create_batch(client, ["", "  "]))
    assert empty.errors is not None
    assert empty.errors.data is not None
    assert [error.code for error in empty.errors.data] == ["empty_file"]


async def test_batches_are_listed_newest_first_to_their_tenant_alone() -> None:
    async with serving(scripted([{"text": "hello"}]), more=BATCHES, server={"api_keys": KEYS}) as served:
        client = served.client
        created = [(await create_batch(client, [batch_line("a")])).id for _ in range(5)]
        listed = [batch.id async for batch in client.batches.list(limit=2)]
        assert sorted(listed) == sorted(created)
        assert listed == sorted(listed, reverse=True)
        async with sdk_client(served.url, "key-b") as other:
            assert (await other.batches.list()).data == []
            for call in (other.batches.retrieve, other.batches.cancel):
                with pytest.raises(openai.NotFoundError):
                    await call(created[0])
            mine = await upload_lines(client, [batch_line("a")])
            with pytest.raises(openai.BadRequestError):
                await other.batches.create(input_file_id=mine, endpoint="/v1/responses", completion_window="24h")


async def test_a_cancelled_batch_ends_soon_and_names_every_line() -> None:
    async with serving(SLOW, more={**BATCHES, "batches": {**BATCHES["batches"], "max_running": 4}}) as served:
        client = served.client
        batch = await create_batch(client, [batch_line(f"line {n}") for n in range(50)])
        await until_status(client.batches, batch.id, "in_progress")
        cancelled = await client.batches.cancel(batch.id)
        assert cancelled.status in ("cancelling", "cancelled")
        assert cancelled.cancelling_at is not None
        batch = await wait_for_end(client, batch, 10)
        assert batch.status == "cancelled"
        assert batch.cancelled_at is not None
        errors = await read_results(client, batch.error_file_id)
        assert [line["custom_id"] for line in errors] == [f"line {n}" for n in range(50)]
        assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}
        with pytest.raises(openai.BadRequestError, match="cancelled"):
            await client.batches.cancel(batch.id)


@pytest.mark.parametrize("unit_s", [1, 0], ids=["while they are executed", "before they are read"])
async def test_lines_that_the_window_does_not_reach_expire(monkeypatch: pytest.MonkeyPatch, unit_s: int) -> None:
    async with serving(SLOW, more=BATCHES) as served:
        monkeypatch.setattr("apis.wire.completion_window._UNIT_S", {"h": unit_s})
        monkeypatch.setattr("apis.wire.completion_window.MIN_WINDOW_S", 0)
        batch = await create_batch(served.client, [batch_line("a"), batch_line("b")], completion_window="3h")
        batch = await wait_for_end(served.client, batch, 10)
        assert batch.status == "expired"
        assert batch.expired_at is not None
        errors = await read_results(served.client, batch.error_file_id)
        assert [(line["custom_id"], line["response"], line["error"]["code"]) for line in errors] == [
            ("a", None, "batch_expired"),
            ("b", None, "batch_expired"),
        ]


async def test_a_deleted_input_file_ends_the_validation_or_nothing(served: Served) -> None:
    file_id = await upload_lines(served.client, [batch_line(f"{n}") for n in range(5)])
    batch = await served.client.batches.create(input_file_id=file_id, endpoint="/v1/responses", completion_window="24h")
    await served.client.files.delete(file_id)
    batch = await wait_for_end(served.client, batch)
    if batch.status == "failed":
        assert batch.errors is not None
        assert batch.errors.data is not None
        assert batch.errors.data[0].code == "invalid_input_file"
    else:
        assert len(await read_results(served.client, batch.output_file_id)) == 5


async def test_webhooks_report_the_ends_of_batches() -> None:
    async with receiving() as receiver:
        webhooks = {"receivers": [receiver.hook(events=["batch.completed", "batch.failed"])]}
        async with serving(scripted([{"text": "hello"}]), more=BATCHES, webhooks=webhooks) as served:
            good = await create_batch(served.client, [batch_line("a")])
            await wait_for_end(served.client, good)
            bad = await create_batch(served.client, ["{"])
            await wait_for_end(served.client, bad)
            events = {event.data.id: event.type for event in await receiver.come(2)}
            assert events == {good.id: "batch.completed", bad.id: "batch.failed"}
