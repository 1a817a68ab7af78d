"""Traces of agents: the Agents SDKs' own exporters, pointed at a served stack."""

import asyncio
import shutil
import subprocess
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from agents import Agent, OpenAIResponsesModel, RunConfig, Runner, trace
from agents.tracing import get_trace_provider
from agents.tracing.processors import BackendSpanExporter, BatchTraceProcessor
from openai import AsyncOpenAI

from tests.support.sdk.agent_traces import DATA, recorded_traces
from tests.support.sdk.agents_sdk import add, adding, agent
from tests.support.sdk.answer_shapes import call
from tests.support.servers.serving import Served, scripted, serving

Json = dict[str, Any]
RECORDED: Json = recorded_traces()
DONE = [{"text": "Done."}]


async def read(client: AsyncOpenAI, path: str, **query: Any) -> Json:
    return await client.get(path, cast_to=object, options={"params": query})  # type: ignore[return-value]  # plain JSON


@asynccontextmanager
async def traced(served: Served, key: str = "none") -> AsyncGenerator[BatchTraceProcessor]:
    """Let the SDK send its traces to the stack with its real exporter."""
    exporter = BackendSpanExporter(api_key=key, endpoint=f"{served.url}/v1/traces/ingest", max_retries=1)
    processor = BatchTraceProcessor(exporter)
    provider: Any = get_trace_provider()
    before = list(provider._multi_processor._processors)
    provider.set_processors([processor])
    provider.set_disabled(False)
    try:
        yield processor
    finally:
        provider.set_processors(before)
        await asyncio.to_thread(processor.shutdown)
        exporter.close()


async def test_a_run_of_the_sdk_is_one_trace_joined_with_its_responses() -> None:
    turns: list[Any] = [
        [{"calls": [adding(1, 2, id="c1")]}],
        [{"calls": [call("transfer_to_helper", "{}", id="c2")]}],
        DONE,
    ]
    async with serving(scripted(*turns)) as served, traced(served) as processor:
        helper = agent(served, "helper")
        first = agent(served, "first", tools=[add], handoffs=[helper])
        config = RunConfig(workflow_name="Sums", group_id="chat-7", trace_metadata={"user": "u1"})
        result = await Runner.run(first, "Add.", run_config=config)
        await asyncio.to_thread(processor.force_flush)
        ids = [response.response_id for response in result.raw_responses]
        [listed] = (await read(served.client, "/traces", response_id=ids[-1]))["data"]
        whole = await read(served.client, f"/traces/{listed['id']}")
    assert (listed["workflow_name"], listed["group_id"], listed["metadata"]) == ("Sums", "chat-7", {"user": "u1"})
    assert listed["response_ids"] == ids
    spans = whole.pop("spans")
    assert whole == listed
    assert listed["span_count"] == len(spans)
    kinds = [span["span_data"]["type"] for span in spans]
    assert kinds.count("response") == 3
    assert {"agent", "function", "handoff", "response"} <= set(kinds)
    by_id = {span["id"]: span for span in spans}
    for span in spans:
        assert span["started_at"] <= span["ended_at"]
        assert span["parent_id"] is None or span["parent_id"] in by_id
    [function] = [span for span in spans if span["span_data"]["type"] == "function"]
    assert (function["span_data"]["name"], function["span_data"]["output"]) == ("add", "3")


async def test_an_error_of_a_tool_is_counted_in_its_trace() -> None:
    async with serving(scripted([{"fail": "It broke."}])) as served, traced(served) as processor:
        with pytest.raises(Exception, match="It broke"):
            await Runner.run(agent(served), "Go.", run_config=RunConfig(workflow_name="Broken"))
        await asyncio.to_thread(processor.force_flush)
        [listed] = (await read(served.client, "/traces", workflow_name="Broken"))["data"]
        spans = (await read(served.client, f"/traces/{listed['id']}"))["spans"]
    assert listed["error_count"] == len([span for span in spans if span["error"]]) >= 1


async def test_the_program_of_the_documents_sends_its_traces_here() -> None:
    """The program of `apis/docs/traces.md` runs with another address only."""
    page = (Path(__file__).resolve().parents[3] / "apis/docs/traces.md").read_text()
    program = page.partition("```python\n")[2].partition("```")[0]
    assert "add_trace_processor" in program
    async with serving(scripted(DONE)) as served:
        provider: Any = get_trace_provider()
        before = list(provider._multi_processor._processors)
        provider.set_processors([])  # else the one that sends to OpenAI gets the trace, too
        provider.set_disabled(False)
        names: Json = {}
        own: Any = None
        try:
            exec(program.replace("http://127.0.0.1:8321", served.url), names)
            [own] = provider._multi_processor._processors
            model = OpenAIResponsesModel("scripted", served.client)
            with trace("Documented"):
                await Runner.run(Agent(name="Agent", model=model), "Hi")
            await asyncio.to_thread(own.force_flush)
        finally:
            provider.set_processors(before)
            if own is not None:
                await asyncio.to_thread(own.shutdown)
            names["exporter"].close()
        [listed] = (await read(served.client, "/traces"))["data"]
    assert listed["workflow_name"] == "Documented"


async def test_the_body_of_the_javascript_exporter_is_stored_as_it_was_sent() -> None:
    """Recorded from @openai/agents-openai 0.20.0, whose program is next to the recording."""
    async with serving() as served:
        await served.client.post("/traces/ingest", cast_to=object, body=RECORDED)
        trace_item, *spans = RECORDED["data"]
        whole = await read(served.client, f"/traces/{trace_item['id']}")
    assert {name: whole[name] for name in trace_item} == trace_item
    assert (whole["span_count"], whole["error_count"], whole["response_ids"]) == (7, 1, ["resp_1"])
    assert sorted(whole["spans"], key=lambda span: span["id"]) == sorted(spans, key=lambda span: span["id"])
    assert whole["spans"][0]["span_data"]["type"] == "agent"


@pytest.mark.live
async def test_the_javascript_exporter_sends_its_traces_here(tmp_path: Path) -> None:
    """The packages come from npm."""
    npm, node = shutil.which("npm"), shutil.which("node")
    assert npm is not None, "npm is not installed"
    assert node is not None, "node is not installed"
    packages = ["@openai/agents-core@0.20.0", "@openai/agents-openai@0.20.0"]
    install = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(tmp_path), *packages]
    await asyncio.to_thread(subprocess.run, install, check=True, timeout=240, capture_output=True)
    shutil.copy(DATA / "agents.mjs", tmp_path)
    async with serving(scripted(DONE)) as served:
        response = await served.client.responses.create(model="scripted", input="Hi")
        environment = {"STACK_URL": served.url, "RESPONSE_ID": response.id, "PATH": "/usr/bin:/bin"}
        program = await asyncio.create_subprocess_exec(node, "agents.mjs", cwd=tmp_path, env=environment)
        assert await asyncio.wait_for(program.wait(), 60) == 0
        [listed] = (await read(served.client, "/traces", response_id=response.id))["data"]
    assert (listed["workflow_name"], listed["span_count"], listed["error_count"]) == ("Homework", 7, 1)
