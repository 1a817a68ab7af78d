"""Schemas and grammars that cannot be enforced or would cost too much: refused by their field, or kept quick."""

import asyncio
import random
import time
from typing import Any

import pytest

from apis.errors import InvalidRequest, UpstreamError
from providers.inference.harmony.harmony import Harmony
from providers.inference.harmony.options import HarmonyOptions
from providers.inference.harmony.vocabulary import load_vocabulary
from tests.providers.harmony.turns import (
    CITY,
    FINAL,
    allowed,
    allows,
    chat_request,
    custom,
    encode,
    formatted,
    function,
    matcher,
    pick,
)
from tests.support.laws.grammar_forms import DEADLY, FORMS


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "objekt"},
        {"enum": []},
        {"$ref": "#"},
        {"$ref": "http://127.0.0.1:1/schema.json"},
        {"$ref": "#/$defs/missing"},
        {"type": "string", "pattern": "("},
        {"type": "string", "pattern": "(?=a)"},
        {"type": "array", "uniqueItems": True},
        {"not": {}},
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_by_its_field(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        matcher(formatted(schema))
    assert (caught.value.param, caught.value.code) == ("text.format.schema", "invalid_json_schema")
    tools = [function("fine", CITY, strict=True), function("wrong", schema, strict=True)]
    with pytest.raises(InvalidRequest) as caught:
        matcher(chat_request(tools=tools))
    assert (caught.value.param, caught.value.code) == ("tools[1].parameters", "invalid_function_parameters")


def doubling(word: str) -> dict[str, Any]:
    defs: dict[str, Any] = {"d30": {"type": "string"}}
    for at in range(30):
        both = [{"$ref": f"#/$defs/d{at + 1}"}] * 2
        defs[f"d{at}"] = {word: both} if word != "properties" else {"properties": dict(zip("ab", both, strict=True))}
    return {"$ref": "#/$defs/d0", "$defs": defs}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


BOMBS: dict[str, dict[str, Any]] = {
    "anyOf": {"anyOf": [{"const": at} for at in range(2**16)]},
    "allOf of anyOf": {"allOf": [{"anyOf": [{"required": [f"a{at}"]}, {"required": [f"b{at}"]}]} for at in range(16)]},
    "minLength": {"type": "string", "minLength": 10**9},
    "minItems": {"type": "array", "minItems": 10**9},
    "multipleOf": {"type": "integer", "multipleOf": 99999989},
    "multipleOf of a thousand zeros": {"type": "integer", "multipleOf": 10**12},
    "depth": nested(140),
    "size": {"const": "a" * 300_000},
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_schema_that_would_burst_is_refused_at_once(name: str) -> None:
    begun = time.process_time()
    with pytest.raises(InvalidRequest) as caught:
        matcher(formatted(BOMBS[name]))
    assert caught.value.param == "text.format.schema"
    assert time.process_time() - begun < 2


SLOW: dict[str, dict[str, Any]] = {
    "doubled anyOf": doubling("anyOf"),
    "doubled properties": doubling("properties"),
    "long pattern": {"type": "string", "pattern": "^a{100000}$"},
    "nested repetition": {"type": "string", "pattern": "((a{1,100}){1,100}){1,100}"},
    "optional repetition": {"type": "string", "pattern": "(?:a?){50}a{50}"},
    "many states": {"type": "string", "pattern": "(a|b)*a(a|b){200}"},
    "forced items": {"type": "array", "minItems": 100_000, "items": {"const": "a"}},
    "long constant": {"const": "a" * 200_000},
    "no end": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"], "additionalProperties": False},
    "optional properties": {"type": "object", "properties": {f"k{at}": {"type": "string"} for at in range(1000)}},
}


@pytest.mark.parametrize("name", SLOW)
def test_a_schema_that_could_burst_while_it_is_followed_stays_quick(name: str) -> None:
    begun = time.monotonic()
    one = matcher(formatted(SLOW[name]))
    assert allows(one, FINAL)
    rng = random.Random(9)
    for _ in range(40):
        if not one.is_done:
            assert one.accept(pick(one.mask(), rng, 0, 1))
            assert len(one.forced_tokens()) < 20_000
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize(
    "definition",
    [
        "start: /a{1000000000}/",
        "start: /((a{999}){999}){999}/",
        'start: "a" start',
        "start: a0\n" + "\n".join(f"a{at}: a{at + 1} a{at + 1}" for at in range(40)) + '\na40: "x"',
    ],
)
def test_a_grammar_that_forces_endless_text_stays_quick(definition: str) -> None:
    begun = time.monotonic()
    one = matcher(chat_request(tools=[custom("shell", "lark", definition)]))
    assert allows(one, "<|channel|>commentary to=functions.shell<|message|>")
    for _ in range(20):
        assert one.forced_tokens() == []
        assert one.accept(next(token for token in (*encode("a"), *encode("x")) if allowed(one.mask(), token)))
    assert time.monotonic() - begun < 2


@pytest.mark.parametrize("form", DEADLY)
def test_a_grammar_that_would_end_the_process_is_refused_by_its_field(form: str) -> None:
    """The engine's compiler builds what the child has compiled."""
    syntax, build = FORMS[form]
    with pytest.raises(InvalidRequest) as caught:
        matcher(chat_request(tools=[custom("fine"), custom("shell", syntax, build(3_500))]))
    assert (caught.value.param, caught.value.code) == ("tools[1].format.definition", "invalid_grammar")


LONG_TEXT = "word " * 6_000
LONG_SCHEMA = {"type": "object", "properties": {f"property_{at}": {"type": "string"} for at in range(900)}}
LONG_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": LONG_TEXT}}
LONG_REQUESTS: dict[str, dict[str, Any]] = {
    "a grammar": {"tools": [custom("shell", "lark", f'start: "a" // {LONG_TEXT}')]},
    "the schema of a function": {"tools": [function("f", LONG_SCHEMA)]},
    "the schema of a format": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": LONG_SCHEMA}}
    },
    "a description": {"tools": [{"type": "custom", "custom": {"name": "f", "description": LONG_TEXT}}]},
    "a call": {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [LONG_CALL]}]},
    "a thought": {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "reasoning": LONG_TEXT}]},
    "a message": {"messages": [{"role": "user", "content": LONG_TEXT}]},
}


@pytest.mark.parametrize("part", LONG_REQUESTS)
async def test_a_long_request_is_rendered_in_a_thread(part: str) -> None:
    """This holds for each part of a request that can be long."""
    harmony = Harmony(load_vocabulary(), HarmonyOptions())
    others = asyncio.create_task(asyncio.sleep(0))
    await harmony.render_prompt(chat_request(**LONG_REQUESTS[part]))
    assert others.done()


async def test_a_short_request_is_rendered_at_once() -> None:
    """A thread would cost it more than the rendering."""
    harmony = Harmony(load_vocabulary(), HarmonyOptions())
    others = asyncio.create_task(asyncio.sleep(0))
    await harmony.render_prompt(chat_request(tools=[function("f", CITY), custom("shell", "lark", 'start: "a"')]))
    assert not others.done()
    await others


def test_a_turn_that_grows_too_complex_fails_by_itself() -> None:
    one = matcher(formatted({"type": "string", "pattern": "(.*a.{1000}){50}"}))
    assert allows(one, FINAL + '"')

    def go_on() -> None:
        for _ in range(200):
            one.mask()
            one.accept(encode("a")[0])

    with pytest.raises(UpstreamError):
        go_on()
