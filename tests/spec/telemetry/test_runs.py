"""Recorded runs of every kind, sent by OTLP to a real receiver: each span and metric keeps its published table."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
from mcp.server.mcpserver import Context
from openai import APIStatusError

from tests.spec.tools.test_code_interpreter import TOOL as CODE_INTERPRETER
from tests.spec.tools.test_code_interpreter import code, interpreting
from tests.spec.tools.test_web_search import TOOL as WEB_SEARCH
from tests.spec.tools.test_web_search import search, searching
from tests.support.laws.telemetry_laws import check_all
from tests.support.sdk.answer_shapes import Script, call, function
from tests.support.sdk.client import TLS
from tests.support.sdk.file_search_stack import filing, store_of
from tests.support.sdk.requests import create, responses, stream
from tests.support.servers.mcp_server import LOOPBACK, RealServer
from tests.support.servers.mcp_stack import mcp, playing, with_mcp
from tests.support.servers.otlp_receiver import OtlpReceiver, SentSpan
from tests.support.servers.serving import Served, scripted, serving
from tests.support.servers.upstream_server import UpstreamServer, error_answer, text_chunks
from tests.support.servers.upstream_server import stream as upstream_stream
from tests.support.servers.webhook_receiver import receiving
from tests.support.waiting import until

DONE: Script = [{"text": "Done."}]
SOON: dict[str, Any] = {"background": {"poll_s": 0.05}}
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def children(receiver: OtlpReceiver, parent: SentSpan) -> list[str]:
    """The names of a span's children, in the order of their start."""
    below = [span for span in receiver.spans if span.parent_id == parent.span_id]
    return [span.name for span in sorted(below, key=lambda span: span.start_s)]


async def finish(served: Served, response_id: str) -> Any:
    async with asyncio.timeout(10):
        async for _ in await responses(served).retrieve(response_id, stream=True):
            pass
    return await responses(served).retrieve(response_id)


FIELDS: list[dict[str, Any]] = [
    {},
    {"store": False},
    {"temperature": 0.5, "top_p": 0.9, "max_output_tokens": 64},
    {"extra_body": {"seed": 7, "top_k": 40, "stop": ["end"]}},
    {"text": {"format": {"type": "json_object"}}, "input": "{}"},
    {"text": {"format": {"type": "text"}}},
    {"reasoning": {"effort": "low"}},
    {"metadata": {"agent_name": "travel"}},
    {"instructions": "Be brief."},
    {"input": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]},
    {"max_output_tokens": 16, "input": "word " * 30},
    {"stream": True},
]
"""Requests for which the model repeats the input."""


async def test_requests_of_every_shape_keep_the_tables(otlp: OtlpReceiver) -> None:
    async with serving() as served:
        for fields in FIELDS:
            if fields.get("stream"):
                await stream(served)
            else:
                await create(served, **fields)
    check_all(otlp)
    chats = [span.attributes for span in otlp.named("chat ")]
    assert len(chats) == len(otlp.named("invoke_agent")) == len(FIELDS)
    assert (chats[2]["gen_ai.request.temperature"], chats[2]["gen_ai.request.max_tokens"]) == (0.5, 64)
    assert (chats[3]["gen_ai.request.seed"], chats[3]["gen_ai.request.top_k"]) == (7, 40)
    assert chats[3]["gen_ai.request.stop_sequences"] == ["end"]
    assert [chats[at].get("gen_ai.output.type") for at in (0, 4, 5)] == [None, "json", None]
    assert chats[6]["gen_ai.request.reasoning.level"] == "low"
    assert chats[10]["gen_ai.response.finish_reasons"] == ["length"]
    agents = otlp.named("invoke_agent")
    assert agents[7].name == "invoke_agent travel"
    assert agents[10].attributes["gen_ai.response.finish_reasons"] == ["max_output_tokens"]
    assert children(otlp, agents[0]) == ["chat scripted", "store response"]
    assert children(otlp, agents[1]) == ["chat scripted"]
    assert sum(point.count for point in otlp.metric("gen_ai.client.inference.duration")) == len(FIELDS)
    assert sum(point.count for point in otlp.metric("gen_ai.invoke_agent.duration")) == len(FIELDS)
    assert sum(point.total for point in otlp.metric("gen_ai.client.inference.usage.output_tokens")) == sum(
        chat["gen_ai.usage.output_tokens"] for chat in chats
    )
    (resource,) = {repr(sorted(each.items())): each for each in otlp.resources}.values()
    assert (resource["service.name"], resource["telemetry.sdk.name"]) == ("responses-stack", "opentelemetry")


