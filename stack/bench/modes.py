"""The loads of `stack bench`: for each mode the requests that one client sends between two of its pauses."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import orjson

from stack.bench.batches import run_batch
from stack.bench.connection import LoadClient
from stack.bench.figures import RequestFailed, Tally
from stack.bench.plan import BenchPlan, Mode
from stack.bench.stream_figures import StreamFigures, check_response

_POLL_S: Final = 0.1
_TOOL_NAME: Final = "read_clock"
_FUNCTION: Final[dict[str, Any]] = {
    "type": "function",
    "name": _TOOL_NAME,
    "description": "Return the time of day.",
    "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    "strict": True,
}


@dataclass
class VirtualClient:
    """State of one client of the load."""

    plan: BenchPlan
    http: LoadClient
    tally: Tally
    previous_id: str | None = None
    turn: int = 0

    async def stream(self, **fields: Any) -> dict[str, Any]:
        """Send a streamed request and return its response, which is counted. Raises RequestFailed."""
        body = self.plan.body(stream=True, **fields)
        reader = StreamFigures(self.tally, time.perf_counter())
        await self.http.send("POST", "/responses", body, reader.feed)
        response = reader.response()
        self.tally.count_response(response.get("usage"))
        return response


async def _run_stream(client: VirtualClient) -> None:
    started = time.perf_counter()
    await client.stream(input=client.plan.next_input())
    client.tally.whole.record(time.perf_counter() - started)


async def _run_request(client: VirtualClient) -> None:
    started = time.perf_counter()
    body = client.plan.body(input=client.plan.next_input())
    response = check_response(await client.http.load_json("POST", "/responses", body))
    client.tally.whole.record(time.perf_counter() - started)
    client.tally.count_response(response.get("usage"))


async def _run_turn(client: VirtualClient) -> None:
    """Send the next turn of the client's chain; a chain whose turn failed is given up."""
    started = time.perf_counter()
    previous = {"previous_response_id": client.previous_id} if client.previous_id else {}
    client.previous_id, turn = None, client.turn
    client.turn = 0
    response = await client.stream(input=client.plan.next_input(), **previous)
    client.tally.whole.record(time.perf_counter() - started)
    if turn + 1 < client.plan.turns:
        client.previous_id, client.turn = response["id"], turn + 1


async def _run_tool(client: VirtualClient) -> None:
    started = time.perf_counter()
    if client.plan.tool is not None:
        await client.stream(input=client.plan.next_input(), tools=[_hosted_tool(client.plan.tool)])
    else:
        choice = {"type": "function", "name": _TOOL_NAME}
        first = await client.stream(input=client.plan.next_input(), tools=[_FUNCTION], tool_choice=choice)
        calls = [item for item in first["output"] if item["type"] == "function_call"]
        if not calls:
            raise RequestFailed("no function call", "The model did not call the function that the request forces.")
        outputs = [{"type": "function_call_output", "call_id": call["call_id"], "output": "noon"} for call in calls]
        await client.stream(input=outputs, previous_response_id=first["id"], tools=[_FUNCTION])
    client.tally.whole.record(time.perf_counter() - started)


async def _run_background(client: VirtualClient) -> None:
    started = time.perf_counter()
    body = client.plan.body(input=client.plan.next_input(), background=True)
    response = await client.http.load_json("POST", "/responses", body)
    while response["status"] in ("queued", "in_progress"):
        if time.perf_counter() - started > client.plan.timeout_s:
            raise RequestFailed("timeout", f"The response did not end within {client.plan.timeout_s:g} s.")
        await asyncio.sleep(_POLL_S)
        response = await client.http.load_json("GET", f"/responses/{response['id']}")
    client.tally.whole.record(time.perf_counter() - started)
    client.tally.count_response(check_response(response).get("usage"))


async def _run_batch(client: VirtualClient) -> None:
    plan = client.plan
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/responses",
            "body": {"model": plan.model, "input": plan.next_input(), **plan.fields},
        }
        for number in range(plan.lines)
    ]
    await run_batch(plan, client.tally, b"\n".join(map(orjson.dumps, lines)))


def _hosted_tool(kind: str) -> dict[str, Any]:
    container = {"container": {"type": "auto"}} if kind == "code_interpreter" else {}
    return {"type": kind, **container}


MODES: Final[dict[Mode, Callable[[VirtualClient], Awaitable[None]]]] = {
    "streams": _run_stream,
    "requests": _run_request,
    "chains": _run_turn,
    "tools": _run_tool,
    "batches": _run_batch,
    "background": _run_background,
}
