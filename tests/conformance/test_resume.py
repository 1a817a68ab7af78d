"""Background streams that are cut anywhere and read on elsewhere: the pieces together are the log, byte for byte.

STACK_CUT_STREAMS says how many streams of some 290 events (20 by default), STACK_CUT_SEED what is drawn; the seed is
printed.
"""

import asyncio
import os
import random
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest

from tests.support.laws.stream_laws import check_frames, check_stream
from tests.support.sdk.requests import responses
from tests.support.servers.serving import Served, scripted, serving

STREAMS = int(os.environ.get("STACK_CUT_STREAMS", "20"))
pytestmark = pytest.mark.timeout(120 + STREAMS)
SEED = int(os.environ.get("STACK_CUT_SEED", "0")) or random.SystemRandom().getrandbits(32)
TURN: list[dict[str, Any]] = [
    {"reasoning": ["think "] * 10},
    {"text": ["é\N{BELL} "] * 30},
    {"wait_s": 0.1},
    {"text": ["b\n\n"] * 30},
    {"wait_s": 0.1},
    {"text": ["c"] * 200},
]
BACKGROUND = {"background": {"poll_s": 0.1, "lease_s": 30}}  # no worker loses its lease here, however busy the machine
TOGETHER = 10


async def read(served: Served, method: str, path: str, most: int | None, **fields: Any) -> bytes:
    """The stream's bytes, or the first `most` of them: then the connection is cut."""
    async with aiohttp.ClientSession() as session, session.request(method, served.url + path, **fields) as answer:
        assert answer.status == 200, await answer.text()
        raw = b""
        async for chunk in answer.content.iter_any():
            raw += chunk
            if most is not None and len(raw) >= most:
                answer.close()
                return raw[:most]
        return raw


def whole_frames(raw: bytes) -> list[bytes]:
    frames = raw.split(b"\n\n")[:-1]
    return [frame for frame in frames if not frame.startswith(b":")]


async def cut_up(stacks: list[Served], dice: random.Random) -> tuple[list[bytes], str]:
    """The frames of one stream, read in pieces from any of the stacks, and the response's id."""
    body = {"model": "scripted", "input": "hi", "background": True, "stream": True}
    raw = await read(dice.choice(stacks), "POST", "/v1/responses", dice.randint(2000, 20_000), json=body)
    frames = whole_frames(raw)
    response_id = raw.partition(b'"id":"')[2].partition(b'"')[0].decode()
    cuts = dice.randint(0, 7)
    while not frames or frames[-1] != b"data: [DONE]":
        path = f"/v1/responses/{response_id}?stream=true&starting_after={len(frames) - 1}"
        cut = dice.choice((dice.randint(0, 2000), dice.randint(0, 40_000))) if cuts else None
        cuts -= cut is not None
        frames += whole_frames(await read(dice.choice(stacks), "GET", path if frames else path[:-18], cut))
    return frames, response_id


async def test_a_stream_cut_anywhere_is_read_on_from_any_worker(shared_store: dict[str, Any]) -> None:
    print(f"seed {SEED}")
    dice = random.Random(SEED)
    async with AsyncExitStack() as serving_:
        stacks: list[Served] = []
        for _ in range(2):
            served = await serving_.enter_async_context(
                serving(scripted(TURN), kv_store=shared_store, responses=BACKGROUND)
            )
            served.streams.check = False  # most of the streams begin in the middle
            stacks.append(served)
        events = 0
        for _ in range(max(1, STREAMS // TOGETHER)):
            async with asyncio.timeout(60):
                cut = await asyncio.gather(*(cut_up(stacks, dice) for _ in range(TOGETHER)))
            for frames, response_id in cut:
                raw = b"".join(frame + b"\n\n" for frame in frames)
                received_events = check_frames(raw)
                check_stream(received_events)
                events += len(received_events)
                for served in stacks:
                    assert await read(served, "GET", f"/v1/responses/{response_id}?stream=true", None) == raw
                response = await responses(stacks[0]).retrieve(response_id)
                assert response.output_text == "".join("".join(line.get("text", ())) for line in TURN)
    print(f"{events} events of streams cut up to 8 times over {shared_store['provider']}: each stream is its log")
