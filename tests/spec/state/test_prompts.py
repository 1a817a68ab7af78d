"""Prompt templates (`prompt: {id, version, variables}`), through the official SDK: G24's row `prompt`."""

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from openai import BadRequestError, NotFoundError

from apis.errors import ConfigError
from stack.build import open_stack
from stack.config import StackConfig
from stack.wiring import wire_providers
from tests.support.models.images import PIXEL_URL
from tests.support.sdk.requests import chat_requests, create, messages, responses, stream
from tests.support.sdk.websockets import talking
from tests.support.servers.serving import MEMORY, Served, scripted, serving
from tests.support.waiting import until_status

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPTS: dict[str, Any] = {
    "pmpt_weather": {
        "default_version": "2",
        "versions": {
            "1": {"instructions": "Old."},
            "2": {
                "instructions": "You are a {{ tone }} forecaster. Braces: \\{{x}}.",
                "model": "scripted",
                "temperature": 0.25,
                "max_output_tokens": 100,
                "reasoning": {"effort": "low"},
                "text": {
                    "format": {"type": "json_schema", "name": "w", "schema": {"type": "object"}},
                    "verbosity": "low",
                },
                "tools": [{"type": "function", "name": "get", "parameters": {"type": "object", "properties": {}}}],
            },
        },
    },
    "pmpt_ask": {
        "versions": {
            "1": {
                "messages": [
                    {"role": "user", "content": "Example?"},
                    {"role": "assistant", "content": "An example for {{name}}."},
                    {"role": "user", "content": "{{name}} asks: {{matter}}. Thanks."},
                ]
            }
        }
    },
    "broken-default": {"versions": {"1": {"instructions": "Hi.", "model": "elsewhere"}}},
}
WEATHER: dict[str, Any] = {"id": "pmpt_weather", "variables": {"tone": "dry"}}


