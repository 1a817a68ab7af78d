"""Traces that cross connections and processes: WebSockets, hand-overs and workers that were killed."""

import asyncio
from pathlib import Path

import pytest

from tests.spec.state.test_handover import ECHO, MCP, STUCK, leave, two, whole
from tests.support.laws.telemetry_laws import check_all, check_span
from tests.support.sdk.requests import responses
from tests.support.sdk.websockets import talking
from tests.support.servers.mcp_stack import DONE
from tests.support.servers.otlp_receiver import OtlpReceiver
from tests.support.servers.serving import serving
from tests.support.servers.worker_processes import worker_processes

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


async def test_each_create_on_a_websocket_is_a_trace_of_its_own_linked_to_the_session(otlp: OtlpReceiver) -> None:
    async with serving() as served, talking(served, traceparent=PARENT) as talk:
        first = await talk.ask(store=False)
        await talk.ask(store=False, previous_response_id=first.id)
        await talk.refused(model=1)
    check_all(otlp, [PARENT.split("-")[2]])
    (session,) = otlp.named("GET /v1/responses")
    creates, agents = otlp.named("response.create"), otlp.named("invoke_agent")
    assert (session.trace_id, session.attributes["http.response.status_code"]) == (PARENT.split("-")[1], 101)
    assert len({span.trace_id for span in (session, *creates)}) == 4
    assert all(create.links == [(session.trace_id, session.span_id)] for create in creates)
    assert [agent.parent_id for agent in agents] == [create.span_id for create in creates[:2]]
    assert agents[1].links == [(agents[0].trace_id, agents[0].span_id)]
    assert [create.attributes.get("error.type") for create in creates] == [None, None, "invalid_type"]


async def test_a_worker_that_takes_over_continues_the_trace(otlp: OtlpReceiver, tmp_path: Path) -> None:
    async with two(tmp_path, [ECHO, STUCK], [DONE]) as (one, other):
        headers = {"traceparent": PARENT}
        queued = await responses(one).create(
            model="scripted", input="hi", background=True, tools=[MCP], extra_headers=headers
        )
        await leave(one, queued.id, "response.mcp_call.completed")
        await whole(other, queued.id)
    check_all(otlp, [PARENT.split("-")[2]])
    before, after = otlp.named("invoke_agent")
    (post,) = otlp.named("POST /v1/responses")
    assert {span.trace_id for span in (post, before, after)} == {PARENT.split("-")[1]}
    assert before.parent_id == after.parent_id == post.span_id
    assert (before.attributes["stack.run.handed_over"], before.is_error) == (True, False)
    assert (after.attributes["stack.run.attempt"], after.is_error) == (2, False)
    (resumed,) = otlp.metric("stack.responses.resumed")
    assert resumed.total == 1


@pytest.mark.long
async def test_the_trace_goes_on_after_a_worker_was_killed(otlp: OtlpReceiver, tmp_path: Path) -> None:
    """SIGKILL in the middle of a hosted call: the other worker's spans are in the trace of the client's request."""
    store = {"provider": "sqlite", "path": str(tmp_path / "store.db")}
    async with worker_processes(tmp_path, store, slow_s=3) as workers:
        headers = {"traceparent": PARENT}
        response = await workers.ask(
            "POST",
            "/responses",
            json={"model": "scripted", "input": "search", "background": True, "tools": [{"type": "web_search"}]},
            headers=headers,
        )
        await workers.until(response.json()["id"], "response.web_search_call.in_progress")
        for process in workers.processes():
            process.kill()
        await workers.ended(response.json()["id"], 60)
        await asyncio.to_thread(otlp.wait_for, lambda: otlp.named("invoke_agent"), 20)
    for span in otlp.spans:
        check_span(span)
    agents = otlp.named("invoke_agent")
    assert agents[-1].attributes["stack.run.attempt"] == 2
    assert {agent.trace_id for agent in agents} == {PARENT.split("-")[1]}
    assert all(agent.links[0][0] == PARENT.split("-")[1] for agent in agents)
