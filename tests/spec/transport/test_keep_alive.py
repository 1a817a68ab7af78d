"""Streams that are silent for long: kept open by comments, which clients do not see."""

from tests.support.laws.stream_laws import check_frames
from tests.support.sdk.requests import stream, wire
from tests.support.servers.serving import scripted, serving

SILENT = scripted([{"text": "a"}, {"wait_s": 0.5}, {"text": "b"}])


async def test_a_silent_stream_sends_comments() -> None:
    async with serving(SILENT, server={"keep_alive_s": 0.1}) as served:
        raw = await wire(served)
    silence = raw[raw.index(b'"delta":"a"') : raw.index(b'"delta":"b"')]
    assert b"\n\n: keep-alive\n\n" in silence
    assert check_frames(raw)[-1]["type"] == "response.completed"


async def test_clients_do_not_see_the_comments() -> None:
    async with serving(SILENT, server={"keep_alive_s": 0.1}) as served:
        events = await stream(served)
        async with served.client.responses.stream(model="scripted", input="hi") as accumulating:
            final = await accumulating.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert final.output_text == "ab"


async def test_a_stream_that_talks_needs_no_comments() -> None:
    async with serving(scripted([{"text": ["a"] * 50}]), server={"keep_alive_s": 5}) as served:
        assert b": keep-alive" not in await wire(served)


async def test_a_silent_stream_of_chat_completions_sends_comments_too() -> None:
    async with serving(SILENT, server={"keep_alive_s": 0.1}) as served:
        raw = await wire(served, "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}])
    assert b": keep-alive\n\n" in raw
    assert raw.endswith(b"data: [DONE]\n\n")
