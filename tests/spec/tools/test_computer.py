"""The client's computer: calls come out as `computer_call` items, and a model that sees reads the screenshots."""

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from agents import Agent, AsyncComputer, ComputerTool, ModelSettings, OpenAIResponsesModel
from openai import BadRequestError

from apis.inference import Model
from providers.inference.scripted import Scripted
from tests.support.models.images import PIXEL_URL, PNG
from tests.support.sdk.agents_sdk import RUNS, Run
from tests.support.sdk.answer_shapes import Script, call
from tests.support.sdk.conversations import conversations
from tests.support.sdk.drawing import Seeing
from tests.support.sdk.requests import bare, chat_requests, create, messages, refusal, responses, stream
from tests.support.servers.serving import Served, serving

Json = dict[str, Any]
COMPUTER: Json = {"type": "computer"}
PREVIEW: Json = {
    "type": "computer_use_preview",
    "display_width": 1024,
    "display_height": 768,
    "environment": "browser",
}
USER: Json = {"role": "user", "content": "hi"}
DONE: Script = [{"text": "Done."}]
SCREEN: Json = {"type": "computer_screenshot", "image_url": PIXEL_URL}
SEEN: Json = {"type": "image_url", "image_url": {"url": PIXEL_URL}}
ACTIONS: list[Json] = [
    {"type": "screenshot"},
    {"type": "click", "button": "right", "x": 1, "y": 2, "keys": ["SHIFT"]},
    {"type": "double_click", "x": 1, "y": 2},
    {"type": "drag", "path": [{"x": 1, "y": 2}, {"x": 3, "y": 4}]},
    {"type": "keypress", "keys": ["CTRL", "C"]},
    {"type": "move", "x": 1, "y": 2},
    {"type": "scroll", "x": 1, "y": 2, "scroll_x": 0, "scroll_y": -10},
    {"type": "type", "text": "krill"},
    {"type": "wait"},
]
CLICK: Json = {"type": "click", "button": "left", "x": 1, "y": 2}


class Blind(Scripted):
    """A scripted model that takes text only."""

    class Config(Scripted.Config):
        pass

    async def models(self) -> Sequence[Model]:
        return [replace(model, modalities=frozenset()) for model in await super().models()]


@asynccontextmanager
async def seeing(*turns: Script, kind: type[Scripted] = Seeing, model: str = "scripted") -> AsyncGenerator[Served]:
    """A stack whose model plays these turns."""
    inference = {"provider": f"{kind.__module__}:{kind.__name__}", "model": model, "turns": [*turns] or [DONE]}
    async with serving(inference, more={"files": {"provider": "kv"}}) as served:
        yield served


def act(*actions: Json, call_id: str = "c1") -> Json:
    return call("computer", json.dumps({"actions": [*actions]}), id=call_id)


def screenshot(call_id: str = "c1", **fields: Any) -> Json:
    return {"type": "computer_call_output", "call_id": call_id, "output": SCREEN, **fields}


async def test_every_action_comes_out_and_ends_the_turn() -> None:
    async with seeing([act(*ACTIONS)]) as served:
        events = await stream(served, tools=[COMPUTER])
        (offered,) = chat_requests(served)[-1].tools or []
    item = events[-1].response.output[0]
    assert item.to_dict() == {
        "id": item.id,
        "type": "computer_call",
        "call_id": "c1",
        "actions": ACTIONS,
        "pending_safety_checks": [],
        "status": "completed",
    }
    assert item.id.startswith("cuc_")
    assert [event.type for event in events[2:-1]] == ["response.output_item.added", "response.output_item.done"]
    schema: Any = offered.model_dump()["function"]["parameters"]["properties"]["actions"]["items"]
    assert [each["properties"]["type"]["enum"][0] for each in schema["anyOf"]] == sorted(
        each["type"] for each in ACTIONS
    )


async def test_the_preview_has_one_action_and_the_size_of_the_screen() -> None:
    async with seeing([call("computer", json.dumps({"action": CLICK}), id="c1")]) as served:
        response = await create(served, tools=[PREVIEW], truncation="auto")
        (offered,) = chat_requests(served)[-1].tools or []
    assert response.output[0].action.to_dict() == CLICK
    assert response.output[0].actions is None
    assert response.tools[0].to_dict() == PREVIEW
    assert "1024 x 768 pixels; the environment is browser" in offered.model_dump()["function"]["description"]


