"""Starts remote providers with short limits, for tests against an UpstreamServer."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from apis.chat import ChatRequest
from apis.deltas import Delta
from apis.errors import StackError
from providers.inference.vllm import VLLM
from tests.support.servers.upstream_server import (
    Act,
    Answer,
    Chunk,
    UpstreamServer,
    delta_chunk,
    event,
    head,
    http_chunk,
)

ROLE = delta_chunk(role="assistant", content="")

LIMITS: dict[str, Any] = {
    "connect_timeout_s": 5,
    "headers_timeout_s": 5,
    "first_token_timeout_s": 5,
    "token_gap_timeout_s": 5,
    "retry_delay_s": 0.001,
    "models_cache_s": 0,
    "lists_all_models": False,
    "health_interval_s": 0,
}


@asynccontextmanager
async def started(base_url: str | list[str], **fields: Any) -> AsyncGenerator[VLLM]:
    """A VLLM that runs."""
    provider = VLLM(VLLM.Config.model_validate({**LIMITS, "base_url": base_url, **fields}))
    await provider.start()
    try:
        yield provider
    finally:
        await provider.close()


def chat_request(**fields: Any) -> ChatRequest:
    """A request with the least in it."""
    return ChatRequest.model_validate(
        {"model": "fake-model", "messages": [{"role": "user", "content": "hi"}], **fields}
    )


def sent(*chunks: Chunk) -> list[Act]:
    """The beginning of an answer that has no end yet."""
    return [head(), *(http_chunk(event(chunk)) for chunk in chunks)]


async def failure(
    answer: Answer, request: ChatRequest | None = None, /, **fields: Any
) -> tuple[StackError, list[Delta]]:
    """How a chat fails on this answer, without retries unless they are asked for, and what came before."""
    deltas: list[Delta] = []

    async def read(vllm: VLLM) -> None:
        async for step in vllm.chat(request or chat_request()):
            deltas.extend(step)

    async with UpstreamServer(answer) as upstream, started(upstream.base_url, **{"max_retries": 0, **fields}) as vllm:
        with pytest.raises(StackError) as caught:
            await read(vllm)
    return caught.value, deltas