async def test_other_routes_have_spans_and_count_no_tokens_twice(otlp: OtlpReceiver) -> None:
    async with serving() as served:
        response = await create(served)
        await responses(served).retrieve(response.id)
        await responses(served).input_items.list(response.id)
        await served.client.models.list()
        await served.client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "hi"}])
        await responses(served).delete(response.id)
        async with httpx.AsyncClient(verify=TLS) as http:
            assert (await http.get(f"{served.url}/healthz")).status_code == 200
            assert (await http.get(f"{served.url}/nowhere")).status_code == 404
            assert (await http.post(f"{served.url}/v1/responses", json={"model": 1})).status_code == 400
    check_all(otlp)
    assert [span.name for span in sorted(otlp.spans, key=lambda span: span.start_s) if span.kind == "SERVER"] == [
        "POST /v1/responses",
        "GET /v1/responses/{response_id}",
        "GET /v1/responses/{response_id}/input_items",
        "GET /v1/models",
        "POST /v1/chat/completions",
        "DELETE /v1/responses/{response_id}",
        "GET",
        "POST /v1/responses",
    ]
    fetch = otlp.named("GET /v1/responses/{response_id}")[0]
    assert fetch.attributes["gen_ai.operation.name"] == "fetch_response"
    assert not any("usage" in name for name in fetch.attributes)
    assert children(otlp, otlp.named("POST /v1/chat/completions")[0]) == ["chat scripted"]


async def test_a_chain_links_each_response_to_the_one_before_it(otlp: OtlpReceiver) -> None:
    async with serving() as served:
        conversation = await served.client.conversations.create()
        first = await create(served)
        second = await create(served, previous_response_id=first.id)
        await create(served, previous_response_id=second.id)
        await create(served, conversation=conversation.id)
    check_all(otlp)
    agents = otlp.named("invoke_agent")
    assert [agent.links for agent in agents] == [
        [],
        [(agents[0].trace_id, agents[0].span_id)],
        [(agents[1].trace_id, agents[1].span_id)],
        [],
    ]
    chats = otlp.named("chat ")
    assert chats[1].attributes["gen_ai.request.previous_response.id"] == first.id
    assert chats[3].attributes["gen_ai.conversation.id"] == conversation.id
    assert agents[3].attributes["gen_ai.conversation.id"] == conversation.id


async def test_a_web_search_is_a_tool_between_two_turns(otlp: OtlpReceiver) -> None:
    async with searching([search()], DONE) as (served, _):
        await create(served, tools=[WEB_SEARCH])
    check_all(otlp)
    (agent,) = otlp.named("invoke_agent")
    assert children(otlp, agent) == ["chat scripted", "execute_tool web_search", "chat scripted", "store response"]
    (tool,) = otlp.named("execute_tool")
    assert (tool.attributes["gen_ai.tool.type"], tool.attributes["gen_ai.tool.call.id"][:5]) == ("extension", "call_")
    (calls,) = otlp.metric("gen_ai.invoke_agent.tool_calls")
    assert (calls.total, calls.count) == (1, 1)
    (calls,) = otlp.metric("gen_ai.invoke_agent.inference_calls")
    assert (calls.total, calls.count) == (2, 1)


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
async def test_a_code_interpreter_call_is_a_tool(otlp: OtlpReceiver) -> None:
    async with interpreting([code("print(6 * 7)")], DONE) as served:
        await create(served, tools=[CODE_INTERPRETER])
    check_all(otlp)
    assert [span.name for span in otlp.named("execute_tool")] == ["execute_tool python"]