@pytest.mark.parametrize("how", ["chained", "sent back", "referred to", "in a conversation"])
async def test_the_screenshot_reaches_a_model_that_sees(how: str) -> None:
    async with seeing([{"reasoning": "hm"}, act(CLICK)], DONE) as served:
        fields: Json = {"tools": [COMPUTER]}
        if how == "in a conversation":
            fields["conversation"] = (await conversations(served).create()).id
        first = await create(served, **fields)
        output = screenshot(acknowledged_safety_checks=[{"id": "s1", "code": "malicious", "message": "m"}])
        match how:
            case "chained":
                second = await create(served, **fields, input=[output], previous_response_id=first.id)
            case "sent back":
                second = await create(served, **fields, input=[USER, *first.output, output])
            case "referred to":
                references = [{"type": "item_reference", "id": item.id} for item in first.output]
                second = await create(served, **fields, input=[USER, *references, output])
            case _:
                second = await create(served, **fields, input=[output])
        _, called, result = messages(served)
        listed = [item async for item in responses(served).input_items.list(second.id, order="desc")]
        if how == "in a conversation":
            items = [item async for item in conversations(served).items.list(fields["conversation"], order="asc")]
            assert [item.type for item in items[2:4]] == ["computer_call", "computer_call_output"]
            assert items[3].to_dict() == listed[0].to_dict()
    assert called["tool_calls"][0]["function"]["name"] == "computer"
    assert json.loads(called["tool_calls"][0]["function"]["arguments"]) == {"actions": [CLICK]}
    assert called["reasoning"] == "hm"
    assert result == {"role": "tool", "tool_call_id": "c1", "content": [SEEN]}
    assert second.output_text == "Done."
    assert listed[0].to_dict() == {**output, "id": listed[0].id, "status": "completed"}
    assert listed[0].id.startswith("cuo_")


async def test_it_is_stored_as_it_was_streamed() -> None:
    async with seeing([act(CLICK)]) as served:
        async with responses(served).stream(model="scripted", input="hi", tools=[COMPUTER]) as events:
            final = await events.get_final_response()
        assert bare(await responses(served).retrieve(final.id)) == bare(final)


async def test_a_screenshot_may_be_an_uploaded_file_and_an_old_clients_input_image() -> None:
    async with seeing([act(CLICK)], DONE) as served:
        first = await create(served, tools=[COMPUTER])
        file = await served.client.files.create(file=("a.png", PNG), purpose="vision")
        for screen in ({"type": "computer_screenshot", "file_id": file.id}, {**SCREEN, "type": "input_image"}):
            output = screenshot(output=screen)
            second = await create(served, tools=[COMPUTER], input=[output], previous_response_id=first.id)
            assert messages(served)[-1]["content"] == [SEEN]
            (listed,) = (await responses(served).input_items.list(second.id)).data
            assert listed.to_dict()["output"] == screen


async def test_include_of_the_screenshots_url_is_taken() -> None:
    include = ["computer_call_output.output.image_url"]
    async with seeing([act(CLICK)], DONE) as served:
        first = await create(served, tools=[COMPUTER], include=include)
        second = await create(
            served, tools=[COMPUTER], include=include, input=[screenshot()], previous_response_id=first.id
        )
        (item,) = (await responses(served).input_items.list(second.id, include=include)).data
    assert item.output.image_url == PIXEL_URL


WRONG: dict[str, tuple[Json, str]] = {
    "neither a URL nor a file": (screenshot(output={"type": "computer_screenshot"}), "input[1].output.image_url"),
    "no image": (
        screenshot(output={**SCREEN, "image_url": "data:image/png;base64,aGk="}),
        "input[1].output.image_url",
    ),
    "an unknown file": (
        screenshot(output={"type": "computer_screenshot", "file_id": "file-none"}),
        "input[1].output.file_id",
    ),
    "text": (screenshot(output={"type": "text", "text": "hi"}), "input[1].output.type"),
    "no call": (screenshot("c9"), "input"),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG)
async def test_a_wrong_screenshot_is_an_error_that_names_the_field(case: tuple[Json, str]) -> None:
    item, param = case
    before = {"type": "computer_call", "call_id": "c1", "actions": [CLICK], "pending_safety_checks": []}
    async with seeing() as served:
        assert (await refusal(served, tools=[COMPUTER], input=[before, item]))["param"] == param


async def test_an_unknown_action_of_the_input_names_its_place() -> None:
    item = {"type": "computer_call", "call_id": "c1", "actions": [CLICK, {"type": "fly"}], "pending_safety_checks": []}
    async with seeing() as served:
        error = await refusal(served, input=[item, screenshot()])
    assert error["param"].startswith("input[0].actions[1]")


