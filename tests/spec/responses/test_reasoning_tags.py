"""A model whose server leaves its reasoning in the text, as an OpenAI client sees it: reasoning items all the same."""

from typing import Any

import pytest

from tests.support.servers.engine_answers import doors, recording
from tests.support.servers.serving import serving
from tests.support.servers.upstream_server import Chunk, UpstreamServer, delta_chunk, stream, text_chunks

ANSWER = "<think>\nI add.\n</think>\n\nIt is 2."
TOOL: dict[str, Any] = {"type": "function", "name": "add", "parameters": {}, "strict": False}


def call_chunks() -> list[Chunk]:
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    return [
        *(delta_chunk(content=piece) for piece in ("<th", "ink>I look", ".</think", ">")),
        delta_chunk(tool_calls=[call]),
        delta_chunk("tool_calls"),
    ]


@pytest.mark.parametrize("engine", ["vllm", "openai"])
async def test_tagged_reasoning_is_a_reasoning_item_and_is_replayed_between_calls(engine: str) -> None:
    async with UpstreamServer(stream(call_chunks()), stream(text_chunks(*ANSWER))) as upstream:
        section = {"provider": "vllm", "base_url": upstream.base_url, "engine": engine, "reasoning_tags": "think"}
        async with serving({**section, "lists_all_models": False, "health_interval_s": 0}) as stack:
            create: Any = stack.client.responses.create
            first = await create(model="m", input="one and one?", tools=[TOOL])
            assert [item.type for item in first.output] == ["reasoning", "function_call"]
            assert first.output[0].content[0].text == "I look."
            result = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "2"}
            events = [
                event
                async for event in await create(
                    model="m", input=[result], tools=[TOOL], previous_response_id=first.id, stream=True
                )
            ]
            second = events[-1].response
            assert [item.type for item in second.output] == ["reasoning", "message"]
            assert second.output[0].content[0].text == "I add."
            assert second.output_text == "It is 2."
            texts = "".join(event.delta for event in events if event.type == "response.output_text.delta")
            assert texts == second.output_text
            await create(model="m", input="thanks", previous_response_id=second.id)
        chats = [request.json["messages"] for request in upstream.received if request.path.endswith("completions")]
    assert chats[1][1]["content"] == "<think>\nI look.\n</think>\n\n"
    assert "think" not in str(chats[2])
    assert "reasoning" not in str(chats)


@pytest.mark.parametrize("name", ["think_bare_close", "bare_json"])
async def test_a_lone_close_ends_a_thought(name: str) -> None:
    """The first answer too, where it is not streamed; a stream has the thought as a message before the answer."""
    answer = '{"a": 1}' if name == "bare_json" else "Hello there."
    form: Any = {"text": {"format": {"type": "json_object"}}} if name == "bare_json" else {}
    async with doors(reasoning_tags="auto") as stack:
        stack.answer = recording(name)
        create: Any = stack.client.responses.create
        fields: dict[str, Any] = {"model": "qwen3-8b", "input": "go", "store": False, **form}
        events = [event async for event in await create(**fields, stream=True)]
        items = events[-1].response.output
        # an answer that is checked is asked for again, and by then it is known that the model thinks
        assert [item.type for item in items] == ["reasoning" if form else "message", "message"]
        assert items[-1].content[0].text.strip() == answer
        assert events[-1].response.status == "completed"
        for response in (
            await create(**fields),
            [event async for event in await create(**fields, stream=True)][-1].response,
        ):
            assert [item.type for item in response.output] == ["reasoning", "message"]
            assert response.output_text.strip() == answer
            assert "think>" not in str(response.output)
        messages: Any = [{"role": "user", "content": "go"}]
        completion = await stack.client.chat.completions.create(model="qwen3-8b", messages=messages)
        assert (completion.choices[0].message.content or "").strip() == answer


async def test_a_lone_close_before_a_call_ends_a_thought() -> None:
    """It does so also when a call follows it and no text."""
    chunks = [
        *(delta_chunk(content=piece) for piece in ("I look.", "</th", "ink>\n")),
        *call_chunks()[-2:],
    ]
    async with doors(reasoning_tags="think") as stack:
        stack.answer = stream(chunks)
        response: Any = await stack.client.responses.create(model="m", input="go", tools=[TOOL])  # pyright: ignore[reportArgumentType] - a plain dict
    assert [item.type for item in response.output] == ["reasoning", "function_call"]
    assert response.output[0].content[0].text == "I look."