async def test_a_file_search_embeds_and_retrieves_within_its_tool(otlp: OtlpReceiver, tmp_path: Path) -> None:
    turns = [[call("file_search", '{"queries": ["blue whale"]}')], DONE]
    async with filing(tmp_path, *turns) as served:
        store_id, _ = await store_of(served)
        await create(served, tools=[{"type": "file_search", "vector_store_ids": [store_id]}])
    check_all(otlp)
    (tool,) = otlp.named("execute_tool")
    assert (tool.name, tool.attributes["gen_ai.tool.type"]) == ("execute_tool file_search", "datastore")
    assert children(otlp, tool) == [f"retrieval {store_id}"]
    (retrieval,) = otlp.named("retrieval")
    assert children(otlp, retrieval) == ["embeddings hashing"]
    assert otlp.named("embeddings")[0].attributes["gen_ai.embeddings.dimension.count"] > 0
    assert otlp.metric("gen_ai.client.embeddings.duration")


async def test_an_mcp_call_is_a_request_within_its_tool_and_hands_its_trace_on(otlp: OtlpReceiver) -> None:
    real = RealServer()

    @real.mcp.tool()
    def trace(context: Context[Any, Any]) -> str:  # pyright: ignore[reportUnusedFunction]  # the decorator registers it
        """Returns the trace that came with the call."""
        return str(dict(context.request_context.meta or {}).get("traceparent"))

    turns = [[call("real__trace", "{}")], [call("real__fail", '{"why": "no"}')], DONE]
    async with real.serving(), serving(playing(*turns), tool_servers=with_mcp(real.url)) as served:
        response = await create(served, tools=[mcp(real)])
    check_all(otlp)
    listing, traced, failed = otlp.named("tools/")
    assert [span.name for span in (listing, traced, failed)] == ["tools/list", "tools/call trace", "tools/call fail"]
    assert traced.attributes["jsonrpc.request.id"] != failed.attributes["jsonrpc.request.id"]
    assert (traced.attributes["network.transport"], traced.attributes["server.address"]) == ("tcp", LOOPBACK)
    assert (traced.is_error, failed.attributes["error.type"]) == (False, "tool_error")
    assert response.output[1].output[:-3] == f"00-{traced.trace_id}-{traced.span_id}"
    tools = otlp.named("execute_tool")
    assert [span.span_id for span in tools] == [traced.parent_id, failed.parent_id]
    assert [span.is_error for span in tools] == [False, True]
    assert otlp.metric("mcp.client.operation.duration")


async def test_refusals_and_failures_carry_their_error_type(otlp: OtlpReceiver) -> None:
    broken = [[{"text": "a"}, {"fail": "it broke"}], [call("get", "{}")], [{"refusal": "No."}], DONE]
    async with serving(scripted(*broken)) as served:
        await stream(served)
        await create(served, tools=[function()])
        await create(served, tools=[])
        with pytest.raises(APIStatusError):
            await create(served, model="unknown")
        with pytest.raises(APIStatusError):
            await create(served, previous_response_id="resp_unknown")
    check_all(otlp)
    agents, chats = otlp.named("invoke_agent"), otlp.named("chat ")
    assert [agent.is_error for agent in agents] == [True, False, False, True]
    assert chats[0].attributes["error.type"]
    assert chats[1].attributes["gen_ai.response.finish_reasons"] == ["tool_calls"]
    assert chats[3].attributes["error.type"] == "model_not_found"
    servers = otlp.named("POST ")
    assert [span.is_error for span in servers] == [True, False, False, False, False]
    assert [span.attributes["http.response.status_code"] for span in servers] == [200, 200, 200, 404, 400]
    models = {point.attributes["gen_ai.request.model"] for point in otlp.metric("gen_ai.client.inference.duration")}
    assert models == {"scripted", "_OTHER"}


