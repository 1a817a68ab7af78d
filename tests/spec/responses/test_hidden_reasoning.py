"""`responses.hide_reasoning`: no client reads the text of reasoning, by whichever way, and the model still does."""

from typing import Any

import aiohttp
import pytest

from tests.support.laws.stream_laws import check_stream
from tests.support.sdk.requests import create, messages, stream, wire
from tests.support.servers.serving import Served, scripted, serving

THOUGHT = "The user wants a greeting."
TURNS: Any = ([{"reasoning": ["The user wants ", "a greeting."]}, {"text": "Hello!"}], [{"text": "Again."}])
HIDDEN = {"hide_reasoning": True}
INCLUDE = ["reasoning.encrypted_content"]


async def read(served: Served, path: str, body: Any = None) -> str:
    """The text of an answer."""
    method = "GET" if body is None else "POST"
    url = f"{served.url}/v1{path}"
    async with aiohttp.ClientSession() as session, session.request(method, url, json=body) as answer:
        assert answer.status == 200
        return await answer.text()


def reads_reasoning(text: str) -> bool:
    return "greeting" in text or "wants" in text


@pytest.mark.parametrize("hides", [True, False], ids=["hidden", "shown"])
@pytest.mark.parametrize("is_background", [False, True], ids=["live", "background"])
async def test_no_event_and_no_item_has_the_text(hides: bool, is_background: bool) -> None:
    """Streamed, stored, in its conversation, followed; without the setting, each of them has it."""
    async with serving(scripted(*TURNS), responses={"hide_reasoning": hides}) as served:
        conversation = (await served.client.conversations.create()).id
        events = await stream(served, include=INCLUDE, background=is_background, conversation=conversation)
        response = events[-1].response
        await create(served, conversation=conversation)
        paths = [f"/responses/{response.id}", f"/conversations/{conversation}/items"]
        paths += [f"/responses/{response.id}?stream=true"] if is_background else []
        texts = ["".join(event.model_dump_json() for event in events), *[await read(served, path) for path in paths]]
        assert [reads_reasoning(text) for text in texts] == [not hides] * len(texts)
        check_stream(events)
        assert [item.type for item in response.output] == ["reasoning", "message"]
        assert response.output[0].encrypted_content
        assert response.usage.output_tokens_details.reasoning_tokens > 0
        assert THOUGHT in str(messages(served))


async def test_encrypted_reasoning_comes_back_to_the_model() -> None:
    """The client stores the conversation itself."""
    async with serving(scripted(*TURNS), responses=HIDDEN) as served:
        first = await create(served, store=False, include=INCLUDE)
        items = [item.model_dump(exclude_none=True) for item in first.output]
        assert not reads_reasoning(str(items))
        await create(served, store=False, input=[*items, {"role": "user", "content": "Go on."}])
        assert THOUGHT in str(messages(served))


async def test_a_summary_is_that_of_a_model_and_never_the_reasoning_itself() -> None:
    """`summary_model` writes it; without one there is none."""
    small = scripted([{"text": "It greets."}], model="small")
    router = {"provider": "router", "providers": {"main": scripted(*TURNS, model="main"), "small": small}}
    async with serving(router, responses={**HIDDEN, "summary_model": "small"}) as served:
        response = await create(served, model="main", reasoning={"summary": "auto"})
        assert [part.text for part in response.output[0].summary] == ["It greets."]
        assert not reads_reasoning(response.model_dump_json())
    async with serving(scripted(*TURNS), responses=HIDDEN) as served:
        data = await wire(served, reasoning={"summary": "auto"})
        assert b'"summary":[]' in data
        assert not reads_reasoning(data.decode())


async def test_chat_completions_hide_it_too() -> None:
    """A stream of chunks hides it, and so does a whole completion."""
    body = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}
    for is_streamed in (False, True):
        async with serving(scripted(*TURNS), responses=HIDDEN) as served:
            text = await read(served, "/chat/completions", {**body, "stream": is_streamed})
            assert "Hello!" in text
            assert not reads_reasoning(text)
