"""Functions in the Playground: arguments shown by schema, results by a form, boxes of JSON checked before sending."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from playwright.async_api import Page, expect

from apis.chat import ChatRequest
from providers.inference.scripted import Scripted
from tests.console.conftest import OpenPage
from tests.console.test_playground import ask, scripted
from tests.support.servers.serving import Served, serving

pytestmark = pytest.mark.console

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "A city"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
    "output_schema": {
        "type": "object",
        "properties": {
            "celsius": {"type": "number"},
            "sky": {"enum": ["clear", "cloudy"]},
            "rain": {"type": "boolean"},
            "hours": {"type": "array", "items": {"$ref": "#/$defs/hour"}, "minItems": 1},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["celsius", "sky", "hours"],
        "additionalProperties": False,
        "$defs": {"hour": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}},
    },
}


def requests_of(served: Served) -> Sequence[ChatRequest]:
    """Return the requests that the scripted model has received."""
    assert isinstance(served.stack.inference, Scripted)
    return served.stack.inference.requests


async def declare(page: Page, *functions: dict[str, Any]) -> None:
    await page.get_by_role("button", name="Settings").click()
    await page.get_by_label("Functions that you answer").fill(json.dumps([*functions]))
    await page.get_by_role("button", name="Settings").click()


async def test_a_result_is_entered_in_a_form_of_its_schema_and_sent_as_json(open_page: OpenPage) -> None:
    call = [{"call": "get_weather", "arguments": '{"city": "Paris", "days": 2}'}]
    async with serving(scripted(call, [{"text": "Warm."}])) as served, open_page(f"{served.url}/") as page:
        await declare(page, WEATHER)
        await ask(page, "Weather?")
        arguments = page.locator(".arguments")
        await expect(arguments).to_contain_text("Paris")
        await expect(arguments.locator("dt").nth(1)).to_contain_text("integer")
        form = page.get_by_role("form", name="Output of get_weather")
        await form.get_by_role("button", name="Send output").click()
        await expect(form.get_by_role("alert")).to_contain_text("/hours has fewer than 1 items")
        await form.get_by_label("celsius").fill("21.5")
        await form.get_by_label("sky").select_option('"cloudy"')
        await form.get_by_label("rain").check()
        await form.get_by_role("button", name="Add").click()
        await form.get_by_label("at").fill("noon")
        await expect(form.get_by_text("fits its schema")).to_be_visible()
        await form.get_by_role("button", name="Send output").click()
        await expect(page.get_by_text("Warm.")).to_be_visible()
        requests = requests_of(served)
        (sent,) = [message for message in requests[-1].messages if message.role == "tool"]
        expected = {"celsius": 21.5, "sky": "cloudy", "rain": True, "hours": [{"at": "noon"}]}
        assert json.loads(str(sent.content)) == expected


async def test_the_form_can_be_left_for_json_with_the_same_check(open_page: OpenPage) -> None:
    call = [{"call": "get_weather", "arguments": '{"city": "Paris"}'}]
    async with serving(scripted(call, [{"text": "Cold."}])) as served, open_page(f"{served.url}/") as page:
        await declare(page, WEATHER)
        await ask(page, "Weather?")
        form = page.get_by_role("form", name="Output of get_weather")
        await form.get_by_label("as JSON").first.check()
        box = form.get_by_label("get_weather as JSON")
        await box.fill('{"celsius": "warm"}')
        await form.get_by_role("button", name="Send output").click()
        await expect(form.get_by_role("alert")).to_contain_text("/celsius is a string, not a number")
        await box.fill('{"celsius": 1, "sky": "clear", "hours": [{"at": "now"}]}')
        await form.get_by_role("button", name="Send output").click()
        await expect(page.get_by_text("Cold.")).to_be_visible()


async def test_arguments_that_break_the_schema_are_marked(open_page: OpenPage) -> None:
    call = [{"call": "get_weather", "arguments": '{"city": 7, "other": "<b>x</b>"}'}]
    async with serving(scripted(call)) as served, open_page(f"{served.url}/") as page:
        await declare(page, WEATHER)
        await ask(page, "Weather?")
        await expect(page.get_by_text("✕ breaks the function's schema")).to_be_visible()
        await expect(page.locator(".arguments .bad")).to_contain_text("/city is a number, not a string")
        await expect(page.locator(".arguments")).to_contain_text("<b>x</b>")


@pytest.mark.parametrize(
    ("label", "text", "problem"),
    [
        ("Answer as JSON of this schema", "{", "This is not JSON"),
        ("Answer as JSON of this schema", '{"type": "text"}', '/type is not one of "string"'),
        ("Answer as JSON of this schema", '{"required": "a"}', "/required is a string, not an array"),
        ("Answer as JSON of this schema", '{"$ref": "#/$defs/no"}', "points to nothing: #/$defs/no"),
        ("Answer as JSON of this schema", '{"pattern": "("}', "/pattern is no regular expression"),
        ("Functions that you answer", '[{"parameters": {}}]', 'has no "name"'),
        ("Functions that you answer", '[{"name": "f", "parameters": {"type": 3}}]', "/0/parameters/type"),
        ("MCP servers", '{"server_label": "a", "server_url": "ftp://a"}', "/server_url does not match"),
    ],
)
async def test_a_box_says_what_is_wrong_and_nothing_is_sent(
    open_page: OpenPage, label: str, text: str, problem: str
) -> None:
    async with serving() as served, open_page(f"{served.url}/") as page:
        await page.get_by_role("button", name="Settings").click()
        await page.get_by_label(label).fill(text)
        await expect(page.locator(".settings .bad")).to_contain_text(problem)
        await ask(page, "Hi")
        await expect(page.get_by_role("alert")).to_contain_text(label)
        await expect(page.get_by_label("Message")).to_have_value("Hi")
        assert not requests_of(served)
        await page.get_by_label(label).fill("")
        await page.keyboard.press("Control+Enter")


async def test_an_answer_of_a_schema_is_asked_for_with_its_title_as_name(open_page: OpenPage) -> None:
    schema = {"title": "A río!", "type": "object", "properties": {"name": {"type": "string"}}}
    async with serving(scripted([{"text": '{"name": "Loire"}'}])) as served, open_page(f"{served.url}/") as page:
        await page.get_by_role("button", name="Settings").click()
        await page.get_by_label("Answer as JSON of this schema").fill(json.dumps(schema))
        await ask(page, "Hi")
        await expect(page.get_by_text("Loire")).to_be_visible()
        await page.get_by_role("button", name="Inspect").click()
        await expect(page.get_by_role("tab", name="Schema ✓")).to_be_visible()
