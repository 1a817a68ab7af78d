"""`prompt_cache_options`: prewarmed prompts, and why a prompt is not in a cache, through the official SDK."""

from collections.abc import AsyncGenerator
from typing import Any

import pytest
import pytest_asyncio

from tests.support.sdk.answer_shapes import function
from tests.support.sdk.requests import bare, create, stream
from tests.support.servers.prefix_cache_server import PrefixCacheServer
from tests.support.servers.serving import Served, serving
from tests.support.servers.upstream_server import error_answer

pytestmark = pytest.mark.asyncio(loop_scope="module")

Json = dict[str, Any]
LONG = "The harbour has nine piers, and each of them has a light. " * 30


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncGenerator[Served]:
    async with PrefixCacheServer() as server, serving({"provider": "vllm", "base_url": server.base_url}) as served:
        yield served


async def ask(served: Served, compared: str | None = None, **fields: Any) -> Any:
    options: Json = {"prompt_cache_options": {"comparison_response_id": compared}} if compared else {}
    return await create(served, **{"model": "fake-model", "input": LONG, **options, **fields})


async def test_a_chain_hits(served: Served) -> None:
    first = await ask(served)
    second = await ask(served, first.id, previous_response_id=first.id, input="and now?")
    assert second.prompt_cache_diagnostics.type == "cache_hit"
    assert second.usage.input_tokens_details.cached_tokens > 0
    stored = await served.client.responses.retrieve(second.id)
    assert stored.prompt_cache_diagnostics == second.prompt_cache_diagnostics
    third = await ask(served, first.id, previous_response_id=second.id, input="and then?")
    assert third.prompt_cache_diagnostics.type == "cache_hit"


async def test_the_same_conversation_sent_whole_hits(served: Served) -> None:
    first = await ask(served, store=True)
    again = [{"role": "user", "content": LONG}, *[item.to_dict() for item in first.output]]
    second = await ask(served, first.id, input=[*again, {"role": "user", "content": "and now?"}])
    assert second.prompt_cache_diagnostics.type == "cache_hit"


async def test_a_turn_of_a_conversation_hits(served: Served) -> None:
    conversation = await served.client.conversations.create()
    await ask(served, conversation=conversation.id)
    first = await ask(served, conversation=conversation.id, input="one")
    second = await ask(served, first.id, conversation=conversation.id, input="two")
    assert second.prompt_cache_diagnostics.type == "cache_hit"
    other = await ask(served, first.id, input="two")
    assert other.prompt_cache_diagnostics.type == "unavailable"


CHANGES: dict[str, tuple[Json, str]] = {
    "the key": ({"prompt_cache_key": "k"}, "prompt_cache_key_changed"),
    "the tools": ({"tools": [function("g")]}, "tools_changed"),
    "the format": (
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": {}, "strict": False}}},
        "text_format_changed",
    ),
    "the effort": ({"reasoning": {"effort": "high"}}, "reasoning_effort_changed"),
    "the verbosity": ({"text": {"verbosity": "low"}}, "verbosity_changed"),
    "the instructions": ({"instructions": "Be brief."}, "input_changed"),
}


@pytest.mark.parametrize("name", CHANGES)
async def test_a_changed_option_is_named(served: Served, name: str) -> None:
    changed, reason = CHANGES[name]
    tools = [function("f")]
    first = await ask(served, tools=tools)
    second = await ask(served, first.id, **{"tools": tools, "previous_response_id": first.id, **changed})
    diagnostics = second.prompt_cache_diagnostics
    assert (diagnostics.type, diagnostics.reason) == ("cache_miss", reason)
    assert diagnostics.comparison_reusable_tokens == 0
    assert diagnostics.cache_missed_tokens > len(LONG) // 8


async def test_a_changed_model_comes_before_everything_else() -> None:
    async with PrefixCacheServer() as server:
        inference = {"provider": "vllm", "base_url": server.base_url, "lists_all_models": False}
        async with serving(inference) as served:
            first = await ask(served)
            second = await ask(served, first.id, model="other", instructions="Be brief.", tools=[function("f")])
            assert second.prompt_cache_diagnostics.reason == "model_changed"


