"""`include` decides in each request by itself what its items show; all of it is stored."""

from collections.abc import AsyncGenerator
from typing import Any

import pytest
import pytest_asyncio
from openai import BadRequestError

from tests.support.sdk.answer_shapes import call
from tests.support.sdk.requests import bare, create, responses, stream
from tests.support.servers.fake_exa import KEY, FakeExa
from tests.support.servers.serving import MEMORY, Served, scripted, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

RESULTS = ["web_search_call.results", "web_search_call.action.sources"]
SEALED = ["reasoning.encrypted_content"]
TURN = [
    [{"reasoning": "Look it up."}, call("web_search", '{"query": "rome"}')],
    [{"text": "Sunny."}],
]
TOOL = {"type": "web_search"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncGenerator[Served]:
    async with FakeExa() as exa:
        tools = {"provider": "exa", "api_key": KEY, "base_url": exa.url}
        inference = scripted(*TURN * 40)
        async with serving(inference, tool_runtime=tools, kv_store=MEMORY) as served:
            yield served


def shown_fields(item: Any) -> set[str]:
    """The parts of a search, or of reasoning, that an item has beyond what every request sees."""
    fields = bare(item)
    if fields["type"] == "reasoning":
        return {"token"} if fields.get("encrypted_content") else set()
    parts = {"results": fields.get("results"), "sources": fields["action"].get("sources")}
    return {name for name, value in parts.items() if value}


def output(response: Any) -> list[set[str]]:
    return [shown_fields(item) for item in response.output[:2]]


ALL = [{"token"}, {"results", "sources"}]
NONE: list[set[str]] = [set(), set()]


async def test_a_response_shows_later_what_was_not_included_when_it_was_created(served: Served) -> None:
    """The request that creates the response does not include it, and the later GET does."""
    created = await create(served, tools=[TOOL])
    assert output(created) == NONE
    assert output(await responses(served).retrieve(created.id)) == NONE
    included = await responses(served).retrieve(created.id, include=[*RESULTS, *SEALED])
    assert output(included) == ALL


async def test_a_response_shows_no_longer_what_was_included_when_it_was_created(served: Served) -> None:
    """Create with, GET without; the stream's items say what its response says."""
    events = await stream(served, tools=[TOOL], include=[*RESULTS, *SEALED])
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [shown_fields(item) for item in done[:2]] == output(events[-1].response) == ALL
    assert output(await responses(served).retrieve(events[-1].response.id)) == NONE


async def test_a_stream_without_include_shows_none_of_it(served: Served) -> None:
    """Live events hide what the store has."""
    events = await stream(served, tools=[TOOL])
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [shown_fields(item) for item in done[:2]] == output(events[-1].response) == NONE


async def test_the_stream_of_a_background_response_shows_what_each_reader_includes(served: Served) -> None:
    """The log has everything, and two readers of it see two streams."""
    events = await stream(served, tools=[TOOL], background=True)
    assert output(events[-1].response) == NONE
    response_id = events[-1].response.id
    again = [event async for event in await responses(served).retrieve(response_id, stream=True)]
    assert output(again[-1].response) == NONE
    included = await responses(served).retrieve(response_id, stream=True, include=[*RESULTS, *SEALED])
    received_batches = [event async for event in included]
    done = [event.item for event in received_batches if event.type == "response.output_item.done"]
    assert [shown_fields(item) for item in done[:2]] == output(received_batches[-1].response) == ALL
    assert done[0].encrypted_content == received_batches[-1].response.output[0].encrypted_content


async def test_the_items_of_a_conversation_show_what_their_request_includes(served: Served) -> None:
    """Lists and single items show it."""
    client = served.client.conversations
    conversation = await client.create()
    await create(served, tools=[TOOL], conversation=conversation.id)
    for include, expected in (([], NONE), ([*RESULTS, *SEALED], ALL)):
        listed = await client.items.list(conversation.id, order="asc", include=include)  # type: ignore[arg-type]  # the SDK wants the literals
        assert [shown_fields(item) for item in listed.data[1:3]] == expected
        single = await client.items.retrieve(listed.data[2].id, conversation_id=conversation.id, include=include)  # type: ignore[arg-type]  # as above
        assert shown_fields(single) == expected[1]


async def test_the_searches_of_a_response_are_counted(served: Served) -> None:
    """Tool_usage has what the server searched for."""
    usage = (await create(served, tools=[TOOL])).tool_usage
    assert (usage.web_search.num_requests, usage.image_gen.total_tokens) == (1, 0)


async def test_a_sealed_item_from_the_store_can_be_sent_back(served: Served) -> None:
    """The token that GET seals is the model's own reasoning."""
    created = await create(served, tools=[TOOL])
    included = await responses(served).retrieve(created.id, include=SEALED)
    item = {key: value for key, value in bare(included.output[0]).items() if key != "content"}
    sent = await create(served, input=[{"role": "user", "content": "x"}, item], tools=[TOOL], store=False)
    assert sent.input_transformations is None


async def test_the_input_items_show_what_their_request_includes(served: Served) -> None:
    """A call that a client sent with its outputs."""
    code = {
        "type": "code_interpreter_call",
        "id": "ci_sent",
        "container_id": "cntr_1",
        "status": "completed",
        "code": "1",
        "outputs": [{"type": "logs", "logs": "1"}],
    }
    created = await create(served, input=[code, {"role": "user", "content": "x"}], tools=[TOOL])
    listing = responses(served).input_items.list
    bare_items = [item async for item in listing(created.id, order="asc")]
    assert bare_items[0].outputs is None
    included = [item async for item in listing(created.id, order="asc", include=["code_interpreter_call.outputs"])]
    assert included[0].outputs[0].logs == "1"


@pytest.mark.parametrize("method", ["retrieve", "input_items.list"])
async def test_an_unknown_value_is_refused_everywhere(served: Served, method: str) -> None:
    """The routes that read refuse it, too."""
    created = await create(served, tools=[TOOL])
    target: Any = responses(served)
    for name in method.split("."):
        target = getattr(target, name)
    with pytest.raises(BadRequestError) as caught:
        await target(created.id, include=["all"])
    assert caught.value.param == "include[0]"
