"""Misspelt fields are refused with the right name, other unknown fields are ignored; hints for shapes of other APIs."""

import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from apis.responses import CreateResponse
from stack.http.unknown_fields import refuse_misspelt_field
from tests.stack.http.raw import ask
from tests.support.sdk.requests import refusal
from tests.support.servers.serving import Served, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")
Json = dict[str, Any]
FUNCTION: Json = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
MISSPELT: dict[str, tuple[Json, str, str]] = {
    "a letter left out": ({"max_ouput_tokens": 20}, "max_ouput_tokens", "max_output_tokens"),
    "letters exchanged": ({"tempreature": 1}, "tempreature", "temperature"),
    "another case": ({"previousResponseId": "resp_1"}, "previousResponseId", "previous_response_id"),
    "two letters of a long name": ({"paralell_tool_calls": True}, "paralell_tool_calls", "parallel_tool_calls"),
    "the singular": ({"tool": []}, "tool", "tools"),
    "within an object": ({"reasoning": {"efort": "low"}}, "reasoning.efort", "reasoning.effort"),
    "within a tool": (
        {"tools": [FUNCTION, {**FUNCTION, "desciption": "x"}]},
        "tools[1].desciption",
        "tools[1].description",
    ),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncGenerator[Served]:
    async with serving() as running:
        yield running


@pytest.mark.parametrize(("fields", "param", "suggestion"), MISSPELT.values(), ids=MISSPELT)
async def test_a_misspelt_field_is_refused_with_the_right_name(
    served: Served, fields: Json, param: str, suggestion: str
) -> None:
    """A field that has no effect because of a typing error is an error, as at OpenAI."""
    error = await refusal(served, extra_body=fields)
    assert (error["code"], error["param"]) == ("unknown_parameter", param)
    assert error["message"] == f"Unknown parameter: '{param}'. Did you mean '{suggestion}'?"


async def test_fields_of_clients_and_engines_are_not_taken_for_misspelt_ones(served: Served) -> None:
    """The additional fields of Codex, LangChain and clients of engines have no effect."""
    more = {
        "client_metadata": 1,
        "min_tokens": 1,
        "top_a": 0.1,
        "speed": "fast",
        "extra": 1,
        "foo": 1,
        "id": 1,
        "thread": 1,
        "x" * 500: 1,
    }
    response = await served.client.responses.create(model="scripted", input="hi", extra_body=more)
    assert response.status == "completed"
    completion = await served.client.chat.completions.create(
        model="scripted", messages=[{"role": "user", "content": "hi"}], extra_body=more
    )
    assert completion.choices[0].finish_reason == "stop"


async def test_thousands_of_unknown_names_cost_no_more_than_a_few() -> None:
    """The names are compared in bounded work."""
    request = CreateResponse.model_validate({"model": "m", "input": "hi"})
    started = time.process_time()
    refuse_misspelt_field({f"extension_{number}": 1 for number in range(100_000)}, request)
    assert time.process_time() - started < 5  # all of them would take two minutes


CHAT_SHAPED: dict[str, tuple[Json, str]] = {
    "a tool": (
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        "In the Responses API, the fields of 'tools[0].function' stand in 'tools[0]' itself.",
    ),
    "a text part": (
        {"input": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
        "In this API, 'text' has the name 'input_text'.",
    ),
    "an image part": (
        {"input": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
        "In this API, 'image_url' has the name 'input_image'.",
    ),
}


@pytest.mark.parametrize(("fields", "hint"), CHAT_SHAPED.values(), ids=CHAT_SHAPED)
async def test_shapes_of_chat_completions_are_refused_with_the_shape_here(
    served: Served, fields: Json, hint: str
) -> None:
    """The commonest shapes of chat completions get a hint, as `messages` does."""
    error = await refusal(served, **fields)
    assert error["message"].endswith(hint)


async def test_parts_of_responses_in_chat_completions_are_refused_with_the_names_there(served: Served) -> None:
    """The hint works in the other direction, too."""
    content: Any = [{"type": "input_text", "text": "hi"}]
    with pytest.raises(BadRequestError) as caught:
        await served.client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": content}])
    assert "In this API, 'input_text' has the name 'text'." in caught.value.message


async def test_a_base_url_with_the_version_twice_is_named(served: Served) -> None:
    """The commonest mistake in the base URL of a client."""
    async with AsyncOpenAI(base_url=f"{served.url}/v1/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(NotFoundError) as caught:
            await client.responses.create(model="scripted", input="hi")
    assert "has '/v1' twice" in caught.value.message


async def test_broken_json_is_refused_with_its_place(served: Served) -> None:
    """The error has the line and the column, and repeats nothing of the body."""
    answer = await ask(served.url, body=b'{"model": "scripted",\n "input": nope}')
    assert answer.status == 400
    assert answer.json["error"]["message"] == "We could not parse the JSON body of your request (line 2, column 11)."


async def test_an_absent_api_is_refused_by_name(served: Served) -> None:
    """A client of another API reads which API it is that this server does not have."""
    answer = await ask(served.url, {"model": "m"}, path="/v1/evals")
    assert answer.status == 404
    assert "'/v1/evals' is not offered by this server." in answer.json["error"]["message"]
