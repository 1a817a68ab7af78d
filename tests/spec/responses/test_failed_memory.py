"""Answers that end in failure leave nothing in memory, however large they were; and neither do turns of sessions."""

import gc
import json
import types
from collections.abc import Generator, Sequence
from contextlib import suppress
from typing import Any

import pytest
from openai import APIError
from openai.types.responses import Response

from apis.errors import StackError
from apis.responses import CreateResponse
from providers.agents.transition import Transition
from providers.responses.events.open_items import GrowingText
from providers.responses.run.agent_loop import AgentLoop
from tests.providers.inference.remote import LIMITS, ROLE, sent
from tests.support.sdk.answer_shapes import call
from tests.support.sdk.input_model import MODEL, play
from tests.support.sdk.requests import create, responses, stream
from tests.support.sdk.sessions import run_session
from tests.support.servers.serving import Served, scripted, serving
from tests.support.servers.upstream_server import CUT, Act, UpstreamServer, delta_chunk, event, http_chunk

WAIT = [call("wait_for_subagents", "{}", id="c2")]
TEXT = [delta_chunk(content="z" * 10_000) for _ in range(4)]
FAILURES: dict[str, Sequence[Act]] = {
    "too large": sent(ROLE, *TEXT, *TEXT),
    "broken off": [*sent(ROLE, *TEXT), CUT],
    "not valid": [*sent(ROLE, *TEXT), http_chunk(b"data: {no\n\n")],
    "an error": [*sent(ROLE, *TEXT), http_chunk(event({"error": {"message": "no", "code": 500}}))],
}


@pytest.fixture
def garbage() -> Generator[list[Any]]:
    """The objects that nothing but a collection frees, once the test has called `collect`."""
    gc.collect()
    gc.freeze()  # what the run holds already: each collection would visit it
    gc.disable()
    try:
        yield gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def collect() -> None:
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)


async def fail(served: Served, way: str) -> None:
    """Make a response that fails: with its last event, or with a status where all came in one piece."""
    fields: dict[str, Any] = {"model": "fake-model", "tools": []}
    with suppress(APIError):
        if way == "background":
            response = await create(served, background=True, **fields)
            events = [event async for event in await responses(served).retrieve(response.id, stream=True)]
        elif way == "streamed":
            events = await stream(served, store=False, **fields)
        else:
            events = [await create(served, store=False, **fields)]
        assert getattr(events[-1], "type", "") == "response.failed"


@pytest.mark.parametrize("failure", FAILURES)
async def test_a_failed_answer_leaves_no_cycle_of_references(garbage: list[Any], failure: str) -> None:
    """Neither the frames of a failed run nor its error refer to themselves, so its text is freed with them."""
    async with (
        UpstreamServer(FAILURES[failure]) as upstream,
        serving({"provider": "vllm", "base_url": upstream.base_url, **LIMITS, "max_answer_bytes": 50_000}) as served,
    ):
        for way in ("streamed", "whole", "background"):
            await fail(served, way)
            collect()
            cycle = [each for each in garbage if isinstance(each, StackError | Response | GrowingText)]
            frames = [each.f_code.co_qualname for each in garbage if isinstance(each, types.FrameType)]
            garbage.clear()
            assert not cycle
            ours = ("ResponseRunner", "Stream", "EventStream", "AgentLoop", "RunExecutor")
            assert not [name for name in frames if name.startswith(ours)]


async def test_a_turn_of_a_session_leaves_no_cycle_of_references(garbage: list[Any]) -> None:
    """Neither its events and its agent nor the background response that it was are held until a full collection."""
    async with serving(scripted([{"text": "ok"}])) as served:
        await run_session(served.client)
        collect()
        garbage.clear()
        await run_session(served.client, instructions="z" * 100_000)
        collect()
        ours = (Transition, CreateResponse, AgentLoop, StackError, Response)
        assert not [type(each).__name__ for each in garbage if isinstance(each, ours)]
        assert not [each.f_code.co_qualname for each in garbage if isinstance(each, types.FrameType)]


async def test_a_session_with_subagents_leaves_no_cycle_of_references(garbage: list[Any]) -> None:
    """A subagent and its session refer to each other while one of them is changed."""
    async with serving(MODEL) as served:
        text = play([call("create_subagent", json.dumps({"task": play([{"text": "a"}])}), id="c1")], WAIT)
        enabled = {"enabled": True}
        await run_session(served.client, text, multi_agent=enabled)
        collect()
        garbage.clear()
        session = await run_session(served.client, text, multi_agent=enabled)
        assert session.status == "idle"
        collect()
        assert not [each.ref for each in garbage if isinstance(each, Transition)]