def ask(name: Any = "Ann", matter: Any = "why") -> dict[str, Any]:
    return {"id": "pmpt_ask", "variables": {"name": name, "matter": matter}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncGenerator[Served]:
    async with serving(scripted(*[[{"text": "{}"}]] * 100), responses={"prompts": PROMPTS}) as served:
        yield served


async def error_of(served: Served, **fields: Any) -> tuple[str | None, str | None]:
    with pytest.raises(BadRequestError) as caught:
        await responses(served).create(**{"input": "hi", "model": "scripted", **fields})
    return caught.value.param, caught.value.code


async def test_a_prompt_names_the_model_and_the_defaults_of_the_request(served: Served) -> None:
    response = await responses(served).create(prompt=WEATHER, input="hi")
    chat = chat_requests(served)[-1]
    assert messages(served)[0] == {
        "role": "developer",
        "content": "You are a dry forecaster. Braces: {{x}}.",
    }
    assert (chat.model, chat.temperature, chat.max_completion_tokens) == ("scripted", 0.25, 100)
    assert (chat.reasoning_effort, chat.verbosity) == ("low", "low")
    assert [tool.name for tool in chat.tools or ()] == ["get"]
    assert response.prompt.model_dump() == {"id": "pmpt_weather", "version": "2", "variables": {"tone": "dry"}}
    assert response.instructions == "You are a dry forecaster. Braces: {{x}}."
    assert (response.model, response.temperature, response.tools[0].name) == ("scripted", 0.25, "get")
    stored = await responses(served).retrieve(response.id)
    assert (stored.prompt, stored.instructions) == (response.prompt, response.instructions)


async def test_fields_of_the_request_win(served: Served) -> None:
    await responses(served).create(
        prompt=WEATHER,
        input="hi",
        instructions="Mine.",
        temperature=1.5,
        tools=[],
        reasoning={"effort": "high"},
        text={"verbosity": "high"},
    )
    chat = chat_requests(served)[-1]
    assert messages(served)[0]["content"] == "Mine."
    assert (chat.temperature, chat.tools, chat.reasoning_effort, chat.verbosity) == (1.5, None, "high", "high")
    assert chat.response_format is not None, "the format of the prompt still holds"


async def test_another_version_is_chosen_by_name(served: Served) -> None:
    response = await create(served, prompt={"id": "pmpt_weather", "version": "1"})
    assert messages(served)[0]["content"] == "Old."
    assert response.prompt.version == "1"


async def test_messages_begin_the_input_and_stay_in_the_chain(served: Served) -> None:
    first = await create(served, prompt=ask(), input="Now.")
    contents_expected = ["Example?", "An example for Ann.", "Ann asks: why. Thanks.", "Now."]
    assert [message["content"] for message in messages(served)] == contents_expected
    items = [item async for item in responses(served).input_items.list(first.id, order="asc")]
    assert [item.content[0].text for item in items] == contents_expected
    await create(served, previous_response_id=first.id, input="And?")
    contents = [message["content"] for message in messages(served)]
    assert contents[:4] == contents_expected
    assert contents[-1] == "And?"


async def test_the_messages_of_a_prompt_suffice_as_input(served: Served) -> None:
    response = await responses(served).create(model="scripted", prompt=ask())
    assert response.status == "completed"
    assert messages(served)[-1]["content"] == "Ann asks: why. Thanks."


async def test_instructions_are_not_carried_over(served: Served) -> None:
    first = await create(served, prompt={"id": "pmpt_weather", "version": "1"})
    await create(served, previous_response_id=first.id)
    assert "developer" not in [message["role"] for message in messages(served)]


async def test_a_value_is_inserted_unchanged(served: Served) -> None:
    await create(served, prompt=ask("{{matter}}", {"type": "input_text", "text": "{{name}} \\1"}))
    assert messages(served)[2]["content"] == "{{matter}} asks: {{name}} \\1. Thanks."


async def test_a_variable_may_be_an_image_or_a_file(served: Served) -> None:
    image = {"type": "input_image", "image_url": PIXEL_URL, "detail": "low"}
    response = await create(served, prompt=ask(matter=image))
    content = messages(served)[2]["content"]
    assert [part["type"] for part in content] == ["text", "image_url", "text"]
    assert (content[0]["text"], content[2]["text"]) == ("Ann asks: ", ". Thanks.")
    assert response.prompt.variables["matter"].image_url == PIXEL_URL
    file = {"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,SGVsbG8="}
    await create(served, prompt=ask(matter=file))
    assert "Hello" in str(messages(served)[2]["content"])


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown id": ({"prompt": {"id": "pmpt_no"}}, "prompt.id"),
    "no id": ({"prompt": {"version": "1"}}, "prompt.id"),
    "an unknown version": ({"prompt": {**WEATHER, "version": "9"}}, "prompt.version"),
    "a version that is a number": ({"prompt": {**WEATHER, "version": 2}}, "prompt.version"),
    "a missing variable": ({"prompt": {"id": "pmpt_weather"}}, "prompt.variables.tone"),
    "an unknown variable": (
        {"prompt": {**WEATHER, "variables": {"tone": "dry", "city": "Rome"}}},
        "prompt.variables.city",
    ),
    "a variable that is a number": ({"prompt": ask(7)}, "prompt.variables.name"),
    "a variable of an unknown type": ({"prompt": ask({"type": "input_audio"})}, "prompt.variables.name.type"),
    "an image in instructions": (
        {"prompt": {**WEATHER, "variables": {"tone": {"type": "input_image", "image_url": PIXEL_URL}}}},
        "prompt.variables.tone",
    ),
    "an image in a message of the model": (
        {"prompt": ask({"type": "input_image", "image_url": PIXEL_URL})},
        "prompt.variables.name",
    ),
    "a file that is none": (
        {"prompt": ask(matter={"type": "input_file", "file_id": "file-none"})},
        "prompt.variables.matter.file_id",
    ),
    "an image that is none": (
        {"prompt": ask(matter={"type": "input_image", "image_url": "data:image/png;base64,AAAA"})},
        "prompt.variables.matter.image_url",
    ),
    "too much text": ({"prompt": ask("x" * (6 * 2**20))}, "prompt.variables"),
    "an input of the request's own": (
        {
            "prompt": ask(),
            "input": [{"role": "user", "content": "x"}, {"type": "item_reference", "id": "msg_no"}],
        },
        "input[1].id",
    ),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_wrong_prompt_is_refused_by_the_name_of_the_field(served: Served, name: str) -> None:
    fields, param = BAD[name]
    with pytest.raises((BadRequestError, NotFoundError)) as caught:
        await create(served, **fields)
    assert caught.value.param == param, caught.value
    if "input" not in fields:
        assert caught.value.status_code == 400


async def test_a_missing_variable_has_the_code_of_a_missing_parameter(served: Served) -> None:
    assert await error_of(served, prompt={"id": "pmpt_weather"}) == (
        "prompt.variables.tone",
        "missing_required_parameter",
    )


async def test_a_model_is_required_where_neither_names_one(served: Served) -> None:
    for prompt in ({}, {"prompt": ask()}):
        with pytest.raises(BadRequestError) as caught:
            await responses(served).create(input="hi", **prompt)
        assert (caught.value.param, caught.value.code) == ("model", "missing_required_parameter")


async def test_an_error_about_a_default_of_the_prompt_names_the_prompt() -> None:
    tools = [{"type": "file_search", "vector_store_ids": ["vs_1"]}]
    prompts = {"p": {"versions": {"1": {"instructions": "Hi.", "tools": tools}}}}
    async with serving(responses={"prompts": prompts}) as served:
        assert (await error_of(served, prompt={"id": "p"}))[0] == "prompt"
        assert str((await error_of(served, tools=tools))[0]).startswith("tools[0]")


async def test_a_background_response_is_rendered_once(served: Served) -> None:
    queued = await create(served, prompt=ask(), background=True)
    assert queued.prompt.version == "1"
    response = await until_status(responses(served), queued.id, "completed")
    assert response.prompt == queued.prompt
    assert [message["content"] for message in messages(served)].count("Ann asks: why. Thanks.") == 1


async def test_a_stream_echoes_the_prompt(served: Served) -> None:
    events = await stream(served, prompt=ask())
    assert events[0].response.prompt.id == events[-1].response.prompt.id == "pmpt_ask"


async def test_a_websocket_takes_prompts_and_chains_them_unstored(served: Served) -> None:
    async with talking(served) as talk:
        first = await talk.ask(prompt=ask(), store=False)
        assert first.prompt.variables == {"name": "Ann", "matter": "why"}
        await talk.ask(previous_response_id=first.id, store=False, input="And?")
        assert "Ann asks: why. Thanks." in [message["content"] for message in messages(served)]
        assert (await talk.refused(prompt={"id": "no"})).error.param == "prompt.id"


async def test_input_tokens_and_compactions_take_prompts(served: Served) -> None:
    count = responses(served).input_tokens.count
    plain = await count(input="hi", model="scripted")
    rendered = await count(input="hi", extra_body={"prompt": WEATHER})
    assert rendered.input_tokens > plain.input_tokens
    with pytest.raises(BadRequestError) as caught:
        await count(input="hi", extra_body={"prompt": ask()})
    assert caught.value.param == "model"
    compacted = await responses(served).compact(model="scripted", input="Now.", extra_body={"prompt": ask()})
    texts = [part.text for item in compacted.output if item.type == "message" for part in item.content]
    assert texts == ["Example?", "Ann asks: why. Thanks.", "Now."]


async def test_a_folder_of_files_is_a_library(tmp_path: Path) -> None:
    (tmp_path / "greet.yaml").write_text("versions: {1: {instructions: 'Greet {{who}}.'}}\n")
    (tmp_path / "other.yml").write_text(
        "id: pmpt_x\ndefault_version: 2\nversions: {2: {instructions: X.}, 3: {instructions: Y.}}"
    )
    (tmp_path / "notes.txt").write_text("no prompt")
    async with serving(responses={"prompts": str(tmp_path)}) as served:
        await create(served, prompt={"id": "greet", "variables": {"who": "Bo"}})
        assert messages(served)[0]["content"] == "Greet Bo."
        assert (await create(served, prompt={"id": "pmpt_x"})).prompt.version == "2"


WRONG_FILES: dict[str, tuple[str, str]] = {
    "no YAML": ("versions: [", "is not YAML that can be used"),
    "no mapping": ("- 1", "must be a mapping with the key versions"),
    "no versions": ("id: x", "versions: is required"),
    "an unknown key": ("versions: {1: {instruction: x}}", "versions.1.instruction: is not a known key"),
    "nothing to say": ("versions: {1: {temperature: 1}}", "versions.1: holds neither instructions nor messages"),
    "a wrong variable": ("versions: {1: {instructions: 'a {{b c}}'}}", "'{{b c}}' is no variable: write {{name}}"),
    "no default": ("versions: {1: {instructions: a}, 2: {instructions: b}}", "needs default_version: one of 1, 2"),
    "a default that is none": ("default_version: 3\nversions: {1: {instructions: a}}", "none of its versions: 1"),
    "a wrong temperature": ("versions: {1: {instructions: a, temperature: 3}}", "versions.1.temperature: "),
    "the id of another": ("id: good\nversions: {1: {instructions: a}}", "another file has the id 'good' too"),
}


@pytest.mark.parametrize("name", WRONG_FILES)
async def test_a_wrong_file_ends_the_start_with_its_path_and_the_remedy(name: str, tmp_path: Path) -> None:
    text, message = WRONG_FILES[name]
    (tmp_path / "good.yaml").write_text("versions: {1: {instructions: Hi.}}")
    (tmp_path / "wrong.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        await _open(str(tmp_path))
    assert str(caught.value).startswith(f"config: responses: prompts: {tmp_path / 'wrong.yaml'}: ")
    assert message in str(caught.value)


async def test_a_folder_that_is_not_there_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no folder .*none\. Create it"):
        await _open(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="holds no file"):
        await _open(str(tmp_path))


async def test_a_wrong_mapping_names_its_path_in_the_run_config() -> None:
    with pytest.raises(ConfigError, match=r"responses\.prompts\.a\.versions\.1\.temperature: Input should be less"):
        await _open({"a": {"versions": {"1": {"instructions": "x", "temperature": 9}}}})


async def _open(prompts: Any) -> None:
    config = StackConfig.model_validate(
        {
            "inference": {"provider": "scripted"},
            "kv_store": MEMORY,
            "responses": {"provider": "loop", "prompts": prompts},
        }
    )
    wire_providers(config)
    async with open_stack(config):
        pass
