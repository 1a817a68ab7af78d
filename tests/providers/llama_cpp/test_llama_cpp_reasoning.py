"""The engine's client with reasoning tags, on a model that a grammar makes write them."""

import asyncio
from pathlib import Path

from apis.deltas import Delta, ReasoningDelta
from providers.common.net.http.client import HttpClient
from providers.common.recent import RecentEntries
from providers.inference.chat_completions.reasoning_tags import TAGS_PRESETS
from providers.inference.chat_completions.refusals import ChatForms
from providers.inference.llama_cpp.client import EngineClient
from providers.inference.llama_cpp.engine import LlamaCppEngine, LlamaCppSettings
from tests.providers.llama_cpp.asking import MODEL, chat_request, text_of


async def test_tags_in_the_models_text_are_reasoning(small_file: Path) -> None:
    engine = LlamaCppEngine(LlamaCppSettings(MODEL, str(small_file), 512, 1, 1, {}), 60)
    await asyncio.wait_for(engine.start(), 60)
    http = HttpClient(idle_s=0)
    try:
        client = EngineClient(engine.address(), http, 60, RecentEntries(16), ChatForms(), TAGS_PRESETS["think"])
        grammar = '%llguidance {}\nstart: "<think>\\nI plan.\\n</think>\\n\\nHello <think>."'
        deltas: list[Delta] = []
        async for batch in client.chat(chat_request(max_completion_tokens=60), grammar=grammar):
            assert batch
            deltas += batch
    finally:
        await http.close()
        await engine.close()
    assert "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta)) == "I plan."
    assert text_of(deltas) == "Hello <think>."