async def test_changed_input_is_counted_from_the_first_difference(served: Served) -> None:
    first = await ask(served, input=[{"role": "user", "content": text} for text in (LONG, "one", LONG)])
    second = await ask(served, first.id, input=[{"role": "user", "content": text} for text in (LONG, "two", LONG)])
    diagnostics = second.prompt_cache_diagnostics
    assert (diagnostics.type, diagnostics.reason) == ("cache_miss", "input_changed")
    assert abs(diagnostics.cache_missed_tokens - diagnostics.comparison_reusable_tokens) < len(LONG) // 16


async def test_a_compaction_is_named(served: Served) -> None:
    first = await ask(served)
    compacted = await served.client.responses.compact(model="fake-model", previous_response_id=first.id)
    items = [bare(item) for item in compacted.output]
    second = await ask(served, first.id, input=[*items, {"role": "user", "content": "and now?"}])
    assert second.prompt_cache_diagnostics.reason == "context_compacted"


async def test_every_event_shows_the_diagnostics_as_far_as_they_are_known(served: Served) -> None:
    first = await ask(served)
    options = {"prompt_cache_options": {"comparison_response_id": first.id}}
    fields: Json = {"model": "fake-model", "previous_response_id": first.id, **options}
    events = await stream(served, **fields)
    assert events[0].response.prompt_cache_diagnostics.type == "unavailable"  # nothing was cached or missed yet
    assert events[-1].response.prompt_cache_diagnostics.type == "cache_hit"
    events = await stream(served, **{**fields, "instructions": "Be brief."})
    assert events[0].response.prompt_cache_diagnostics == events[-1].response.prompt_cache_diagnostics
    assert events[0].response.prompt_cache_diagnostics.reason == "input_changed"


async def test_what_another_tenant_stored_is_not_found() -> None:
    keys = [{"key": f"sk-{name}", "tenant": name} for name in ("one", "two")]
    async with serving(server={"api_keys": keys}) as served:
        first = await create(served)
        other = served.client.with_options(api_key="sk-two")
        response = await other.responses.create(
            model="scripted", input="hi", prompt_cache_options={"comparison_response_id": first.id}
        )
        assert response.prompt_cache_diagnostics is not None
        assert response.prompt_cache_diagnostics.type == "comparison_response_not_found"


async def test_a_prewarm_fills_the_cache_of_the_replica_that_the_chain_has() -> None:
    async with PrefixCacheServer() as one, PrefixCacheServer() as other:
        inference = {"provider": "vllm", "base_url": [one.base_url, other.base_url]}
        async with serving(inference) as served:
            warm = await create(
                served, model="fake-model", input=LONG, prompt_cache_options={"prewarm": True}, max_output_tokens=100
            )
            assert (warm.status, warm.output, warm.usage.output_tokens) == ("completed", [], 0)
            assert warm.usage.input_tokens > 0
            [prefill] = [*one.chats, *other.chats]
            assert prefill.json["max_completion_tokens"] == 1
            response = await create(served, model="fake-model", input="and now?", previous_response_id=warm.id)
            assert response.usage.input_tokens_details.cached_tokens > warm.usage.input_tokens * 0.9
            assert {len(one.chats), len(other.chats)} == {0, 2}


async def test_a_prewarm_of_an_engine_that_is_down_still_prepares_the_input() -> None:
    async with PrefixCacheServer() as server, serving({"provider": "vllm", "base_url": server.base_url}) as served:
        usual = server.routes.pop("/v1/chat/completions")
        server.routes["/v1/chat/completions"] = error_answer(400, "no")
        warm = await create(served, model="fake-model", input=LONG, prompt_cache_options={"prewarm": True})
        assert (warm.status, warm.usage.total_tokens) == ("completed", 0)
        server.routes["/v1/chat/completions"] = usual
        await create(served, model="fake-model", input="and now?", previous_response_id=warm.id)
        assert [message["content"] for message in server.chats[-1].json["messages"]] == [LONG, "and now?"]
