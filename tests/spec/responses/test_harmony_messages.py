"""Each message that a Harmony model writes is an item, and comes back to the model as it wrote it."""

from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import pytest

from providers.common.counters import HARMONY_REPAIRS
from providers.inference.harmony.vocabulary import load_vocabulary
from tests.support.models import token_functions
from tests.support.sdk.requests import create, stream
from tests.support.servers.serving import Served, serving
from tests.support.servers.upstream_server import UpstreamServer, text_chunks
from tests.support.servers.upstream_server import stream as streamed

MODEL = "mine"
TOOL: dict[str, Any] = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}


@pytest.fixture
async def served() -> AsyncGenerator[Served]:
    function = "tests.support.models.token_functions:remembers"
    async with serving({"provider": "next_token", "function": function, "model": MODEL}) as served:
        yield served


def shape(response: Any) -> list[tuple[str, str]]:
    return [
        (item.type, item.arguments if item.type == "function_call" else "".join(part.text for part in item.content))
        for item in response.output
    ]


def written() -> str:
    """The newest prompt after the last user message, with its control tokens."""
    text = load_vocabulary().encoding.decode(token_functions.prompts[-1])
    return text.rpartition("<|start|>user")[2].partition("<|end|>")[2]


@pytest.mark.parametrize("way", ["chain", "items", "streamed"])
async def test_messages_of_one_channel_are_items_of_their_own_and_return_so(served: Served, way: str) -> None:
    """Two thoughts and two preambles before a call, kept here or by the client."""
    asking: dict[str, Any] = {"model": MODEL, "tools": [TOOL]}
    if way == "streamed":
        first = (await stream(served, input="twice", **asking))[-1].response
    else:
        first = await create(served, input="twice", **asking)
    assert shape(first) == [
        ("reasoning", "One."),
        ("reasoning", "Two."),
        ("message", "I look."),
        ("message", "I look again."),
        ("function_call", '{"city":"Rome"}'),
    ]
    result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "sunny"}
    if way == "items":
        history = [{"role": "user", "content": "twice"}, *(item.model_dump(exclude_none=True) for item in first.output)]
        await create(served, input=[*history, result], store=False, **asking)
    else:
        await create(served, input=[result], previous_response_id=first.id, **asking)
    assert written().startswith(f"<|start|>assistant{token_functions.SCRIPTS['twice']}<|start|>functions.weather")


async def test_two_answers_are_two_messages(served: Served) -> None:
    """A chat completion has one message, and shows them as lines."""
    response = await create(served, model=MODEL, input="both")
    assert shape(response) == [("message", "Yes."), ("message", "No.")]
    assert [item.phase for item in response.output] == ["final_answer", "final_answer"]
    messages: Any = [{"role": "user", "content": "both"}]
    whole = await served.client.chat.completions.create(model=MODEL, messages=messages)
    assert whole.choices[0].message.content == "Yes.\nNo."
    pieces = [
        chunk.choices[0].delta.content or ""
        async for chunk in await served.client.chat.completions.create(model=MODEL, messages=messages, stream=True)
    ]
    assert "".join(pieces) == "Yes.\nNo."


async def test_corrections_are_counted(served: Served) -> None:
    """The counts are on `/metrics`."""
    before = HARMONY_REPAIRS.count
    await create(served, model=MODEL, input="hi")
    assert HARMONY_REPAIRS.count == before
    response = await create(served, model=MODEL, input="bare")
    assert response.output_text == "Hello there!"
    assert HARMONY_REPAIRS.count > before
    async with aiohttp.ClientSession() as session, session.get(f"{served.url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    (count,) = (float(line.split()[-1]) for line in lines if line.startswith("stack_harmony_repairs_total "))
    assert count >= HARMONY_REPAIRS.count - before


async def test_summaries_follow_each_thought(served: Served) -> None:
    """A thought that is an item has a summary of its own."""
    response = await create(served, model=MODEL, input="twice", tools=[TOOL], reasoning={"summary": "auto"})
    thoughts = [item for item in response.output if item.type == "reasoning"]
    assert [[part.text for part in thought.summary] for thought in thoughts] == [["One."], ["Two."]]


async def test_a_server_of_chat_completions_reads_thoughts_in_a_row_as_one() -> None:
    """Its template has one text for the reasoning before a message."""
    thoughts = [
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}
        for text in ("One.", "Two.")
    ]
    answer = {"role": "assistant", "content": "Yes."}
    async with (
        UpstreamServer(streamed(text_chunks("Fine."))) as upstream,
        serving({"provider": "vllm", "base_url": upstream.base_url}) as served,
    ):
        history = [{"role": "user", "content": "a"}, *thoughts, answer, {"role": "user", "content": "b"}]
        await create(served, model="fake-model", input=history)
    (chat,) = upstream.chats
    assert [message["role"] for message in chat.json["messages"]] == ["user", "assistant", "user"]
    assert chat.json["messages"][1]["reasoning"] == "One.\nTwo."
