"""The end of a process as clients of the official SDK see it: each gets an error or a last event, and may ask again."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from openai import AsyncOpenAI, InternalServerError
from openai.types.responses import Response

from tests.support.sdk.client import sdk_client
from tests.support.servers.forked_process import forked_stack

LONG: list[dict[str, Any]] = [{"text": "once "}, {"wait_s": 60}, {"text": "more"}]
ASK: dict[str, Any] = {"model": "scripted", "input": "hi"}
CHAT: dict[str, Any] = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}


@dataclass
class Ending:
    """A stack with a short grace period, and a client that repeats nothing."""

    client: AsyncOpenAI
    pid: int
    file: Path

    def end(self, number: int = signal.SIGTERM) -> None:
        os.kill(self.pid, number)


@asynccontextmanager
async def ending(folder: Path, grace_s: float = 0.5) -> AsyncGenerator[Ending]:
    sections: dict[str, Any] = {
        "server": {"grace_period_s": grace_s},
        "inference": {"provider": "scripted", "turns": [LONG]},
        "kv_store": {"provider": "sqlite", "path": str(folder / "store.db")},
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(sections))
    async with forked_stack(str(file), cwd=folder) as (url, pid), sdk_client(url, "none") as client:
        yield Ending(client.with_options(max_retries=0), pid, file)


async def find_response(stack: Ending, response_id: str) -> Response:
    """The response as the next process on the same store shows it."""
    async with forked_stack(str(stack.file), cwd=stack.file.parent) as (url, _), sdk_client(url, "none") as client:
        return await client.responses.retrieve(response_id)


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGINT, signal.SIGINT]], ids=["grace", "twice"])
async def test_a_stream_that_is_cut_off_ends_with_a_failure_and_is_stored_as_failed(
    tmp_path: Path, signals: list[int]
) -> None:
    """At the end of the grace period and at a second Ctrl-C; it does not end as cancelled."""
    async with ending(tmp_path, 0.5 if len(signals) == 1 else 30) as stack:
        events = [event async for event in _interrupted(stack, signals)]
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.code == "server_error"
    stored = await find_response(stack, last.response.id)
    assert (stored.status, stored.error) == ("failed", last.response.error)
    assert [item.status for item in stored.output if item.type == "message"] == ["incomplete"]


async def _interrupted(stack: Ending, signals: list[int]) -> AsyncGenerator[Any]:
    create: Any = stack.client.responses.create
    async with await create(**ASK, stream=True) as events:
        async for event in events:
            yield event
            if event.type == "response.output_text.delta":
                for number in signals:
                    stack.end(number)
                    await asyncio.sleep(0.3)


async def test_what_is_not_streamed_is_a_503_that_a_client_may_repeat(tmp_path: Path) -> None:
    """OpenAI's body with `retry-after`, for responses and chat completions."""
    async with ending(tmp_path) as stack:
        requests: list[Any] = [stack.client.responses.create(**ASK), stack.client.chat.completions.create(**CHAT)]
        tasks = [asyncio.ensure_future(each) for each in requests]
        await asyncio.sleep(0.3)
        stack.end()
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, InternalServerError)
            assert (error.status_code, error.code) == (503, "overloaded")
            assert error.response.headers["retry-after"] == "1"


async def test_a_chat_stream_that_is_cut_off_ends_with_an_error(tmp_path: Path) -> None:
    """The error is that of a failed upstream, and `[DONE]` follows."""
    async with ending(tmp_path) as stack:
        create: Any = stack.client.chat.completions.with_streaming_response.create
        async with create(**CHAT, stream=True) as answer:
            text = ""
            async for piece in answer.iter_text():
                if not text:
                    stack.end()
                text += piece
    assert '"code":"overloaded"' in text
    assert text.endswith("data: [DONE]\n\n")
