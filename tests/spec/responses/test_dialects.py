"""The two dialects of a stream: OpenAI's, and Open Responses'. They differ in names of events alone."""

import re
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError

from tests.support.laws.stream_laws import check_frames
from tests.support.sdk.requests import stream, wire
from tests.support.servers.serving import Served, scripted, serving

SCRIPT = scripted([{"reasoning": ["th", "ink"]}, {"text": ["Hel", "lo"]}])
HEADER = "x-responses-dialect"
COMPACTS = [{"type": "compaction", "compact_threshold": 40}]
SCHEMA = Path(__file__).with_name("openresponses-2026-04-24.json")


async def events(served: Served, headers: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """The events as they stand on the wire."""
    return check_frames(await wire(served, headers=headers))


def reasoning_names(received_events: list[dict[str, Any]]) -> list[str]:
    return [event["type"] for event in received_events if event["type"].startswith("response.reasoning")]


async def test_openais_names_are_the_default() -> None:
    async with serving(SCRIPT) as served:
        received_events = await events(served)
    assert reasoning_names(received_events) == ["response.reasoning_text.delta"] * 2 + ["response.reasoning_text.done"]


@pytest.mark.parametrize("by", ["header", "option"])
async def test_open_responses_names_come_by_header_or_by_option(by: str) -> None:
    server = {"dialect": "open-responses"} if by == "option" else {}
    async with serving(SCRIPT, server=server) as served:
        served.streams.check = False
        received_events = await events(served, {HEADER: "open-responses"} if by == "header" else None)
    assert reasoning_names(received_events) == ["response.reasoning.delta"] * 2 + ["response.reasoning.done"]


async def test_the_header_wins_over_the_option() -> None:
    async with serving(SCRIPT, server={"dialect": "open-responses"}) as served:
        received_events = await events(served, {HEADER: "openai"})
    assert "response.reasoning_text.delta" in reasoning_names(received_events)


async def test_the_dialects_differ_in_names_alone() -> None:
    async with serving(SCRIPT) as served:
        one, other = await events(served), await events(served, {HEADER: "open-responses"})

    def nameless(received_events: list[dict[str, Any]]) -> list[set[str]]:
        return [set(event) for event in received_events]

    assert nameless(one) == nameless(other)
    assert [event["sequence_number"] for event in other] == list(range(len(other)))


async def test_an_unknown_dialect_is_refused() -> None:
    async with serving(SCRIPT) as served:
        with pytest.raises(BadRequestError, match="'openai' or 'open-responses'"):
            await stream(served, extra_headers={HEADER: "klingon"})


async def test_the_sdk_reads_a_stream_in_either_dialect() -> None:
    async with serving(SCRIPT) as served:
        received_events = await stream(served, extra_headers={HEADER: "open-responses"})
    assert received_events[-1].response.output_text == "Hello"


async def test_a_compaction_has_the_events_of_the_open_responses_schema_alone() -> None:
    """`response.compaction.compacting` is no event of its closed union, in no transport."""
    turns = [[{"text": "A long answer. " * 20}], [{"text": "A summary."}], [{"text": "An answer."}]]
    async with serving(scripted(*turns)) as served:
        served.streams.check = False
        first = await served.client.responses.create(model="scripted", input="one " * 20)
        fields: dict[str, Any] = {"input": "two", "previous_response_id": first.id, "context_management": COMPACTS}
        events = check_frames(await wire(served, headers={HEADER: "open-responses"}, **fields))
    assert "compaction" in [item["type"] for item in events[-1]["response"]["output"]]
    event_types = set(re.findall(r'"(response\.[a-z_.]+)"', SCHEMA.read_text()))
    assert {event["type"] for event in events} <= event_types
