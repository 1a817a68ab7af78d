"""The tiny gpt-oss on llama.cpp, as an OpenAI client sees it: the conversations that the stack's own engine holds."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import pytest_asyncio

from tests.support.models.harmony_conversations import (
    CONVERSATIONS,
    GRAMMAR_CONVERSATIONS,
    MODEL,
    OPTIONS,
    Conversation,
)
from tests.support.models.tiny_gguf import tiny_gpt_oss_gguf
from tests.support.servers.serving import Served, serving

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400, func_only=True)]


def section() -> dict[str, Any]:
    """Return the inference section of a stack that serves it."""
    return {
        "provider": "llama_cpp",
        "model_path": str(tiny_gpt_oss_gguf()),
        "model": MODEL,
        "threads": 1,
        "parallel": 4,
        "context_tokens": 4096,
        "harmony": OPTIONS,
    }


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served() -> AsyncGenerator[Served]:
    async with serving(await asyncio.to_thread(section)) as stack:
        yield stack


@pytest.mark.parametrize("conversation", [*CONVERSATIONS, *GRAMMAR_CONVERSATIONS], ids=lambda each: each.__name__)
async def test_conversation(conversation: Conversation, served: Served) -> None:
    await conversation(served.client)
