"""Text, chains and structured output of a real vLLM, as an OpenAI client of the stack sees them."""

import asyncio
import json
from typing import Any
from uuid import uuid4

import jsonschema_rs
import pytest
from openai.types.responses import Response, ResponseOutputMessage, ResponseOutputText

from tests.live.asking import FRANCE, answer, chat, deltas, streamed
from tests.live.smollm2 import MODEL
from tests.support.servers.serving import Served

pytestmark = [pytest.mark.live, pytest.mark.timeout(300, func_only=True)]

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colour": {"enum": ["red", "green", "blue"]},
    },
    "required": ["name", "age", "colour"],
    "additionalProperties": False,
}


def text_of(response: Response) -> ResponseOutputText:
    (item,) = response.output
    assert isinstance(item, ResponseOutputMessage)
    (part,) = item.content
    assert isinstance(part, ResponseOutputText)
    return part


def input_tokens(response: Response) -> int:
    assert response.usage is not None
    return response.usage.input_tokens


# --- text ------------------------------------------------------------------------------------------------------------


async def test_the_served_model_is_listed(served: Served) -> None:
    (model,) = (await served.client.models.list()).data
    assert (model.id, model.owned_by, model.model_extra) == (MODEL, "vllm", {"max_model_len": 4096})


async def test_a_question_is_answered(served: Served) -> None:
    response = await answer(served, FRANCE)
    assert response.status == "completed"
    assert "Paris" in response.output_text
    assert response.usage is not None
    assert response.usage.input_tokens > 10
    assert 0 < response.usage.output_tokens < 64
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


async def test_a_stream_adds_up_to_the_whole_answer(served: Served) -> None:
    final, events = await streamed(served, FRANCE)
    assert sum(event.type == "response.output_text.delta" for event in events) > 1
    whole = await answer(served, FRANCE)
    assert deltas(events, "output_text") == final.output_text == whole.output_text
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.total_tokens == whole.usage.total_tokens


async def test_temperature_zero_gives_the_same_answer_again(served: Served) -> None:
    texts = {(await answer(served, "Name three fruits.", extra_body={"seed": 7})).output_text for _ in range(3)}
    assert len(texts) == 1


async def test_a_seed_decides_what_is_drawn(served: Served) -> None:
    async def drawn(seed: int) -> str:
        fields = {"temperature": 1.5, "max_output_tokens": 24, "extra_body": {"seed": seed}}
        return (await answer(served, "Tell me a story.", **fields)).output_text

    assert await drawn(1) == await drawn(1) != await drawn(2)


async def test_several_answers_are_made_at_once(served: Served) -> None:
    questions = [f"Say the number {number} in words." for number in range(4)]
    answers = await asyncio.gather(*(streamed(served, question) for question in questions))
    assert [final.status for final, _ in answers] == ["completed"] * 4
    assert len({final.output_text for final, _ in answers}) == 4


async def test_instructions_and_developer_messages_reach_the_model(served: Served) -> None:
    question = {"role": "user", "content": FRANCE}
    developer = {"role": "developer", "content": "Be brief."}
    sizes = [
        input_tokens(await answer(served, said, instructions=instructions))
        for said, instructions in (
            ([question], "You are a pirate."),
            ([developer, question], "You are a pirate."),
            ([developer, question], "You are a pirate who sails the seven seas."),
        )
    ]
    assert sizes == sorted(set(sizes))


async def test_a_stop_sequence_ends_the_answer_before_it(served: Served) -> None:
    whole = (await answer(served, FRANCE)).output_text
    stopped = await answer(served, FRANCE, extra_body={"stop": ["Paris"]})
    assert stopped.status == "completed"
    assert stopped.output_text == whole[: whole.index("Paris")]


async def test_too_few_output_tokens_make_an_incomplete_response(served: Served) -> None:
    story = "Write a long story about a dragon."
    final, events = await streamed(served, story, max_output_tokens=16)
    assert events[-1].type == "response.incomplete"
    for response in (final, await answer(served, story, max_output_tokens=16)):
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.usage is not None
        assert response.usage.output_tokens == 16


async def test_logprobs_cover_the_text_token_by_token(served: Served) -> None:
    fields: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 3}
    for response in (await answer(served, FRANCE, **fields), (await streamed(served, FRANCE, **fields))[0]):
        part = text_of(response)
        assert part.logprobs
        assert b"".join(bytes(token.bytes) for token in part.logprobs).decode() == part.text
        for token in part.logprobs:
            assert token.logprob <= 0
            assert len(token.top_logprobs) == 3
            assert token.top_logprobs[0].token == token.token


# --- chains and counting ---------------------------------------------------------------------------------------------


async def test_a_chain_remembers_what_was_said(served: Served) -> None:
    first = await answer(served, "The secret word is banana. Repeat it.")
    second, _ = await streamed(served, "What is the secret word?", previous_response_id=first.id)
    third = await answer(served, "Tell me the secret word again.", previous_response_id=second.id)
    assert "banana" in second.output_text
    assert "banana" in third.output_text
    assert input_tokens(first) < input_tokens(second) < input_tokens(third)
    assert "banana" not in (await answer(served, "What is the secret word?")).output_text


async def test_a_repeated_prompt_is_read_from_the_cache(served: Served) -> None:
    numbers = ", ".join(str(n * 37 % 1000) for n in range(150))
    prompt = f"{uuid4()}: tell me which of these numbers is the greatest: {numbers}"
    usages = [(await answer(served, prompt, max_output_tokens=16)).usage for _ in range(2)]
    first, second = (usage.input_tokens_details.cached_tokens for usage in usages if usage is not None)
    assert first < 150 < second


async def test_input_tokens_are_counted_as_the_model_counts_them(served: Served) -> None:
    first = await answer(served, FRANCE, instructions="Be brief.")
    tool: dict[str, Any] = {
        "type": "function",
        "name": "look_up",
        "parameters": {"type": "object", "properties": {}},
        "strict": False,
    }
    cases: list[dict[str, Any]] = [{}, {"tools": [tool]}, {"instructions": "Be brief."}]
    cases.append({"previous_response_id": first.id})
    for fields in cases:
        counted = await served.client.responses.input_tokens.count(model=MODEL, input=FRANCE, **fields)
        assert counted.input_tokens == input_tokens(await answer(served, FRANCE, **fields))


# --- structured output -----------------------------------------------------------------------------------------------


async def test_a_strict_schema_is_kept(served: Served) -> None:
    fields: dict[str, Any] = {"max_output_tokens": 256}
    fields["text"] = {"format": {"type": "json_schema", "name": "person", "schema": PERSON, "strict": True}}
    invent = "Invent a person."
    for response in (await answer(served, invent, **fields), (await streamed(served, invent, **fields))[0]):
        assert response.status == "completed"
        jsonschema_rs.validate(PERSON, json.loads(response.output_text))


async def test_json_object_gives_an_object(served: Served) -> None:
    question = 'Answer with this JSON object and nothing else: {"city": "Paris"}'
    response = await answer(served, question, text={"format": {"type": "json_object"}}, max_output_tokens=256)
    assert response.status == "completed"
    assert isinstance(json.loads(response.output_text), dict)


# --- chat completions ------------------------------------------------------------------------------------------------


async def test_chat_completions_answer_whole_and_streamed(served: Served) -> None:
    whole = await chat(served, FRANCE, max_completion_tokens=64)
    stream = await chat(served, FRANCE, max_completion_tokens=64, stream=True, stream_options={"include_usage": True})
    chunks: list[Any] = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Paris" in text
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
