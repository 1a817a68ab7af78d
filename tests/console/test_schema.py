"""The page's check of events against the Open Responses schema agrees with a complete JSON Schema validator."""

import copy
import json
import random
from collections.abc import Callable
from typing import Any, Final, cast

import httpx2
import jsonschema_rs
import pytest
from playwright.async_api import expect

from tests.console.conftest import OpenPage
from tests.console.open_responses import SOURCE, TARGET, as_text, compact_schema
from tests.console.test_playground import ask, scripted
from tests.console.test_reducer import FUNCTIONS, STREAMS
from tests.support.laws.stream_laws import check_frames
from tests.support.servers.serving import serving

pytestmark = pytest.mark.console

DAMAGES: Final = 40
"""Damaged copies of each event."""
REPLACEMENTS: Final[list[Any]] = [
    None,
    True,
    0,
    -1,
    1.5,
    "",
    "text",
    [],
    [None],
    {},
    {"type": "message"},
    {"type": "new"},
]
VALIDATE: Final = """
async (text) => {
  const [schema, values] = JSON.parse(text);
  const { violations } = await import("/console/schema/validate.js");
  return values.map(([name, value]) => !violations(schema[name], value, { root: schema }).length);
}
"""
VALIDATE_PAIRS: Final = """
async (text) => {
  const { violations } = await import("/console/schema/validate.js");
  return JSON.parse(text).map(([schema, value]) => violations(schema, value).length === 0);
}
"""
KEYWORDS: Final = {
    *("$ref", "type", "enum", "properties", "required", "allOf", "anyOf", "oneOf", "items", "additionalProperties"),
}


async def real_events() -> list[dict[str, Any]]:
    """Return the events of every kind of stream, as the Open Responses dialect sends them."""
    events: list[dict[str, Any]] = []
    body = {"model": "scripted", "input": "Hi", "tools": FUNCTIONS[:1], "stream": True, "top_logprobs": 2}
    async with serving(scripted(*STREAMS.values())) as served, httpx2.AsyncClient(base_url=served.url) as http:
        for _ in STREAMS:
            answer = await http.post("/v1/responses", json=body, headers={"x-responses-dialect": "open-responses"})
            events += check_frames(answer.content)
    return events


def spots(node: Any) -> list[tuple[Any, Any]]:
    """Return each (container, key) within a JSON value."""
    inner: list[tuple[Any, Any]] = []
    if isinstance(node, dict | list):
        pairs = cast(Any, node.items() if isinstance(node, dict) else enumerate(cast(list[Any], node)))
        for key, child in pairs:
            inner += [(node, key), *spots(child)]
    return inner