async def test_wrong_actions_are_reported_to_the_model_which_may_try_again() -> None:
    wrong = act({"type": "click", "x": "left"}, call_id="c0")
    sloppy = act({"type": "click", "x": "1", "y": 2.0, "why": "to see"})
    async with seeing([wrong], [sloppy]) as served:
        response = await create(served, tools=[COMPUTER])
        report = messages(served)[-1]["content"]
    assert "`actions.0.click.x`" in report
    assert [action.to_dict() for action in response.output[0].actions] == [CLICK]


async def test_a_model_that_sees_nothing_is_refused_by_name() -> None:
    async with seeing(kind=Blind) as served:
        for tool in (COMPUTER, PREVIEW):
            error = await refusal(served, tools=[tool])
            assert error["param"] == "tools[0].type"
            assert "takes no images" in error["message"]
        before = {"type": "computer_call", "call_id": "c1", "actions": [CLICK], "pending_safety_checks": []}
        assert (await refusal(served, input=[before, screenshot()]))["param"] == "input[1].output"


async def test_one_of_both_forms_is_declared() -> None:
    async with seeing() as served:
        assert (await refusal(served, tools=[COMPUTER, PREVIEW]))["param"] == "tools[0].type"


@pytest.mark.parametrize("choice", ["computer", "computer_use", "computer_use_preview"])
async def test_it_can_be_chosen_by_each_of_its_names(choice: str) -> None:
    async with seeing([act(CLICK)]) as served:
        response = await create(served, tools=[COMPUTER], tool_choice={"type": choice})
        chosen: Any = chat_requests(served)[-1].tool_choice
    assert chosen.name == "computer"
    assert response.tool_choice.type == choice


async def test_a_choice_without_the_tool_is_refused() -> None:
    async with seeing() as served:
        assert (await refusal(served, tool_choice={"type": "computer"}))["param"] == "tool_choice"


class Screen(AsyncComputer):
    """A computer that records what it was made to do."""

    def __init__(self) -> None:
        self.actions: list[tuple[Any, ...]] = []

    @property
    def environment(self) -> Any:
        return "browser"

    @property
    def dimensions(self) -> tuple[int, int]:
        return (1024, 768)

    async def screenshot(self) -> str:
        return PIXEL_URL.partition(",")[2]

    async def click(self, x: int, y: int, button: Any) -> None:
        self.actions.append(("click", x, y, button))

    async def double_click(self, x: int, y: int) -> None:
        self.actions.append(("double_click", x, y))

    async def scroll(self, x: int, y: int, scroll_x: int, scroll_y: int) -> None:
        self.actions.append(("scroll", x, y, scroll_x, scroll_y))

    async def type(self, text: str) -> None:
        self.actions.append(("type", text))

    async def wait(self) -> None:
        self.actions.append(("wait",))

    async def move(self, x: int, y: int) -> None:
        self.actions.append(("move", x, y))

    async def keypress(self, keys: list[str]) -> None:
        self.actions.append(("keypress", *keys))

    async def drag(self, path: list[tuple[int, int]]) -> None:
        self.actions.append(("drag", *path))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("form", ["computer", "preview"])
async def test_the_agents_sdk_controls_its_computer(run: Run, form: str) -> None:
    typed: Json = {"type": "type", "text": "krill"}
    model = "scripted" if form == "computer" else "computer-use-preview"  # by its name the SDK chooses the tool's form
    calls = (
        [[act(CLICK, typed)]]
        if form == "computer"
        else [[call("computer", json.dumps({"action": each}), id=f"c{at}")] for at, each in enumerate([CLICK, typed])]
    )
    async with seeing(*calls, DONE, model=model) as served:
        screen = Screen()
        who: Agent[Any] = Agent(
            name="Agent",
            model=OpenAIResponsesModel(model, served.client),
            tools=[ComputerTool(screen)],
            model_settings=ModelSettings(truncation="auto", store=form == "computer"),
        )
        result = await run(who)
        assert messages(served)[-1]["content"] == [SEEN]
    assert screen.actions == [("click", 1, 2, "left"), ("type", "krill")]
    assert result.final_output == "Done."


async def test_a_computer_without_its_output_is_an_error() -> None:
    async with seeing([act(CLICK)]) as served:
        first = await create(served, tools=[COMPUTER])
        with pytest.raises(BadRequestError, match="No tool output found"):
            await create(served, tools=[COMPUTER], previous_response_id=first.id)
