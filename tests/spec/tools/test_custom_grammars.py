"""Grammars of custom tools: checked when they are declared, and matched where the engine does not enforce them."""

from typing import Any

import pytest

from apis.inference import ALL_CONSTRAINTS, Model
from providers.inference.scripted import Scripted
from tests.support.sdk.answer_shapes import Script
from tests.support.sdk.requests import chat_requests, create, messages, refusal, stream
from tests.support.servers.serving import scripted, serving
from tests.support.servers.upstream_server import UpstreamServer, call_chunks
from tests.support.servers.upstream_server import stream as streamed

Json = dict[str, Any]
LARK: Json = {"type": "grammar", "syntax": "lark", "definition": 'start: "add " NUMBER\nNUMBER: /[0-9]+/'}
REGEX: Json = {"type": "grammar", "syntax": "regex", "definition": "add [0-9]+"}
TOOL: Json = {"type": "custom", "name": "sum", "format": LARK}


def writing(*inputs: str) -> Script:
    return [
        {"call": "sum", "arguments": text, "custom": True, "id": f"c_{at}_{text}"} for at, text in enumerate(inputs)
    ]


class Enforcing(Scripted):
    """A scripted model whose engine promises to hold grammars."""

    class Config(Scripted.Config):
        pass

    async def models(self) -> list[Model]:
        return [Model(self._config.model, "stack", enforces=ALL_CONSTRAINTS)]


@pytest.mark.parametrize("form", [LARK, REGEX], ids=["lark", "regex"])
async def test_an_input_that_matches_is_delivered(form: Json) -> None:
    """With all events of a custom call."""
    async with serving(scripted(writing("add 12"))) as served:
        events = await stream(served, tools=[{**TOOL, "format": form}])
    (item,) = events[-1].response.output
    assert (item.type, item.name, item.input, item.call_id) == ("custom_tool_call", "sum", "add 12", "c_0_add 12")
    assert "format_error" not in item.model_extra
    assert [
        event.type.removeprefix("response.custom_tool_call_input.") for event in events if "input." in event.type
    ] == [
        "delta",
        "done",
    ]


@pytest.mark.parametrize("form", [LARK, REGEX], ids=["lark", "regex"])
async def test_an_input_that_does_not_match_is_written_once_more(form: Json) -> None:
    """The client sees the right call alone."""
    async with serving(scripted(writing("add twelve"), writing("add 12"))) as served:
        response = await create(served, tools=[{**TOOL, "format": form}])
        sent_messages = messages(served)
    assert [item.input for item in response.output] == ["add 12"]
    assert sent_messages[-2]["tool_calls"][0]["custom"]["input"] == "add twelve"
    assert "does not match the grammar" in sent_messages[-1]["content"]


@pytest.mark.parametrize("wrong", ["add twelve", "add ", "", "add 1;"])
async def test_an_input_that_stays_wrong_is_delivered_and_says_so(wrong: str) -> None:
    """Nothing is lost, and a client can answer the call."""
    async with serving(scripted(writing(wrong), writing(wrong), [{"text": "Done."}])) as served:
        response = await create(served, tools=[TOOL])
        assert len(chat_requests(served)) == 2
        output = {"type": "custom_tool_call_output", "call_id": f"c_0_{wrong}", "output": "no such sum"}
        second = await create(served, tools=[TOOL], input=[output], previous_response_id=response.id)
    (item,) = response.output
    assert (response.status, item.input) == ("completed", wrong)
    assert item.format_error == "The input does not match the tool's grammar."
    assert second.output_text == "Done."


async def test_a_wrong_input_next_to_another_call_is_delivered_too() -> None:
    """The response ends with the other call, so that there is no further try."""
    async with serving(scripted(writing("add twelve", "add 12"))) as served:
        response = await create(served, tools=[TOOL])
        assert len(chat_requests(served)) == 1
    assert [item.input for item in response.output] == ["add twelve", "add 12"]
    assert ["format_error" in item.model_extra for item in response.output] == [True, False]


async def test_an_engine_that_enforces_grammars_is_believed_and_its_input_streams() -> None:
    """Nothing waits there."""
    section = {"provider": "tests.spec.tools.test_custom_grammars:Enforcing", "turns": [writing("add twelve")]}
    async with serving(section) as served:
        response = await create(served, tools=[TOOL])
    assert response.output[0].input == "add twelve"


async def test_a_chat_upstream_is_corrected() -> None:
    """On servers of chat completions a grammar is words in a description."""
    answers = [streamed(call_chunks("sum", f'{{"input": "{text}"}}')) for text in ("add twelve", "add 12")]
    async with (
        UpstreamServer(*answers) as upstream,
        serving({"provider": "vllm", "base_url": upstream.base_url}) as served,
    ):
        response = await create(served, model="fake-model", tools=[TOOL])
    assert [item.input for item in response.output] == ["add 12"]
    assert len(upstream.chats) == 2


INVALID: dict[str, Json] = {
    "no lark": {**LARK, "definition": "start: ("},
    "an unknown rule": {**LARK, "definition": "start: nothing_here"},
    "no regex": {**REGEX, "definition": "("},
    "too large": {**LARK, "definition": 'start: "a" // ' + "x" * 300_000},
}


@pytest.mark.parametrize("form", INVALID.values(), ids=INVALID)
async def test_a_grammar_that_does_not_compile_is_refused_by_its_field(form: Json) -> None:
    """Refused when it is declared, on every engine."""
    async with serving() as served:
        error = await refusal(served, tools=[{"type": "custom", "name": "free"}, {**TOOL, "format": form}])
        grouped = {"type": "namespace", "name": "n", "description": "N.", "tools": [{**TOOL, "format": form}]}
        inner = await refusal(served, tools=[grouped])
    assert (error["param"], error["code"]) == ("tools[1].format.definition", "invalid_grammar")
    assert inner["param"] == "tools[0].tools[0].format.definition"
