"""The stack's events and responses are valid by the Open Responses schema (openresponses-2026-04-24.json, here)."""

import json
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema_rs
import pytest

from tests.support.laws.stream_laws import check_frames
from tests.support.servers.serving import scripted, serving

SPEC: dict[str, Any] = json.loads((Path(__file__).parent / "openresponses-2026-04-24.json").read_bytes())
STREAM = SPEC["paths"]["/responses"]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"]["oneOf"]
EVENTS: dict[str, str] = {
    name: ref["$ref"]
    for ref in STREAM
    for name in SPEC["components"]["schemas"][ref["$ref"].rsplit("/", 1)[1]]["properties"]["type"]["enum"]
}
FUNCTION = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a place",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
}
SCRIPTS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "text": ([{"text": ["Hel", "lo"]}], {}),
    "reasoning": ([{"reasoning": ["hm", "m"]}, {"text": "Hello"}], {"reasoning": {"effort": "low"}}),
    "refusal": ([{"refusal": ["I ", "won't"]}], {}),
    "call": ([{"call": "get_weather", "arguments": ['{"place":', '"Oslo"}']}], {"tools": [FUNCTION]}),
    "cut": ([{"text": "Hel"}, {"finish": "length"}], {"max_output_tokens": 16}),
    "filtered": ([{"text": "Hel"}, {"finish": "content_filter"}], {}),
    "broken": ([{"text": "Hel"}, {"fail": "gone"}], {}),
    "a schema": (
        [{"text": "{}"}],
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}},
    ),
    "forced": ([{"call": "get_weather", "arguments": "{}"}], {"tools": [FUNCTION], "tool_choice": "required"}),
}


def assert_valid(value: Any, schema: dict[str, Any]) -> None:
    validator = jsonschema_rs.Draft202012Validator({**schema, "components": SPEC["components"]})
    errors = [
        f"{'/'.join(map(str, error.instance_path))}: {error.message[:300]}" for error in validator.iter_errors(value)
    ]
    assert not errors, "\n".join(errors)


@pytest.mark.parametrize("name", SCRIPTS)
async def test_every_event_is_one_of_the_closed_union(name: str) -> None:
    lines, fields = SCRIPTS[name]
    async with serving(scripted(lines)) as served, aiohttp.ClientSession() as http:
        body = {"model": "scripted", "input": "hi", "stream": True, **fields}
        headers = {"x-responses-dialect": "open-responses"}
        async with http.post(f"{served.url}/v1/responses", json=body, headers=headers) as answer:
            events = check_frames(await answer.read())
    assert events
    for event in events:
        assert event["type"] in EVENTS
        assert_valid(event, {"$ref": EVENTS[event["type"]]})


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "broken"])
async def test_the_whole_response_is_a_response_resource(name: str) -> None:
    lines, fields = SCRIPTS[name]
    async with serving(scripted(lines)) as served, aiohttp.ClientSession() as http:
        body = {"model": "scripted", "input": "hi", "instructions": "Be brief.", "metadata": {"a": "b"}, **fields}
        headers = {"x-responses-dialect": "open-responses"}
        async with http.post(f"{served.url}/v1/responses", json=body, headers=headers) as answer:
            assert answer.status == 200
            response = await answer.json()
    assert_valid(response, {"$ref": "#/components/schemas/ResponseResource"})
