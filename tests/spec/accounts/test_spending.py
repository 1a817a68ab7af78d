"""Money: prices of models, costs, limits of spending, and the kinds of usage that OpenAI's administration reads."""

import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI, BadRequestError, NotFoundError, RateLimitError
from openai.types.admin.organization import (
    OrganizationSpendLimit,
    UsageCostsResponse,
    UsageEmbeddingsResponse,
    UsageWebSearchCallsResponse,
)
from openai.types.admin.organization.projects import ProjectSpendLimit

from apis.accounts.charges import Demand
from apis.accounts.limits import NANOS
from apis.accounts.usage import UsageCounts
from providers.accounts.prices import ModelPrice, Prices
from tests.spec.accounts.test_limits import eventually_refused
from tests.support.models.tiny_bert import write_tiny_bert
from tests.support.sdk.client import sdk_client
from tests.support.servers.serving import Served, scripted, serving
from tests.support.tenants.accounts import ROOT, new_project, organization_of, usage_results

USED = {"input_tokens": 1000, "cached_tokens": 400, "output_tokens": 500}
PRICED: dict[str, Any] = {
    "accounts": {
        "provider": "chain",
        "providers": {
            "config": {"provider": "config"},
            "stored": {"provider": "stored", "prices": {"scripted": {"input": 1000, "cached": 100, "output": 4000}}},
        },
    }
}
COST = 0.6 + 0.04 + 2.0
"""The cost of one response with the usage USED, in dollars."""
CENTS: Any = {"currency": "USD", "interval": "month"}


@pytest_asyncio.fixture
async def served() -> AsyncGenerator[Served]:
    inference = scripted([{"text": "hello"}, {"finish": "stop", "usage": USED}])
    async with serving(inference, more=PRICED, server={"api_keys": [ROOT]}) as running:
        yield running


@pytest.fixture
def organization(served: Served) -> Any:
    return organization_of(served.client)


async def new_client(served: Served, organization: Any) -> tuple[AsyncOpenAI, str]:
    project_id, key = await new_project(organization)
    return sdk_client(served.url, key), project_id


async def test_costs_are_what_the_tokens_cost_by_project_key_and_model(served: Served, organization: Any) -> None:
    client, project_id = await new_client(served, organization)
    other, other_id = await new_client(served, organization)
    since = int(time.time()) - 86_400
    async with client, other:
        for _ in range(3):
            await client.responses.create(model="scripted", input="hi")
        await other.responses.create(model="scripted", input="hi", store=False)
    page = await organization.usage.costs(start_time=since, group_by=["project_id", "line_item"])
    UsageCostsResponse.model_validate(page.to_dict(), strict=True)
    costs = {result.project_id: result for bucket in page.data for result in bucket.results}
    assert costs.keys() == {project_id, other_id}
    assert costs[project_id].amount.value == pytest.approx(3 * COST)
    assert costs[project_id].amount.currency == "usd"
    assert (costs[other_id].amount.value, costs[other_id].line_item) == (pytest.approx(COST), "scripted")
    assert (costs[other_id].quantity, costs[other_id].quantity_unit) == (1500, "tokens")
    page = await organization.usage.costs(start_time=since, project_ids=[other_id], line_items=["scripted"])
    assert [r.amount.value for bucket in page.data for r in bucket.results] == [pytest.approx(COST)]
    with pytest.raises(BadRequestError, match="group_by"):
        await organization.usage.costs(start_time=since, group_by=["user_id"])


async def test_a_spend_limit_of_a_project_counts_what_was_spent_before_it_was_set(
    served: Served, organization: Any
) -> None:
    client, project_id = await new_client(served, organization)
    free, _ = await new_client(served, organization)
    limits = organization.projects.spend_limit
    async with client, free:
        with pytest.raises(NotFoundError):
            await limits.retrieve(project_id)
        await client.responses.create(model="scripted", input="hi")
        limit = await limits.update(project_id, threshold_amount=500, **CENTS)
        ProjectSpendLimit.model_validate(limit.to_dict(), strict=True)
        assert (limit.threshold_amount, limit.enforcement.status) == (500, "inactive")
        assert limit.spent_amount == pytest.approx(100 * COST)
        error = await eventually_refused(lambda: client.responses.create(model="scripted", input="hi"))
        assert (error.code, error.type) == ("insufficient_quota", "insufficient_quota")
        await free.responses.create(model="scripted", input="hi")
        limit = await limits.update(project_id, threshold_amount=200, **CENTS)
        assert limit.enforcement.status == "enforcing"
        assert (await limits.delete(project_id)).deleted
        with pytest.raises(NotFoundError):
            await limits.retrieve(project_id)
        with pytest.raises(BadRequestError) as refusal:
            await limits.update(project_id, threshold_amount=1, currency="EUR", interval="month")
        assert refusal.value.param == "currency"


