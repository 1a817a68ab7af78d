"""Streams as an OpenAI client sees them."""

from tests.serving import scripted, serving


async def test_accumulated_stream_equals_the_stored_response() -> None:
    script = scripted([{"reasoning": ["think", "ing"]}, {"text": ["Hel", "lo"]}])
    async with serving(script) as served:
        async with served.client.responses.stream(model="scripted", input="hi") as stream:
            types = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert types[:2] == ["response.created", "response.in_progress"]
        assert final.output_text == "Hello"
        stored = await served.client.responses.retrieve(final.id)
        assert stored.model_dump() == final.model_dump(
            exclude={"output": {"__all__": {"content": {"__all__": {"parsed"}}}}}
        )