async def test_a_client_that_leaves_cancels_its_spans(otlp: OtlpReceiver) -> None:
    async with serving(scripted([{"text": "a"}, {"wait_s": 30}])) as served:
        async with await create(served, stream=True) as events:
            async for event in events:
                if event.type == "response.output_text.delta":
                    break
        await until(lambda: not served.app.state.services.monitor.open_streams)
    check_all(otlp)
    for name in ("invoke_agent", "chat "):
        (span,) = otlp.named(name)
        assert span.attributes["error.type"] == "cancelled"


async def test_background_responses_stay_in_the_trace_of_their_creator(otlp: OtlpReceiver) -> None:
    turns = [DONE, [{"text": "a"}, {"fail": "it broke"}], [{"text": "a"}, {"wait_s": 30}]]
    async with (
        receiving() as receiver,
        serving(scripted(*turns), responses=SOON, webhooks={"receivers": [receiver.hook()]}) as served,
    ):
        headers = {"traceparent": PARENT}
        done = await create(served, background=True, extra_headers=headers)
        await finish(served, done.id)
        await receiver.come(1)
        await finish(served, (await create(served, background=True)).id)
        stuck = await create(served, background=True)
        await responses(served).cancel(stuck.id)
        await receiver.come(3)
    check_all(otlp, [PARENT.split("-")[2]])
    posts, agents, hooks = otlp.named("POST /v1/responses"), otlp.named("invoke_agent"), otlp.named("POST")
    hooks = [span for span in hooks if span.kind == "CLIENT"]
    assert posts[0].trace_id == PARENT.split("-")[1]
    for post, agent in zip((posts[0], posts[1], posts[2]), agents, strict=True):
        assert (agent.trace_id, agent.parent_id) == (post.trace_id, post.span_id)
        assert agent.links == [(post.trace_id, post.span_id)]
    assert [agent.attributes.get("error.type") for agent in agents] == [None, "server_error", "cancelled"]
    assert hooks[0].trace_id == posts[0].trace_id
    assert hooks[0].attributes["http.response.status_code"] == 200
    assert all("token=" not in str(span.attributes) for span in hooks)


async def test_a_wait_in_the_queue_is_a_span_of_the_same_trace(otlp: OtlpReceiver) -> None:
    slow = {"background": {"poll_s": 0.05, "max_running": 1}}
    async with serving(scripted([{"wait_s": 0.2}, {"text": "a"}]), responses=slow) as served:
        queued = [await create(served, background=True) for _ in range(3)]
        for each in queued:
            await finish(served, each.id)
    check_all(otlp)
    waits, posts = otlp.named("queue_wait"), otlp.named("POST ")
    assert [wait.trace_id for wait in waits] == [post.trace_id for post in posts[1:]]
    assert waits[1].end_s - waits[1].start_s > 0.3
    assert sum(point.total for point in otlp.metric("stack.responses.queued")) == 2


async def test_an_upstream_receives_the_trace_of_its_turn(otlp: OtlpReceiver) -> None:
    async with UpstreamServer(upstream_stream(text_chunks("Hello.")), error_answer(400)) as upstream:
        vllm = {"provider": "vllm", "base_url": upstream.base_url, "engine": "openai"}
        async with serving(vllm) as served:
            await create(served, model="fake-model", extra_headers={"traceparent": PARENT})
            sent = [one.headers["traceparent"] for one in upstream.chats]
            with pytest.raises(APIStatusError):
                await create(served, model="fake-model")
    check_all(otlp, [PARENT.split("-")[2]])
    chat, refused = otlp.named("chat ")
    assert sent == [f"00-{chat.trace_id}-{chat.span_id}-01"]
    assert chat.trace_id == PARENT.split("-")[1]
    assert (chat.kind, chat.attributes["gen_ai.provider.name"]) == ("CLIENT", "openai")
    assert chat.attributes["openai.api.type"] == "chat_completions"
    assert chat.attributes["server.address"] == "127.0.0.1"
    assert f":{chat.attributes['server.port']}/" in upstream.base_url
    assert refused.is_error
    assert {point.attributes["server.address"] for point in otlp.metric("gen_ai.client.inference.duration")} == {
        "127.0.0.1"
    }
