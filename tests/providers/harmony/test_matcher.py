"""Turns under a grammar: any tokens sampled from the masks make the output that the request asked for."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema_rs
import pytest

from apis.deltas import TextDelta
from providers.inference.harmony.chunks import EnforcedGrammar
from providers.inference.harmony.grammar import request_to_grammar
from providers.inference.harmony.matcher import GrammarCompiler
from providers.inference.harmony.vocabulary import END, RETURN, VOCABULARY_SIZE, load_vocabulary
from tests.providers.harmony.turns import (
    CITY,
    FINAL,
    THINK,
    allows,
    chat_request,
    custom,
    decode,
    encode,
    formatted,
    function,
    matcher,
    said,
    walk,
)

SHELL = "<|channel|>commentary to=functions.shell<|message|>"


def test_only_the_answer_is_held_to_the_schema() -> None:
    one = matcher(formatted(CITY))
    assert allows(one, "<|channel|>analysis<|message|>No JSON <here>.\n<|end|><|start|>assistant")
    assert allows(one, "<|channel|>commentary<|message|>I say { so<|end|><|start|>assistant")
    assert allows(one, FINAL)
    assert not allows(one, "Sure")
    assert allows(one, '{"city":"Paris","days":3}')
    assert not one.is_done
    assert allows(one, "<|return|>")
    assert one.is_done
    assert not one.accept(RETURN)
    assert one.forced_tokens() == []


def test_json_mode_makes_objects_of_any_shape() -> None:
    request = chat_request(response_format={"type": "json_object"})
    one = matcher(request)
    assert allows(one, THINK + FINAL)
    assert not allows(one, "[")
    assert allows(one, '{\n  "a": [1, {"b": null}]\n}<|return|>')


def test_a_schema_binds_the_answer_and_leaves_calls_free() -> None:
    request = formatted(CITY, tools=[function("add")])
    assert allows(
        matcher(request), '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"x": 1}<|call|>'
    )
    assert not allows(matcher(request), "<|channel|>commentary to=functions.other")


def some_leaf(rng: random.Random) -> dict[str, Any]:
    low = rng.randrange(4)
    leaves: list[dict[str, Any]] = [
        {"type": "boolean"},
        {"type": ["null", "integer"]},
        {"type": "string", "minLength": low, "maxLength": low + rng.randrange(20)},
        {"type": "string", "pattern": "^[a-c]{2,5}-[0-9]+$"},
        {"type": "string", "format": rng.choice(["date", "date-time", "uuid", "ipv4"])},
        {"type": "integer", "minimum": -low * 100, "maximum": low * 1000},
        {"type": "integer", "multipleOf": low + 2},
        {"type": "number", "minimum": -low - 0.5, "exclusiveMaximum": low * 10 + 1},
        {"enum": ["a", "b\n", 3, None, {"x": [1]}][: low + 1]},
        {"const": {"a": ["é", True]}},
        {"$ref": "#/$defs/tree"},
    ]
    return rng.choice(leaves)


def some_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    low = rng.randrange(4)
    inner = [some_schema(rng, depth + 1) for _ in range(low + 1)] if depth < 3 else []
    match rng.choice(["leaf", "array", "tuple", "anyOf", "object", "object"] if inner else ["leaf"]):
        case "array":
            return {"type": "array", "items": inner[0], "minItems": low, "maxItems": low + 2}
        case "tuple":
            return {"type": "array", "prefixItems": inner, "items": False, "minItems": 1}
        case "anyOf":
            return {"anyOf": inner}
        case "object":
            names = rng.sample(["a", "b c", 'q"', "d", "ключ"], low)
            required = [name for name in names if rng.random() < 0.6]
            more = rng.choice([False, False, {"type": "integer"}])
            properties = dict(zip(names, inner, strict=False))
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": more}
        case _:
            return some_leaf(rng)


TREE = {
    "type": "object",
    "properties": {"leaf": {"type": "integer"}, "more": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
    "required": ["leaf"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("count", [80, pytest.param(1000, marks=pytest.mark.long)])
def test_answers_to_random_schemas_are_valid(count: int) -> None:
    rng = random.Random(5)
    for _ in range(count):
        schema = {**some_schema(rng), "$defs": {"tree": TREE}}
        request = formatted(schema)
        one = matcher(request)
        assert allows(one, FINAL)
        ids = encode(FINAL) + walk(one, rng, patience=25)
        (answer,) = said(ids, request)
        assert isinstance(answer, TextDelta)
        assert answer.phase == "final_answer"
        assert jsonschema_rs.validator_for(schema).is_valid(json.loads(answer.text)), (schema, answer.text)


def test_whole_turns_from_nothing_but_the_masks_are_good_harmony() -> None:
    rng = random.Random(6)
    request = formatted(CITY, tools=[function("add", CITY, strict=True), custom("shell"), {"type": "python"}])
    for _ in range(60):
        ids = walk(matcher(request), rng, patience=60)
        for delta in said(ids, request):
            if isinstance(delta, TextDelta) and delta.phase == "final_answer":
                assert jsonschema_rs.validator_for(CITY).is_valid(json.loads(delta.text)), decode(ids)


# --- the matcher itself -----------------------------------------------------------------------------------------------


def test_forced_tokens_are_the_models_own() -> None:
    one = matcher(chat_request(tools=[function("add", CITY, strict=True)], tool_choice="required"))
    assert allows(one, "<|channel|>commentary to")
    assert one.forced_tokens() == encode("=functions.add")
    assert all(one.accept(token) for token in one.forced_tokens())
    assert allows(one, " <|constrain|>")
    assert one.forced_tokens()[:2] == encode("json<|message|>")


def test_a_token_that_is_not_allowed_changes_nothing() -> None:
    one = matcher(formatted(CITY))
    before = one.mask()
    assert not one.accept(encode("Hello")[0])
    assert one.mask() == before
    assert allows(one, FINAL + '{"city":"x","days":1}<|return|>')


def test_the_mask_has_a_bit_for_every_token() -> None:
    assert len(matcher(formatted(CITY)).mask()) == -(-VOCABULARY_SIZE // 32) * 4


def test_matchers_of_one_grammar_do_not_disturb_each_other() -> None:
    one, other = matcher(formatted(CITY)), matcher(formatted(CITY))
    assert allows(one, FINAL + '{"city":"x"')
    assert allows(other, FINAL + '{"city":"yy","days":2}<|return|>')
    assert allows(one, ',"days":1}<|return|>')


def test_compiled_grammars_are_kept_within_bounds() -> None:
    compiler = GrammarCompiler(load_vocabulary(), max_grammars=4)
    for at in range(50):
        grammar = request_to_grammar(formatted({"const": at}))
        assert grammar is not None
        compiler.build_matcher(grammar)
        assert compiler.cached_count <= 4


def test_grammars_compile_in_many_threads() -> None:
    def work(seed: int) -> bool:
        requests = [(formatted({"enum": [f"{at % 5}-{seed % 2}"]}), f"{at % 5}-{seed % 2}") for at in range(10)]
        return all(allows(matcher(request), f'{FINAL}"{answer}"<|return|>') for request, answer in requests)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(8), timeout=30))


def test_the_same_request_has_the_same_grammar_and_other_text_no_weight() -> None:
    first, second = (
        request_to_grammar(formatted(CITY, tools=[function("add", CITY, strict=True)], user=name))
        for name in ("a", "b")
    )
    assert first == second
    assert first is not None
    assert "no_forcing" not in first.text


@pytest.mark.parametrize(
    ("turn", "read"),
    [
        (f"{THINK}{FINAL}It rains.<|end|>More", f"{THINK}{FINAL}It rains.<|return|>"),
        (f"{THINK}{FINAL}It rains.<|return|>", f"{THINK}{FINAL}It rains.<|return|>"),
        (f"{SHELL}ls<|end|>x", f"{SHELL}ls<|call|>"),
    ],
)
def test_a_message_that_an_engine_does_not_end_ends_there(turn: str, read: str) -> None:
    """An engine that takes `<|end|>` for text goes on to write after the answer, or the call."""
    request = chat_request(tools=[custom("shell"), function("f", CITY, strict=True)])
    enforced = EnforcedGrammar("tools", matcher(request).accept, {END: load_vocabulary().encode("<|end|>")})
    assert enforced.read_ids(encode(turn)) == encode(read)
    assert enforced.is_over == (turn != read)


def test_the_name_of_a_control_token_in_a_string_is_text() -> None:
    """Where the turn cannot end, an engine that takes `<|end|>` for text is right."""
    text = load_vocabulary().encode("<|end|>")
    enforced = EnforcedGrammar("text.format", matcher(formatted({"type": "string"})).accept, {END: text})
    ids = [*encode(f'{FINAL}"a'), END, *encode('"<|return|>')]
    assert enforced.read_ids(ids) == [*encode(f'{FINAL}"a'), *text, *encode('"<|return|>')]
    assert not enforced.is_over