def damaged(event: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """Return a copy with one to three changes at random places."""
    copied = copy.deepcopy(event)
    for _ in range(chance.randint(1, 3)):
        places = spots(copied)
        if not places:
            break
        container, key = chance.choice(places)
        if chance.random() < 0.35:
            del container[key]
        elif chance.random() < 0.15 and isinstance(container, dict):
            container["unexpected"] = chance.choice(REPLACEMENTS)
        else:
            container[key] = chance.choice(REPLACEMENTS)
    return copied


async def test_real_and_damaged_events_are_judged_as_by_a_complete_validator(open_page: OpenPage) -> None:
    chance = random.Random(11)
    spec = compact_schema()
    complete = {"components": json.loads(SOURCE.read_bytes())["components"]}
    validators = {
        name: jsonschema_rs.Draft202012Validator({"$ref": f"#/components/schemas/{name}", **complete})
        for name in {*spec["events"].values(), "ResponseResource"}
    }
    events = await real_events()
    values: list[tuple[str, Any]] = []
    for event in events:
        name = spec["events"][event["type"]]
        values += [(name, event), *((name, damaged(event, chance)) for _ in range(DAMAGES))]
        if "response" in event:
            values += [("ResponseResource", damaged(event["response"], chance)) for _ in range(DAMAGES)]
    expected = [validators[name].is_valid(value) for name, value in values]
    assert sum(expected) > 500
    assert expected.count(False) > 2000
    async with serving() as served, open_page(f"{served.url}/") as page:
        verdicts = await page.evaluate(VALIDATE, json.dumps([spec["schemas"], values]))
    wrong = [value for value, verdict, want in zip(values, verdicts, expected, strict=True) if verdict != want]
    assert not wrong, json.dumps(wrong[0])


def random_schema(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a schema of the keywords that a function's author writes."""
    if depth > 2:
        return chance.choice([{"type": "string", "minLength": 2}, {"type": "integer", "minimum": 0}, {"const": 1}, {}])

    def inner() -> dict[str, Any]:
        return random_schema(chance, depth + 1)

    names = chance.sample(["a", "b", "c"], 2)
    node = {"type": "object", "properties": {"a": {"type": "string"}}}
    kinds: list[Callable[[], dict[str, Any]]] = [  # only the chosen one is built
        lambda: {"type": "object", "properties": {name: inner() for name in names}, "required": names[:1]},
        lambda: {
            "type": "object",
            "properties": {"a": inner()},
            "additionalProperties": chance.choice([False, inner()]),
        },
        lambda: {"patternProperties": {"^a": inner()}, "minProperties": 1, "maxProperties": 2},
        lambda: {"propertyNames": {"enum": ["a", "b"]}},
        lambda: {"type": "array", "items": inner(), "minItems": 1, "maxItems": 2},
        lambda: {"prefixItems": [inner()], "items": inner(), "uniqueItems": True},
        lambda: {"type": ["string", "null"], "maxLength": 3, "pattern": "^t"},
        lambda: {"type": "number", "exclusiveMinimum": 0, "maximum": 3, "multipleOf": 2},
        lambda: {"anyOf": [inner(), inner()]},
        lambda: {"oneOf": [inner(), inner()]},
        lambda: {"allOf": [inner(), inner()]},
        lambda: {"not": inner()},
        lambda: {"enum": ["text", 1, None, [1], {"a": 1}]},
        lambda: {"type": "boolean"} if depth else {"$ref": "#/$defs/node", "$defs": {"node": node}},
    ]
    return chance.choice(kinds)()


def random_value(chance: random.Random, depth: int = 0) -> Any:
    if depth > 2 or chance.random() < 0.4:
        return chance.choice([None, True, False, 0, 1, 2, 3, -1, 1.5, "", "t", "text", "🙂🙂"])
    if chance.random() < 0.4:
        return [random_value(chance, depth + 1) for _ in range(chance.randint(0, 3))]
    return {
        name: random_value(chance, depth + 1) for name in chance.sample(["a", "b", "c", "ab"], chance.randint(0, 3))
    }


async def test_schemas_of_functions_are_applied_as_by_a_complete_validator(open_page: OpenPage) -> None:
    chance = random.Random(7)
    pairs = [(random_schema(chance), random_value(chance)) for _ in range(4000)]
    expected = [jsonschema_rs.Draft202012Validator(schema).is_valid(value) for schema, value in pairs]
    assert min(expected.count(True), expected.count(False)) > 500
    async with serving() as served, open_page(f"{served.url}/") as page:
        verdicts = await page.evaluate(VALIDATE_PAIRS, json.dumps(pairs))
    wrong = [pair for pair, verdict, want in zip(pairs, verdicts, expected, strict=True) if verdict != want]
    assert not wrong, json.dumps(wrong[0])


def test_the_page_carries_the_published_schema_and_no_keyword_that_it_does_not_check() -> None:
    assert TARGET.read_text() == as_text(compact_schema())
    used: set[str] = set()

    def visit(node: Any, *, names_fields: bool = False) -> None:
        if isinstance(node, dict):
            fields = cast(dict[str, Any], node)
            used.update(() if names_fields else fields)
            for name, child in fields.items():
                if name not in ("enum", "required", "type") or names_fields:
                    visit(child, names_fields=name == "properties" and not names_fields)
        elif isinstance(node, list):
            for child in cast(list[Any], node):
                visit(child)

    for schema in compact_schema()["schemas"].values():
        visit(schema)
    assert used <= KEYWORDS


CHECK_EVENTS: Final = """
async (events) => {
  const { Conformance, loadSchema } = await import("/console/schema/open_responses.js");
  const check = new Conformance();
  check.advance(await loadSchema(), events.map((event) => ({ event })));
  const bad = [...check.bad].map(([event, { found }]) => [event.sequence_number, found]);
  return { valid: check.valid, outside: check.outside, bad };
}
"""
DELTA: Final = {"item_id": "i", "output_index": 0, "content_index": 0}
EVENTS: Final[list[dict[str, Any]]] = [
    {"type": "response.output_text.delta", "sequence_number": 1, **DELTA, "delta": 5},
    {"type": "response.web_search_call.searching", "sequence_number": 2, "item_id": "i", "output_index": 0},
    {
        "type": "response.output_item.added",
        "sequence_number": 3,
        "output_index": 0,
        "item": {"type": "web_search_call"},
    },
    {"type": "response.reasoning_text.delta", "sequence_number": 4, **DELTA, "delta": "OpenAI's name"},
    {"type": "response.output_item.added", "sequence_number": 5, "output_index": 0, "item": {"type": "function_call"}},
]


async def test_a_violation_names_its_path_and_rule_and_unknown_types_are_no_violation(open_page: OpenPage) -> None:
    async with serving() as served, open_page(f"{served.url}/") as page:
        verdict = await page.evaluate(CHECK_EVENTS, EVENTS)
    assert (verdict["valid"], verdict["outside"]) == (1, 2)
    (first, wrong_type), (second, missing) = verdict["bad"]
    assert (first, second) == (1, 5)
    assert wrong_type == [{"path": "/delta", "rule": "type", "message": "is a number, not a string"}]
    assert ("/item", "required") in [(each["path"], each["rule"]) for each in missing]


async def test_every_event_of_an_answer_and_its_final_object_are_checked_live(open_page: OpenPage) -> None:
    async with (
        serving(scripted([{"reasoning": "Hm."}, {"text": "Valid."}])) as served,
        open_page(f"{served.url}/") as page,
    ):
        await page.get_by_role("button", name="Inspect").click()
        await ask(page, "Hi")
        await page.get_by_role("tab", name="Schema ✓").click()
        report = page.locator(".schema-report")
        await expect(report).to_contain_text("✓ valid")
        await expect(report.locator(".counts .bad")).to_have_count(0)
        assert int(await report.locator(".counts dd").first.inner_text()) > 8


async def test_a_damaged_event_is_marked_in_the_list(open_page: OpenPage) -> None:
    async with serving(scripted([{"text": "Hello."}])) as served, open_page(f"{served.url}/") as page:

        async def damage(route: Any) -> None:
            answer = await route.fetch()
            await route.fulfill(response=answer, body=(await answer.text()).replace('"delta":"Hello."', '"delta":7'))

        await page.route("**/v1/responses", damage)
        await page.get_by_role("button", name="Inspect").click()
        await ask(page, "Hi")
        await expect(page.locator(".event .broken")).to_have_text("✕ output_text.delta")
        await page.get_by_role("tab", name="Schema ✕ 1").click()
        await expect(page.locator(".violations").first).to_contain_text("/delta is a number, not a string")
        await page.locator(".schema-report h2 button").click()
        await expect(page.locator(".detail .violations")).to_contain_text("/delta")


async def test_the_events_of_a_stored_background_response_are_replayed_from_a_number(open_page: OpenPage) -> None:
    async with serving(scripted([{"text": ["One ", "two ", "three."]}])) as served:
        response = await served.client.responses.create(model="scripted", input="Go", background=True, stream=True)
        events = [event async for event in response]
        response_id = events[0].response.id  # type: ignore[union-attr]  # the first event has the response
        async with open_page(f"{served.url}/#/responses/{response_id}") as page:
            await page.get_by_label("join deltas").uncheck()
            await expect(page.locator(".event")).to_have_count(len(events))
            await page.get_by_label("Replay after number").fill("6")
            await page.get_by_role("button", name="Replay", exact=True).click()
            await expect(page.locator(".event")).to_have_count(len(events) - 7)
            await expect(page.locator(".event").first).to_contain_text("7")
            await page.reload()
            await expect(page.locator(".event")).to_have_count(len(events) - 7)
            await page.get_by_role("button", name="All events").click()
            await page.get_by_label("join deltas").uncheck()
            await expect(page.locator(".event")).to_have_count(len(events))
            await expect(page.locator(".markdown")).to_contain_text("One two three.")
