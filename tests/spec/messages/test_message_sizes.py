"""Messages that repeat one part up to a limit: the event loop is free for others in between, and memory is bounded."""

from collections.abc import Callable
from typing import Any

import orjson
import pytest
from httpx import AsyncClient

from tests.spec.responses.test_adversarial_sizes import (
    JSON,
    MAX_TURN_S,
    PAUSED,
    SOME,
    TEXT_BYTES,
    USER,
    load_all,
    longest_turn,
    talk,
)
from tests.support.servers.serving import scripted, serving
from tests.support.servers.traced_memory import traced_memory

Json = dict[str, Any]


def blocks(count: int) -> list[Json]:
    return [{"role": "user", "content": [{"type": "text", "text": f"text {index}"} for index in range(count)]}]


def calls(count: int) -> list[Json]:
    ids = [f"c{index}" for index in range(count // 2)]
    uses: list[Json] = [{"type": "tool_use", "id": each, "name": "f", "input": {}} for each in ids]
    results = [{"type": "tool_result", "tool_use_id": each, "content": "done"} for each in ids]
    return [USER, {"role": "assistant", "content": uses}, {"role": "user", "content": results}]


def thoughts(count: int) -> list[Json]:
    thought = {"type": "thinking", "thinking": "hm", "signature": "A" * 200}
    return [USER, {"role": "assistant", "content": [thought for _ in range(count // 2)]}, USER]


TURNS: dict[str, Callable[[int], list[Json]]] = {
    "messages": lambda count: [*talk(count), USER],
    "blocks": blocks,
    "calls": calls,
    "thinking of others": thoughts,
}


@pytest.mark.parametrize("kind", TURNS)
async def test_many_parts_of_a_message_leave_turns_of_the_event_loop_to_others(kind: str) -> None:
    async with serving(scripted([{"text": "ok"}])) as served:
        await load_all(served, "/v1/messages", messages=TURNS[kind](2), max_tokens=9)
        assert await longest_turn(served, "/v1/messages", messages=TURNS[kind](SOME), max_tokens=9) < MAX_TURN_S


async def test_a_large_message_is_in_memory_once_while_it_is_answered() -> None:
    """The body, the message and the response's request share its text."""
    turns = [{"role": "user", "content": "x" * TEXT_BYTES}]
    body = orjson.dumps({"model": "scripted", "stream": True, "max_tokens": 9, "messages": turns})
    async with serving(PAUSED) as served, AsyncClient() as client:
        with traced_memory() as memory:
            async with client.stream("POST", f"{served.url}/v1/messages", content=body, headers=JSON) as response:
                async for line in response.aiter_lines():
                    if line.startswith("event: content_block_delta"):
                        break
                assert TEXT_BYTES <= memory.held_bytes() < 1.5 * TEXT_BYTES
