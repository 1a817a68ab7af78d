"""Padding of deltas, so that the lengths of frames do not reveal the lengths of tokens."""

from typing import Any

from tests.support.sdk.answer_shapes import call
from tests.support.sdk.requests import stream
from tests.support.servers.serving import scripted, serving

SCRIPT = scripted([{"reasoning": ["th", "ink"]}, {"text": ["a", "b" * 31, "c" * 70]}, call("get", "{", "}")])


def padded(events: list[Any]) -> list[Any]:
    return [event for event in events if getattr(event, "obfuscation", None) is not None]


async def test_deltas_are_not_padded_unless_asked() -> None:
    async with serving(SCRIPT) as served:
        assert not padded(await stream(served))
        assert not padded(await stream(served, stream_options={"include_obfuscation": False}))


async def test_every_delta_is_padded_when_asked_and_nothing_else() -> None:
    async with serving(SCRIPT) as served:
        events = await stream(served, stream_options={"include_obfuscation": True})
    assert padded(events) == [event for event in events if event.type.endswith(".delta")]


async def test_padded_deltas_have_a_length_that_reveals_little() -> None:
    async with serving(SCRIPT) as served:
        events = await stream(served, stream_options={"include_obfuscation": True})
    lengths = {len(event.delta) + len(event.obfuscation) for event in padded(events)}
    assert lengths == {32, 96}


async def test_padding_changes_nothing_else() -> None:
    async with serving(SCRIPT) as served:
        plain = await stream(served)
        events = await stream(served, stream_options={"include_obfuscation": True})
    assert [event.type for event in plain] == [event.type for event in events]
    assert plain[-1].response.output_text == events[-1].response.output_text
