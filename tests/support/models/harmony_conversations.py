"""Conversations that every provider serving the tiny gpt-oss must hold, word for word, with an OpenAI client.

Each of `CONVERSATIONS` takes a client of a stack that serves `tests.support.models.tiny_gpt_oss` as MODEL, with
OPTIONS for Harmony.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from typing import Any, Final

from openai import AsyncOpenAI
from openai.types.responses import Response

from tests.support.models import tiny_lessons as known

MODEL: Final = "tiny-gpt-oss"
OPTIONS: Final[dict[str, Any]] = {"current_date": known.TODAY}
"""A provider's `harmony` section."""
PATIENCE_S: Final = 110
"""For one answer, on a machine that has other things to do."""
TOOL: Final[dict[str, Any]] = {"type": "function", **known.WEATHER, "strict": False}
PERSON: Final[dict[str, Any]] = {
    "format": {"type": "json_schema", "name": "person", "schema": known.PERSON, "strict": True}
}
DELTAS: Final = {
    "response.reasoning_text.delta": "thought",
    "response.output_text.delta": "said",
    "response.function_call_arguments.delta": "call",
}

Json = dict[str, Any]
Brief = list[tuple[str, str]]


async def say(client: AsyncOpenAI, said: Any, **fields: Any) -> Response:
    """The response to a streamed request: its pieces add up to it, the store has the same, and it did not fail."""
    request: Json = {"model": MODEL, "input": said, "temperature": 0, "max_output_tokens": 100, **fields}
    pieces = dict.fromkeys(DELTAS.values(), "")
    final: Any = None
    async with client.responses.stream(timeout=PATIENCE_S, **request) as stream:
        async for event in stream:
            fields_sent: Any = event
            if fields_sent.type in DELTAS:
                pieces[DELTAS[fields_sent.type]] += fields_sent.delta
            final = getattr(fields_sent, "response", final)
    whole = dict.fromkeys(pieces, "")
    for kind, text in brief(final):
        whole["said" if kind in ("preamble", "answer") else kind] += text
    assert pieces == whole
    response: Response = final
    assert response.error is None
    assert response.status in ("completed", "incomplete")
    if fields.get("store", True):
        assert brief(await client.responses.retrieve(response.id)) == brief(response)
    return response


def brief(response: Response) -> Brief:
    """Return the response's output in brief, in order: thoughts, preambles, answers and the arguments of calls."""
    turns: Brief = []
    for item in response.output:
        each: Any = item
        if each.type == "reasoning":
            turns.append(("thought", "".join(part.text for part in each.content)))
        elif each.type == "message":
            text = "".join(part.text for part in each.content)
            turns.append(("preamble" if each.phase == "commentary" else "answer", text))
        else:
            assert (each.type, each.name) == ("function_call", "get_weather")
            turns.append(("call", each.arguments))
    return turns


def result(response: Response, output: str) -> list[Json]:
    """The answer to a response's one call."""
    (call_id,) = (item.call_id for item in response.output if item.type == "function_call")
    return [{"type": "function_call_output", "call_id": call_id, "output": output}]


# --- the conversations -----------------------------------------------------------------------------------------------


async def a_question_is_thought_over_and_answered(client: AsyncOpenAI) -> None:
    response = await say(client, known.FRANCE)
    assert response.status == "completed"
    assert brief(response) == [("thought", known.FRANCE_THOUGHT), ("answer", known.FRANCE_ANSWER)]
    usage = response.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens) == (74, 26)
    assert usage.output_tokens_details.reasoning_tokens == 9
    counted = await client.responses.input_tokens.count(model=MODEL, input=known.FRANCE)
    assert counted.input_tokens == usage.input_tokens


async def a_function_is_called_and_its_result_is_used(client: AsyncOpenAI) -> None:
    first = await say(client, known.ROME, tools=[TOOL])
    assert brief(first) == [("thought", known.ROME_THOUGHT), ("call", known.ROME_CALL)]
    result_message = result(first, known.ROME_RESULT)
    second = await say(client, result_message, tools=[TOOL], previous_response_id=first.id)
    assert brief(second) == [("thought", known.ROME_RESULT_THOUGHT), ("answer", known.ROME_ANSWER)]
    third = await say(client, known.THANKS, tools=[TOOL], previous_response_id=second.id)
    assert brief(third) == [("thought", known.THANKS_THOUGHT), ("answer", known.THANKS_ANSWER)]


async def words_may_come_before_a_call(client: AsyncOpenAI) -> None:
    first = await say(client, known.OSLO, tools=[TOOL])
    assert brief(first) == [
        ("thought", known.OSLO_THOUGHT),
        ("preamble", known.OSLO_PREAMBLE),
        ("call", known.OSLO_CALL),
    ]
    result_message = result(first, known.OSLO_RESULT)
    second = await say(client, result_message, tools=[TOOL], previous_response_id=first.id)
    assert brief(second) == [("thought", known.OSLO_RESULT_THOUGHT), ("answer", known.OSLO_ANSWER)]
    third = await say(client, known.THANKS, tools=[TOOL], previous_response_id=second.id)
    assert brief(third)[-1] == ("answer", known.THANKS_ANSWER)


