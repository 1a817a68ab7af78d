"""Requests that repeat one part up to a limit: a bounded status, and the event loop free for others in between.

A client in a thread sends the request, so that the turns of the event loop are the server's alone.
"""

import asyncio
import http.client
import secrets
from collections.abc import Awaitable, Callable
from math import inf
from typing import Any
from urllib.parse import urlsplit

import orjson
import pytest
from httpx import AsyncClient
from websockets.asyncio.client import connect

from providers.inference.scripted import Scripted
from tests.support.servers.loop_turns import measured_turns
from tests.support.servers.serving import Served, scripted, serving
from tests.support.servers.traced_memory import traced_memory
from tests.support.waiting import until

Json = dict[str, Any]
SOME, MANY = 5_000, 25_000
MAX_TURN_S = 0.1
"""Longest turn of the event loop, for SOME as for MANY repetitions."""
USER: Json = {"role": "user", "content": "hi"}


def talk(count: int) -> list[Json]:
    return [{"role": ("user", "assistant")[index % 2], "content": f"text {index}"} for index in range(count)]


def calls(count: int) -> list[Json]:
    pairs = (
        (
            {"type": "function_call", "call_id": f"c{index}", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": f"c{index}", "output": "done"},
        )
        for index in range(count // 2)
    )
    return [item for pair in pairs for item in pair]


def named_calls(count: int) -> list[Json]:
    numbers = range(count // 2)
    begun = [{"type": "function_call", "call_id": f"c{n}", "name": f"f{n}", "arguments": "{}"} for n in numbers]
    return [*begun, *({"type": "function_call_output", "name": f"f{n}", "output": "x"} for n in reversed(numbers))]


def junk_reasoning(count: int) -> list[Json]:
    return [{"type": "reasoning", "summary": [], "encrypted_content": "A" * 200} for _ in range(count // 2)]


def unknown_reasoning(count: int) -> list[Json]:
    ids = [f"rs_{secrets.token_hex(22)}{index % 65536:04x}" for index in range(count // 2)]
    return [{"type": "reasoning", "id": item_id, "summary": []} for item_id in ids]


def searches(count: int) -> list[Json]:
    action = {"type": "search", "query": "q"}
    kind = "web_search_call"
    return [{"type": kind, "id": f"ws_{index}", "status": "completed", "action": action} for index in range(count // 2)]


ITEMS: dict[str, Callable[[int], list[Json]]] = {
    "messages": talk,
    "calls": calls,
    "calls by name": named_calls,
    "reasoning of others": junk_reasoning,
    "reasoning by id": unknown_reasoning,
    "searches": searches,
}


def wide_schema(name: str) -> Json:
    names = [f"{name}{index}" for index in range(SOME)]
    properties = {each: {"type": "string"} for each in names}
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def functions(*schemas: Json) -> Json:
    return {
        "tools": [{"type": "function", "name": f"f{at}", "parameters": schema} for at, schema in enumerate(schemas)]
    }


def wide_format(attempt: int) -> Json:
    schema = wide_schema(f"a{attempt}_")
    return {"text": {"format": {"type": "json_schema", "name": "a", "strict": True, "schema": schema}}}


def wide_functions(attempt: int) -> Json:
    return functions(*(wide_schema(f"{name}{attempt}_") for name in "bcde"))


def wrong_functions(attempt: int) -> Json:
    first, second, third = (wide_schema(f"{name}{attempt}_") for name in "fgh")
    return functions(first, second, {**third, "not": {}})


SCHEMAS: dict[str, tuple[Callable[[int], Json], int]] = {
    "format": (wide_format, 200),
    "functions": (wide_functions, 200),
    "a wrong function": (wrong_functions, 400),
}
PATHS = ("/v1/responses", "/v1/responses/input_tokens", "/v1/responses/compact")


def post(served: Served, path: str, body: bytes) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(urlsplit(served.url).netloc, timeout=60)
    connection.request("POST", path, body, {"content-type": "application/json"})
    response = connection.getresponse()
    answer = response.read()
    connection.close()
    return response.status, answer


def send(served: Served, path: str, **fields: Any) -> bytes:
    status, answer = post(served, path, orjson.dumps({"model": "scripted", **fields}))
    assert status == 200
    return answer


async def load_all(served: Served, path: str, **fields: Any) -> None:
    """Send a request, for what only the first one loads."""
    await asyncio.to_thread(send, served, path, **fields)


async def longest_turn(served: Served, path: str, status: int = 200, **fields: Any) -> float:
    """Return the longest turn of the event loop, in seconds, that a request costs. One that is too long is measured
    again, because other programs on the core only add to it."""

    async def same_fields(_attempt: int) -> Json:
        return fields

    return await longest_turn_of_new(served, path, same_fields, status)


async def longest_turn_of_new(
    served: Served, path: str, make_fields: Callable[[int], Awaitable[Json]], status: int = 200
) -> float:
    """Return the same for a request of which the server keeps a part: each measurement sends a new one."""
    least_s = inf
    for attempt in range(3):
        body = orjson.dumps({"model": "scripted", **await make_fields(attempt)})
        with measured_turns() as turns:
            assert (await asyncio.to_thread(post, served, path, body))[0] == status
        least_s = min(least_s, turns.longest_s)
        if least_s < MAX_TURN_S:
            break
    return least_s


@pytest.mark.parametrize("kind", ITEMS)
async def test_many_items_leave_turns_of_the_event_loop_to_others(kind: str) -> None:
    """C1, C2, S13, the table of crafted requests: nothing grows with the square of the items."""
    items = [*ITEMS[kind](SOME), USER]
    async with serving(scripted([{"text": "ok"}])) as served:
        for path in PATHS if kind == "messages" else PATHS[:1]:
            await load_all(served, path, input=[*ITEMS[kind](2), USER])
            assert await longest_turn(served, path, input=items) < MAX_TURN_S


@pytest.mark.long
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ITEMS)
async def test_as_many_items_as_a_request_may_hold_leave_turns_to_others(kind: str, path: str) -> None:
    """Nothing grows with the square of the items, also at the size of the largest bodies."""
    items = [*ITEMS[kind](MANY), USER]
    async with serving(scripted([{"text": "ok"}])) as served:
        await load_all(served, path, input=[*ITEMS[kind](2), USER])
        assert await longest_turn(served, path, input=items) < MAX_TURN_S


@pytest.mark.parametrize("kind", SCHEMAS)
async def test_large_schemas_leave_turns_of_the_event_loop_to_others(kind: str) -> None:
    """The table of crafted requests: strict schemas of 5,000 properties, and functions of a megabyte together."""
    make_schemas, status = SCHEMAS[kind]

    async def make_fields(attempt: int) -> Json:
        return {"input": "hi", **make_schemas(attempt)}

    async with serving(scripted([{"text": "ok"}])) as served:
        await load_all(served, PATHS[1], input="hi", tools=[{"type": "function", "name": "f", "parameters": {}}])
        assert await longest_turn_of_new(served, PATHS[1], make_fields, status) < MAX_TURN_S


async def test_the_items_of_a_window_are_read_in_turns() -> None:
    """The table of crafted requests: a conversation of which the model reads a part."""
    async with serving(scripted([{"text": "ok"}])) as served:
        window: Json = {"reasoning": {"context": "current_turn"}}
        await load_all(served, PATHS[0], input=[*talk(2), USER], **window)
        assert await longest_turn(served, PATHS[0], input=[*talk(MANY), USER], **window) < MAX_TURN_S


async def test_a_chain_of_many_items_leaves_turns_to_others() -> None:
    """The table of crafted requests: the items that are stored, not those that are sent."""
    async with serving(scripted([{"text": "ok"}])) as served:

        async def store(items: list[Json]) -> Json:
            stored = orjson.loads(await asyncio.to_thread(send, served, PATHS[0], input=items))
            return {"input": "go", "previous_response_id": stored["id"]}

        await load_all(served, PATHS[0], **await store([*talk(2), USER]))

        async def follow_many(_attempt: int) -> Json:
            return await store([*talk(MANY // 2), USER])

        assert await longest_turn_of_new(served, PATHS[0], follow_many) < MAX_TURN_S


TEXT_BYTES = 8 * 1024 * 1024
JSON = {"content-type": "application/json"}
PAUSED = scripted([{"text": "begun"}, {"wait_s": 30}, {"text": "done"}])
LARGE: Json = {
    "model": "scripted",
    "stream": True,
    "store": False,
    "input": [{"role": "user", "content": "x" * TEXT_BYTES}],
}


async def test_a_large_body_is_in_memory_once_while_it_is_answered() -> None:
    """The bytes of the body are freed once they are parsed."""
    body = orjson.dumps(LARGE)
    async with serving(PAUSED) as served, AsyncClient() as client:
        with traced_memory() as memory:
            async with client.stream("POST", f"{served.url}{PATHS[0]}", content=body, headers=JSON) as response:
                async for line in response.aiter_lines():
                    if line.startswith("event: response.output_text.delta"):
                        break
                assert TEXT_BYTES <= memory.held_bytes() < 1.5 * TEXT_BYTES


async def test_a_client_that_leaves_after_a_large_body_is_noticed() -> None:
    """Its response is not generated to the end."""
    async with serving(PAUSED) as served, AsyncClient() as client:
        content = orjson.dumps(LARGE)
        async with client.stream("POST", f"{served.url}{PATHS[0]}", content=content, headers=JSON) as response:
            async for line in response.aiter_lines():
                if line.startswith("event: response.output_text.delta"):
                    break
        model = served.stack.inference
        assert isinstance(model, Scripted)
        await until(lambda: model.abandoned_chats)


async def test_a_large_message_of_a_websocket_is_in_memory_once_while_it_is_answered() -> None:
    """The text of the frame and the fields of its message are not in memory together."""
    text = orjson.dumps({"type": "response.create", **LARGE}).decode()
    async with serving(PAUSED) as served:
        url = f"ws{served.url.removeprefix('http')}/v1/responses"
        async with connect(url, max_size=None, compression=None) as socket:
            await socket.send(orjson.dumps({"type": "response.create", "model": "none", "input": "hi"}).decode())
            await socket.recv()
            with traced_memory() as memory:
                await socket.send(text)
                while orjson.loads(await socket.recv())["type"] != "response.output_text.delta":
                    pass
                assert TEXT_BYTES <= memory.held_bytes() < 1.5 * TEXT_BYTES
