"""Spans of model calls and tools: what an inference server says of itself, service tiers, tools, times of chunks."""

from pathlib import Path
from typing import Any

import pytest

from tests.spec.telemetry.test_runs import SOON, finish
from tests.support.laws.telemetry_laws import check_all
from tests.support.sdk.file_search_stack import filing, store_of
from tests.support.sdk.requests import create, stream
from tests.support.servers.otlp_receiver import OtlpReceiver
from tests.support.servers.serving import scripted, serving
from tests.support.servers.upstream_server import UpstreamServer, text_chunks
from tests.support.servers.upstream_server import stream as upstream_stream

CHUNK_TIME = "gen_ai.client.inference.time_per_output_chunk"
HEAD = {"id": "chatcmpl-7", "model": "fake-model-2026", "service_tier": "flex", "system_fingerprint": "fp_1"}


def headed(**head: Any) -> list[dict[str, Any]]:
    return [{**chunk, **head} for chunk in text_chunks("Hello.")]


async def test_a_chat_span_names_the_answer_the_model_and_the_tiers_of_its_server(otlp: OtlpReceiver) -> None:
    async with UpstreamServer(upstream_stream(headed(**HEAD))) as upstream:
        options = {"base_url": upstream.base_url, "engine": "openai", "extra_body": {"service_tier": "priority"}}
        async with serving({"provider": "vllm", **options}) as served:
            await create(served, model="fake-model")
    check_all(otlp)
    (chat,) = otlp.named("chat ")
    assert (chat.attributes["gen_ai.response.id"], chat.attributes["gen_ai.response.model"]) == (
        "chatcmpl-7",
        "fake-model-2026",
    )
    assert chat.attributes["openai.request.service_tier"] == "priority"
    assert chat.attributes["openai.response.service_tier"] == "flex"
    assert chat.attributes["openai.response.system_fingerprint"] == "fp_1"
    (point,) = otlp.metric("gen_ai.client.inference.duration")
    assert point.attributes["gen_ai.response.model"] == "fake-model-2026"


async def test_other_servers_have_no_attributes_of_openai_and_strange_heads_are_left_out(otlp: OtlpReceiver) -> None:
    strange = {"id": 7, "model": "m" * 5000, "service_tier": "flex"}
    async with (
        UpstreamServer(upstream_stream(headed(**strange))) as upstream,
        serving({"provider": "vllm", "base_url": upstream.base_url}) as served,
    ):
        await create(served, model="fake-model")
    check_all(otlp)
    (chat,) = otlp.named("chat ")
    assert "gen_ai.response.id" not in chat.attributes
    assert chat.attributes["gen_ai.response.model"] == "m" * 256
    assert not [name for name in chat.attributes if name.startswith("openai.")]


async def test_a_response_names_the_tier_that_was_asked_for_and_the_one_that_was_used(otlp: OtlpReceiver) -> None:
    async with serving(responses=SOON) as served:
        await create(served)
        response = await create(served, background=True, service_tier="priority")
        await finish(served, response.id)
    check_all(otlp)
    plain, ranked = otlp.named("invoke_agent")
    assert "stack.request.service_tier" not in plain.attributes
    assert plain.attributes["stack.response.service_tier"] == "default"
    assert ranked.attributes["stack.request.service_tier"] == "priority"
    assert ranked.attributes["stack.response.service_tier"] == "priority"


async def test_a_tool_span_has_the_description_that_the_model_was_offered(otlp: OtlpReceiver, tmp_path: Path) -> None:
    turns = [[{"call": "file_search", "arguments": '{"queries": ["whale"]}'}], [{"text": "Done."}]]
    async with filing(tmp_path, *turns) as served:
        store_id, _ = await store_of(served)
        await create(served, tools=[{"type": "file_search", "vector_store_ids": [store_id]}])
    check_all(otlp)
    (tool,) = otlp.named("execute_tool")
    assert 10 < len(tool.attributes["gen_ai.tool.description"]) <= 1024
    assert "search" in tool.attributes["gen_ai.tool.description"].lower()


@pytest.mark.parametrize(("calls", "chunks"), [(10, 32), (64, 1)])
async def test_the_times_of_chunks_are_a_sample_over_all_calls(otlp: OtlpReceiver, calls: int, chunks: int) -> None:
    """The chunk with the finish comes after as many gaps as an answer has deltas; one gap in 32 is timed."""
    turns: list[Any] = [[{"text": [f"{number} " for number in range(chunks)]}] for _ in range(calls)]
    async with serving(scripted(*turns)) as served:
        for _ in turns:
            await stream(served)
    check_all(otlp)
    points = otlp.metric(CHUNK_TIME)
    assert sum(point.count for point in points) == calls * chunks // 32
    assert 0 < sum(point.total for point in points) < 10