async def a_client_may_keep_the_history_itself(client: AsyncOpenAI) -> None:
    said: list[Any] = [{"role": "user", "content": known.ROME}]
    first = await say(client, said, tools=[TOOL], store=False)
    said += [item.model_dump(exclude_none=True) for item in first.output]
    said += result(first, known.ROME_RESULT)
    second = await say(client, said, tools=[TOOL], store=False)
    assert brief(second) == [("thought", known.ROME_RESULT_THOUGHT), ("answer", known.ROME_ANSWER)]
    said += [*(item.model_dump(exclude_none=True) for item in second.output), {"role": "user", "content": known.THANKS}]
    third = await say(client, said, tools=[TOOL], store=False)
    assert brief(third)[-1] == ("answer", known.THANKS_ANSWER)


async def a_chain_of_turns_goes_on(client: AsyncOpenAI) -> None:
    previous: Json = {}
    sizes: list[int] = []
    for number in known.TURNS[:4]:
        response = await say(client, known.turn_question(number), **previous)
        assert brief(response) == [("thought", known.turn_thought(number)), ("answer", known.turn_answer(number))]
        assert response.usage is not None
        sizes.append(response.usage.input_tokens)
        previous = {"previous_response_id": response.id}
    assert {after - before for before, after in pairwise(sizes)} == {20}


async def several_are_answered_at_once(client: AsyncOpenAI) -> None:
    questions = [known.FRANCE, known.turn_question("one")] * 3
    answers = await asyncio.gather(*(say(client, question) for question in questions))
    assert [brief(each)[-1][1] for each in answers] == [known.FRANCE_ANSWER, known.turn_answer("one")] * 3


async def an_answer_may_be_cut_short(client: AsyncOpenAI) -> None:
    short = await say(client, known.FRANCE, max_output_tokens=16)
    assert short.status == "incomplete"
    assert short.incomplete_details is not None
    assert short.incomplete_details.reason == "max_output_tokens"
    assert brief(short)[0] == ("thought", known.FRANCE_THOUGHT)
    stopped = await say(client, known.FRANCE, extra_body={"stop": ["Paris", "user"]})
    assert stopped.status == "completed"
    assert brief(stopped) == [("thought", known.FRANCE_THOUGHT), ("answer", known.FRANCE_ANSWER.partition("Paris")[0])]


async def the_answers_tokens_have_probabilities(client: AsyncOpenAI) -> None:
    response = await say(client, known.FRANCE, include=["message.output_text.logprobs"], top_logprobs=3)
    part: Any = response.output[-1]
    tokens = part.content[0].logprobs
    assert b"".join(bytes(token.bytes) for token in tokens).decode() == known.FRANCE_ANSWER
    for token in tokens:
        assert -0.5 < token.logprob <= 0
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token


# --- what needs a grammar --------------------------------------------------------------------------------------------


async def a_strict_schema_is_kept(client: AsyncOpenAI) -> None:
    response = await say(client, known.INVENT, text=PERSON)
    assert brief(response) == [("thought", known.INVENT_THOUGHT), ("answer", known.INVENT_ANSWER)]


async def a_strict_schema_is_kept_by_a_model_that_would_not(client: AsyncOpenAI) -> None:
    schema = {**known.PERSON, "properties": {"name": {"enum": ["Paris", "Rome"]}}, "required": ["name"]}
    form = {"type": "json_schema", "name": "person", "schema": schema, "strict": True}
    response = await say(client, known.INVENT, text={"format": form})
    assert response.status == "completed"
    assert json.loads(response.output_text) in ({"name": "Paris"}, {"name": "Rome"})


async def a_call_is_made_where_it_must_be(client: AsyncOpenAI) -> None:
    free = await say(client, known.HELLO, tools=[TOOL])
    assert brief(free) == [("thought", known.HELLO_THOUGHT), ("answer", known.HELLO_ANSWER)]
    only = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]}
    for choice in ("required", {"type": "function", "name": "get_weather"}, only):
        forced = await say(client, known.HELLO, tools=[{**TOOL, "strict": True}], tool_choice=choice)
        assert brief(forced) == [("thought", known.HELLO_THOUGHT), ("call", known.HELLO_CALL)]


async def no_call_is_made_where_none_may_be(client: AsyncOpenAI) -> None:
    response = await say(client, known.ROME, tools=[TOOL], tool_choice="none")
    assert response.status == "completed"
    *before, (last, text) = brief(response)
    assert {kind for kind, _ in before} <= {"thought", "preamble"}
    assert last == "answer"
    assert text
    assert "<|" not in text


async def a_strict_function_is_called_by_its_schema(client: AsyncOpenAI) -> None:
    response = await say(client, known.ROME, tools=[{**TOOL, "strict": True}])
    assert brief(response) == [("thought", known.ROME_THOUGHT), ("call", known.ROME_CALL)]


Conversation = Callable[[AsyncOpenAI], Awaitable[None]]
CONVERSATIONS: Final[Sequence[Conversation]] = (
    a_question_is_thought_over_and_answered,
    a_function_is_called_and_its_result_is_used,
    words_may_come_before_a_call,
    a_client_may_keep_the_history_itself,
    a_chain_of_turns_goes_on,
    several_are_answered_at_once,
    an_answer_may_be_cut_short,
    the_answers_tokens_have_probabilities,
)
GRAMMAR_CONVERSATIONS: Final[Sequence[Conversation]] = (
    a_strict_schema_is_kept,
    a_strict_schema_is_kept_by_a_model_that_would_not,
    a_call_is_made_where_it_must_be,
    no_call_is_made_where_none_may_be,
    a_strict_function_is_called_by_its_schema,
)
