"""The scripted model as a demo: what anyone sees who tries a stack without a model."""

from tests.support.sdk.requests import create, refusal, stream
from tests.support.servers.serving import scripted, serving


async def test_without_a_script_it_repeats_what_the_user_said_last() -> None:
    async with serving() as served:
        first = await create(served, input="Hello there, world!")
        second = await create(served, input="And again.", previous_response_id=first.id)
    assert first.output_text == "Hello there, world!"
    assert second.output_text == "And again."


async def test_it_repeats_a_word_at_a_time() -> None:
    async with serving() as served:
        events = await stream(served, input="Hello there, world!")
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert deltas == ["Hello", " there,", " world!"]


async def test_a_script_is_played_turn_by_turn_and_then_again() -> None:
    async with serving(scripted([{"text": "one"}], [{"text": "two"}])) as served:
        texts = [(await create(served)).output_text for _ in range(5)]
    assert texts == ["one", "two", "one", "two", "one"]


async def test_it_has_the_name_it_was_given() -> None:
    async with serving(scripted([{"text": "one"}], model="demo")) as served:
        assert (await create(served, model="demo")).model == "demo"
        assert (await refusal(served, 404, model="scripted"))["code"] == "model_not_found"


async def test_it_counts_tokens_in_words() -> None:
    async with serving() as served:
        usage = (await create(served, input="one two three")).usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (3, 3, 6)


async def test_it_keeps_to_a_limit_of_tokens_in_reasoning_too() -> None:
    async with serving(scripted([{"reasoning": ["hm "] * 30}, {"text": "done"}])) as served:
        response = await create(served, max_output_tokens=20)
    assert response.status == "incomplete"
    assert [item.type for item in response.output] == ["reasoning"]
    assert response.usage.output_tokens_details.reasoning_tokens == response.usage.output_tokens == 20