async def test_a_spend_limit_of_the_organization_holds_for_all_projects_together(
    served: Served, organization: Any
) -> None:
    clients = [(await new_client(served, organization))[0] for _ in range(2)]
    limit = await organization.spend_limit.update(threshold_amount=2000, **CENTS)
    OrganizationSpendLimit.model_validate(limit.to_dict(), strict=True)
    spent = 0
    for client in clients:
        message = ""
        while not message:
            try:
                # as long as what the model says it has read, so that enough is reserved
                await client.responses.create(model="scripted", input="x" * 4000, max_output_tokens=500)
                spent += 1
            except RateLimitError as error:
                message = error.message
        assert "all projects together" in message
    assert 2000 - 310 - 100 * COST < spent * COST * 100 <= 2000
    assert (await organization.spend_limit.retrieve()).spent_amount == pytest.approx(spent * COST * 100)
    assert (await organization.spend_limit.delete()).deleted
    for client in clients:
        await client.close()


async def test_each_kind_of_usage_has_true_numbers_or_is_refused_by_name(organization: Any) -> None:
    since = int(time.time()) - 86_400
    usage = organization.usage
    turns = [[{"call": "web_search", "arguments": '{"query": "a"}'}], [{"text": "found"}]]
    search = {"provider": "tests.support.servers.stepping_provider:Search", "slow_s": 0}
    async with serving(scripted(*turns), more=PRICED, server={"api_keys": [ROOT]}, tool_runtime=search) as searching:
        own = organization_of(searching.client)
        tools: Any = [{"type": "web_search"}]
        await searching.client.responses.create(model="scripted", input="hi", tools=tools)
        page: Any = await own.usage.web_search_calls(start_time=since, group_by=["model"])
        UsageWebSearchCallsResponse.model_validate(page.to_dict())
        (result,) = usage_results(page)
        assert (result.num_requests, result.num_model_requests, result.model) == (1, 1, "scripted")
        images: Any = await own.usage.images(start_time=since)
        assert [bucket.results for bucket in images.data if bucket.results] == []
    for refused in (
        *(usage.audio_speeches, usage.audio_transcriptions, usage.code_interpreter_sessions),
        usage.vector_stores,
    ):
        with pytest.raises(BadRequestError, match="is not counted by this server") as refusal:
            await refused(start_time=since)
        assert refusal.value.code == "unsupported_usage"


async def test_embeddings_count_apart_from_what_models_generate(tmp_path: Path) -> None:
    minilm = {"provider": "minilm", "model_path": str(write_tiny_bert(tmp_path)), "threads": 1}
    router = {"provider": "router", "providers": {"chat": {"provider": "scripted"}, "embeddings": minilm}}
    async with serving(router, more=PRICED, server={"api_keys": [ROOT]}) as served:
        organization = organization_of(served.client)
        client, project_id = await new_client(served, organization)
        async with client:
            answer = await client.embeddings.create(model="all-minilm-l6-v2", input=["cat", "dog"])
        query: Any = {"start_time": int(time.time()) - 86_400, "project_ids": [project_id], "group_by": ["model"]}
        page = await organization.usage.embeddings(**query)
        UsageEmbeddingsResponse.model_validate(page.to_dict())
        (result,) = usage_results(page)
        assert (result.input_tokens, result.num_model_requests) == (answer.usage.prompt_tokens, 1)
        assert result.model == "all-minilm-l6-v2"
        generated = await organization.usage.completions(**query)
        assert [bucket.results for bucket in generated.data if bucket.results] == []


def test_costs_are_integers_whose_sums_are_exact() -> None:
    prices = Prices({"m": ModelPrice(input=0.1, output=0.3)})
    assert prices.cost_of("m", UsageCounts(1, 10_000_000, 5_000_000, 1_000_000)) == round(1.3 * NANOS)
    assert prices.cost_of("other", UsageCounts(1, 10, 0, 10)) == 0
    assert prices.estimate(Demand("m", 1, 1)) == 400
