"""The reducer of the page: the view model after all events of a stream equals that of the stored response."""

from typing import Any

import pytest

from tests.console.conftest import OpenPage
from tests.support.servers.serving import serving

pytestmark = pytest.mark.console

FUNCTIONS: list[Any] = [
    {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}, "strict": False},
    {"type": "custom", "name": "write"},
]
STREAMS: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": ["One ", "two."]}],
    "reasoning and text": [{"reasoning": ["I ", "think."]}, {"text": "Done."}],
    "refusal": [{"refusal": ["I ", "refuse."]}],
    "function call": [{"reasoning": "Let me look."}, {"call": "look", "arguments": ["{", "}"]}],
    "custom call": [{"call": "write", "arguments": ["some ", "text"], "custom": True}],
    "parallel calls": [{"calls": [{"call": "look", "arguments": "{}"}, {"call": "look", "arguments": "{}"}]}],
    "preamble, call": [{"text": "I look first."}, {"call": "look", "arguments": "{}"}],
    "cut off": [{"text": "Long"}, {"finish": "length"}],
    "failure": [{"text": "Half"}, {"fail": "It broke."}],
}
REDUCE = """
async (events) => {
  const { emptyState, reduce, stateOf } = await import("/console/reducer.js");
  const state = events.reduce((before, event) => reduce(before, event), emptyState());
  const partial = events.slice(0, -1).reduce((before, event) => reduce(before, event), emptyState());
  return { items: state.items, partial: partial.items, stored: stateOf(state.response).items };
}
"""


@pytest.mark.parametrize("name", STREAMS)
async def test_events_and_the_stored_response_make_the_same_view(open_page: OpenPage, name: str) -> None:
    async with serving({"provider": "scripted", "turns": [STREAMS[name]]}) as served:
        stream = await served.client.responses.create(model="scripted", input="Hi", tools=FUNCTIONS, stream=True)
        events = [event.model_dump(mode="json") async for event in stream]
        async with open_page(f"{served.url}/") as page:
            view = await page.evaluate(REDUCE, events)
        assert view["items"] == view["stored"]
        # before the terminal event, which brings the whole object, the deltas alone have made the same items
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert view["partial"][: len(done)] == done
