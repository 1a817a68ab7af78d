"""Limits of projects, keys and models: counted exactly, refused before any model works, given back where it failed."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, RateLimitError
from openai.types.admin.organization.projects import ProjectRateLimit

from apis.accounts.accounts import MAX_KEY_AGE_S, Caller
from apis.accounts.charges import Amounts, Demand, ReservedPart
from apis.accounts.limits import RateLimit
from apis.errors import QuotaExceeded, RateLimited, TokenRateLimited
from apis.inference import ModelNames
from apis.storage.records import decode_record
from providers.accounts.ledger.counters import UseCounter, Windows
from providers.accounts.ledger.stored_ledger import StoredLedger
from providers.accounts.prices import Prices
from providers.kv_store.memory import Memory
from stack.http.routes.table import API_ROUTES, EXTENSION_ROUTES
from tests.stack.http.raw import ask, bearer, error_code
from tests.support.sdk.client import sdk_client
from tests.support.sdk.decisions import DECISION_FIELDS
from tests.support.sdk.requests import chat_requests
from tests.support.sdk.websockets import talking
from tests.support.servers.serving import Served, scripted, serving
from tests.support.tenants.accounts import CHAINED, ROOT, new_project, organization_of

EMBEDDING_ROUTES = ("search", "files", "file_batches")


@pytest.fixture
def projects(served: Served) -> Any:
    return organization_of(served.client).projects


async def new_client(served: Served, **limits: int) -> tuple[AsyncOpenAI, str]:
    """A client of a new project whose limits of all requests together are these."""
    project_id, key = await new_project(organization_of(served.client), limits)
    return sdk_client(served.url, key), project_id


async def eventually_refused(call: Callable[[], Awaitable[Any]]) -> RateLimitError:
    async with asyncio.timeout(MAX_KEY_AGE_S + 2):
        while True:
            try:
                await call()
            except RateLimitError as error:
                return error


async def test_limits_are_listed_and_set_as_the_sdk_does(projects: Any) -> None:
    project = await projects.create(name="p")
    listed = [limit async for limit in projects.rate_limits.list_rate_limits(project.id, limit=1)]
    assert [limit.id for limit in listed] == ["rl-*", "rl-scripted"]
    update = projects.rate_limits.update_rate_limit
    changed = await update("rl-scripted", project_id=project.id, max_requests_per_1_minute=7)
    ProjectRateLimit.model_validate(changed.to_dict(), strict=True)
    assert (changed.model, changed.max_requests_per_1_minute, changed.object) == ("scripted", 7, "project.rate_limit")
    again = await update("rl-scripted", project_id=project.id, max_tokens_per_1_minute=100)
    assert (again.max_requests_per_1_minute, again.max_tokens_per_1_minute) == (7, 100)
    slashed = await update("rl-org/model", project_id=project.id, max_requests_per_1_day=3)
    assert (slashed.model, slashed.max_requests_per_1_day) == ("org/model", 3)


async def test_requests_beyond_the_limit_reach_no_model(served: Served) -> None:
    client, _ = await new_client(served, max_requests_per_1_day=3, max_requests_per_1_minute=50)
    before = len(chat_requests(served))
    async with client:
        first = await client.responses.with_raw_response.create(model="scripted", input="hi")
        assert first.headers["x-ratelimit-limit-requests"] == "50"
        assert first.headers["x-ratelimit-remaining-requests"] == "49"
        assert first.headers["x-ratelimit-reset-requests"].endswith("s")
        said: Any = [{"role": "user", "content": "hi"}]
        await client.chat.completions.create(model="scripted", messages=said)
        async with await client.responses.create(model="scripted", input="hi", stream=True) as events:
            assert [event async for event in events][-1].type == "response.completed"
        for call in (
            client.responses.create(model="scripted", input="hi"),
            client.chat.completions.create(model="scripted", messages=said),
            client.embeddings.create(model="scripted", input="hi"),
            client.responses.input_tokens.count(model="scripted", input="hi"),
        ):
            with pytest.raises(RateLimitError) as refusal:
                await call
            assert (refusal.value.code, refusal.value.type) == ("rate_limit_exceeded", "requests")
            assert int(refusal.value.response.headers["retry-after"]) > 0
        async with talking(served, client) as talk:
            error = await talk.refused()
            assert (error.status, error.error.code) == (429, "rate_limit_exceeded")
    assert len(chat_requests(served)) - before == 3


async def test_every_route_that_reaches_a_model_is_limited(served: Served) -> None:
    """Generated from the table of routes, so no new route can leave the limits out. Text that is only counted or
    embedded is limited, too."""
    client, _ = await new_client(served, max_requests_per_1_minute=0)
    said = [{"role": "user", "content": "hi"}]
    embedding = {"/vector_stores", *(f"/vector_stores/{{store_id}}/{name}" for name in EMBEDDING_ROUTES)}
    assert embedding <= {route.path for route in API_ROUTES}
    async with client:
        for route in (*API_ROUTES, *EXTENSION_ROUTES):
            fields = set(route.body.model_fields) if route.body is not None else set[str]()
            if "model" not in fields and (route.method != "POST" or route.path not in embedding):
                continue
            if route.path.startswith("/agents"):  # the responses of its turns are requests of their own
                continue
            body: dict[str, Any] = {"model": "scripted", "input": "hi", "messages": said, "query": "hi"}
            body |= {"file_id": "file-1", "file_ids": ["file-1"], "max_tokens": 9}
            body = {name: value for name, value in body.items() if name in fields}
            body |= DECISION_FIELDS.get(route.path, {})
            if "model" in fields and not {"input", "state"} & body.keys() and "messages" not in body:
                body["prompt"] = "hi"
            answer = await ask(served.url, body, path=f"/v1{route.path}", headers=bearer(client.api_key))
            assert error_code(answer, 429) == "rate_limit_exceeded", route
    assert chat_requests(served) == []


async def test_tokens_are_reserved_and_settled_by_what_was_used(served: Served) -> None:
    client, project_id = await new_client(served, max_tokens_per_1_minute=100_000)
    async with client:
        response = await client.responses.create(model="scripted", input="hello")
        assert response.usage is not None
        await settled_at(served, project_id, response.usage.total_tokens)
        with pytest.raises(Exception, match="does not exist"):
            await client.responses.create(model="absent", input="hello")
        await settled_at(served, project_id, response.usage.total_tokens)


async def test_a_budget_that_is_used_up_is_insufficient_quota(served: Served, projects: Any) -> None:
    client, project_id = await new_client(served, max_tokens_per_1_month=1)
    async with client:
        await client.responses.create(model="scripted", input="hello")
        error = await eventually_refused(lambda: client.responses.create(model="scripted", input="hello"))
        assert (error.code, error.type) == ("insufficient_quota", "insufficient_quota")
        assert error.response.headers["x-should-retry"] == "false"
        await projects.rate_limits.update_rate_limit(
            "rl-*", project_id=project_id, extra_body={"max_tokens_per_1_month": 1_000_000}
        )
        async with asyncio.timeout(MAX_KEY_AGE_S + 1):
            while await is_refused(client):
                pass


async def test_responses_at_a_time_are_limited_also_those_on_a_websocket() -> None:
    slow = scripted([{"text": ["a", "b"]}, {"wait_s": 30}])
    async with serving(slow, more=CHAINED, server={"api_keys": [ROOT]}) as served:
        client, project_id = await new_client(served, max_concurrent_responses=2)
        async with client:
            streams = [await client.responses.create(model="scripted", input="hi", stream=True) for _ in range(2)]
            for call in (
                client.responses.create(model="scripted", input="hi"),
                client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "hi"}]),
            ):
                with pytest.raises(RateLimitError, match="max_concurrent_responses") as refusal:
                    await call
                assert refusal.value.code == "rate_limit_exceeded"
            async with talking(served, client) as talk:
                assert (await talk.refused()).status == 429
            assert len(chat_requests(served)) == 2
            await streams[0].close()
            async with asyncio.timeout(5):
                while await read_running(served, project_id) != 1:  # noqa: ASYNC110 - the store sets no event
                    await asyncio.sleep(0.02)
            streams[0] = await client.responses.create(model="scripted", input="hi", stream=True)
            for stream in streams:
                await stream.close()


async def read_running(served: Served, project_id: str) -> int:
    ((_, entry),) = await served.stack.kv_store.scan(f"/accounts/counters/{project_id}/")
    return decode_record(entry, UseCounter).concurrent_responses


async def test_calls_of_hosted_tools_are_limited_by_the_day() -> None:
    turns = [[{"call": "web_search", "arguments": '{"query": "a"}'}], [{"text": "found"}]]
    search = {"provider": "tests.support.servers.stepping_provider:Search", "slow_s": 0}
    async with serving(scripted(*turns), more=CHAINED, server={"api_keys": [ROOT]}, tool_runtime=search) as served:
        client, _ = await new_client(served, max_tool_calls_per_1_day=1)
        async with client:
            tools: Any = [{"type": "web_search"}]
            response = await client.responses.create(model="scripted", input="hi", tools=tools)
            assert response.output[0].type == "web_search_call"
            with pytest.raises(RateLimitError, match="tool calls per day"):
                await client.responses.create(model="scripted", input="hi", tools=tools)
            function: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
            await client.responses.create(model="scripted", input="hi", tools=[function])


async def test_stored_bytes_of_a_project_are_limited(served: Served, projects: Any) -> None:
    client, project_id = await new_client(served, max_stored_bytes=5000)
    async with client:
        await client.responses.create(model="scripted", input="x" * 6000)
        error = await eventually_refused(lambda: client.responses.create(model="scripted", input="hello"))
        assert (error.code, "max_stored_bytes" in error.message) == ("insufficient_quota", True)
        await client.responses.create(model="scripted", input="hello", store=False)
        with pytest.raises(BadRequestError, match="whole project"):
            await projects.rate_limits.update_rate_limit(
                "rl-scripted", project_id=project_id, extra_body={"max_stored_bytes": 1}
            )


async def test_one_key_of_a_project_can_be_limited(served: Served, projects: Any) -> None:
    client, project_id = await new_client(served)
    (key,) = [key async for key in projects.api_keys.list(project_id)]
    await projects.rate_limits.update_rate_limit(f"rl-key:{key.id}", project_id=project_id, max_requests_per_1_minute=0)
    other = await projects.service_accounts.create(project_id, name="other")
    async with client, sdk_client(served.url, other.api_key.value) as free:
        error = await eventually_refused(lambda: client.responses.create(model="scripted", input="hi"))
        assert f"key:{key.id}" in error.message
        await free.responses.create(model="scripted", input="hi")


async def is_refused(client: AsyncOpenAI) -> bool:
    try:
        await client.responses.create(model="scripted", input="hello")
    except RateLimitError:
        return True
    return False


async def settled_at(served: Served, project_id: str, tokens: int) -> None:
    """Wait until the settlement, which follows the answer, has set the counter to so many tokens."""
    async with asyncio.timeout(5):
        while await count_tokens(served, project_id) != tokens:  # noqa: ASYNC110 - the store sets no event
            await asyncio.sleep(0.01)


async def count_tokens(served: Served, project_id: str) -> int:
    rows = await served.stack.kv_store.scan(f"/accounts/counters/{project_id}/")
    ((_, entry),) = rows
    return decode_record(entry, UseCounter).minute_tokens


async def test_two_workers_admit_exactly_as_many_requests_as_the_limit() -> None:
    store = Memory(Memory.Config())
    workers = [StoredLedger(store, Prices({}), 1e6), StoredLedger(store, Prices({}), 1e6)]
    limits = {"*": RateLimit(day_requests=40), "scripted": RateLimit(day_tokens=3000)}

    async def attempt(number: int) -> bool:
        try:
            await workers[number % 2].open_charge(("p", "k"), limits, Demand(output_tokens=50))
        except RateLimited:
            return False
        return True

    admitted = await asyncio.gather(*(attempt(number) for number in range(120)))
    assert sum(admitted) == 40
    with pytest.raises(RateLimited):
        await workers[0].open_charge(("p", "k"), {"*": limits["*"]}, Demand(output_tokens=1))
    # a refusal under one limit counts under none of the others
    await workers[1].open_charge(("p", "k"), {"scripted": limits["scripted"]}, Demand(output_tokens=1000))
    with pytest.raises(TokenRateLimited):
        await workers[1].open_charge(("p", "k"), {"scripted": limits["scripted"]}, Demand(output_tokens=1))
    for worker in workers:
        await worker.close()


def test_a_window_ends_and_a_late_settlement_touches_no_later_one() -> None:
    november = Windows.at(1_795_391_999)
    december = Windows.at(1_796_083_200)
    reserved = UseCounter.reserve(november, Amounts(100), is_background=False)
    part = ReservedPart("*", Amounts(100), november.minute, november.day, november.month)
    assert UseCounter.of_part(part, is_background=False) == reserved
    counter = UseCounter(november).plus(reserved)
    later = counter.advance(december).plus(UseCounter.reserve(december, Amounts(10), is_background=False))
    assert (later.minute_tokens, later.day_tokens, later.month_tokens) == (10, 10, 10)
    ended = later.minus(reserved).plus(UseCounter.of_use(part, Amounts(40)))
    assert (ended.minute_tokens, ended.day_tokens, ended.month_tokens) == (10, 10, 10)
    assert (later.concurrent_responses, ended.concurrent_responses) == (2, 1)
    assert later.advance(november) == later
    next_minute = counter.advance(Windows(november.minute + 1, november.day, november.month))
    settled = next_minute.minus(reserved).plus(UseCounter.of_use(part, Amounts(40)))
    assert (settled.minute_tokens, settled.day_tokens, settled.month_tokens) == (0, 40, 40)
    with pytest.raises(QuotaExceeded):
        settled.require_room(RateLimit(month_tokens=50), Amounts(11), "p", is_background=False)
    settled.require_room(RateLimit(month_tokens=50), Amounts(10), "p", is_background=False)


def names(model: str) -> ModelNames:
    return ModelNames(model, frozenset({model}))


def test_limits_apply_by_project_key_and_model() -> None:
    limits = {"*": RateLimit(), "m": RateLimit(), "key:k": RateLimit(), "n": RateLimit()}
    caller = Caller("p", "k", limits=limits)
    assert caller.find_limits(names("m")).keys() == {"*", "m", "key:k"}
    assert caller.find_limits(None).keys() == {"*", "key:k"}
    assert Caller("p", "k").find_limits(names("m")) == {}
