"""The Agents SDK over a served stack: its loop, functions, handoffs, typed answers, streams and errors."""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest
from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelBehaviorError,
    ModelRefusalError,
    ModelSettings,
    Runner,
    ToolOutputFileContent,
    ToolOutputImage,
    ToolOutputText,
    function_tool,
    responses_websocket_session,
)
from openai import BadRequestError
from openai.types.shared import Reasoning
from pydantic import BaseModel

from tests.support.laws.stream_laws import check_stream
from tests.support.models.images import PIXEL_URL
from tests.support.sdk.agents_sdk import RUNS, UNTRACED, Run, add, adding, agent, kinds, roles_of, streamed
from tests.support.sdk.answer_shapes import Script, call
from tests.support.sdk.requests import chat_requests, messages
from tests.support.servers.mcp_stack import tool_outputs
from tests.support.servers.serving import scripted, serving

DONE: Script = [{"text": ["Do", "ne."]}]
PIXEL = PIXEL_URL
both = pytest.mark.parametrize("run", RUNS, ids=["whole", "streamed"])


@function_tool
def fail() -> str:
    """Fails."""
    raise ValueError("no luck")


@function_tool
def show() -> Any:
    """Shows."""
    return [
        ToolOutputText(text="See."),
        ToolOutputImage(image_url=PIXEL),
        ToolOutputFileContent(file_data="data:text/plain;base64,aGk=", filename="a.txt"),
    ]


class Verdict(BaseModel):
    good: bool
    why: list[str]


# --- functions --------------------------------------------------------------------------------------------------------


@both
async def test_functions_are_called_over_several_turns(run: Run) -> None:
    turns: list[Script] = [
        [{"text": "I add.", "phase": "commentary"}, adding(1, 2, id="c1")],
        [{"calls": [adding(3, 4, id="c2"), adding(5, 6, id="c3")]}],
        DONE,
    ]
    async with serving(scripted(*turns)) as served:
        result = await run(agent(served, instructions="Be exact.", tools=[add]))
        chat = messages(served)
        answers = tool_outputs(served)
        offered: Any = (chat_requests(served)[0].tools or [])[0]
    assert result.final_output == "Done."
    assert answers == {"c1": "3", "c2": "7", "c3": "11"}
    assert roles_of(chat) == ["developer", "user", "assistant", "tool", "assistant", "tool", "tool"]
    assert chat[2]["content"] == "I add."
    assert kinds(result) == [
        *["message_output_item", "tool_call_item", "tool_call_output_item"],
        *["tool_call_item", "tool_call_item", "tool_call_output_item", "tool_call_output_item"],
        "message_output_item",
    ]
    assert result.context_wrapper.usage.requests == 3
    assert result.context_wrapper.usage.output_tokens > 0
    assert (offered.function.name, offered.function.strict) == ("add", True)


@both
async def test_a_functions_failure_reaches_the_model(run: Run) -> None:
    async with serving(scripted([call("fail", id="c1")], DONE)) as served:
        result = await run(agent(served, tools=[fail]))
        assert "error" in tool_outputs(served)["c1"]
    assert result.final_output == "Done."


@both
async def test_an_agent_is_stopped_after_so_many_turns(run: Run) -> None:
    async with serving(scripted([adding(1, 2)])) as served:
        with pytest.raises(MaxTurnsExceeded):
            await run(agent(served, tools=[add]), max_turns=3)
        assert len(chat_requests(served)) == 3


@both
async def test_an_agent_may_be_a_tool_of_another(run: Run) -> None:
    turns: list[Script] = [[call("ask", '{"input": "six?"}', id="c1")], [{"text": "Six."}], DONE]
    async with serving(scripted(*turns)) as served:
        inner = agent(served, "Inner").as_tool("ask", "Asks.", run_config=UNTRACED)
        result = await run(agent(served, tools=[inner]))
        assert tool_outputs(served) == {"c1": "Six."}
    assert result.final_output == "Done."


@both
async def test_settings_of_the_model_arrive(run: Run) -> None:
    settings = ModelSettings(
        temperature=0.25,
        top_p=0.5,
        max_tokens=99,
        tool_choice="required",
        parallel_tool_calls=False,
        truncation="disabled",
        verbosity="low",
        metadata={"k": "v"},
        reasoning=Reasoning(effort="high"),
    )
    async with serving(scripted([adding(1, 2)], DONE)) as served:
        result = await run(agent(served, tools=[add], model_settings=settings))
        first, second = chat_requests(served)
        stored = await served.client.responses.retrieve(result.last_response_id or "")
    assert (first.temperature, first.top_p, first.max_completion_tokens) == (0.25, 0.5, 99)
    assert (first.tool_choice, second.tool_choice) == ("required", "auto")
    assert (first.reasoning_effort, first.parallel_tool_calls) == ("high", False)
    assert stored.metadata == {"k": "v"}


# --- handoffs and typed answers ---------------------------------------------------------------------------------------


@both
async def test_an_agent_hands_over_to_another(run: Run) -> None:
    async with serving(scripted([call("transfer_to_expert", id="c1")], DONE)) as served:
        expert = agent(served, "Expert", instructions="You know.", tools=[add])
        first = agent(served, "First", instructions="You ask.", handoffs=[expert])
        result = await run(first)
        chat = messages(served)
        answers = tool_outputs(served)
        offered = [tool.name for tool in chat_requests(served)[-1].tools or ()]
    assert result.last_agent is expert
    assert result.final_output == "Done."
    assert kinds(result) == ["handoff_call_item", "handoff_output_item", "message_output_item"]
    assert chat[0]["content"] == "You know."
    assert json.loads(answers["c1"]) == {"assistant": "Expert"}
    assert offered == ["add"]


@both
async def test_an_answer_has_the_type_asked_for(run: Run) -> None:
    answer = '{"good": true, "why": ["a", "b"]}'
    async with serving(scripted([adding(1, 2)], [{"text": [answer[:9], answer[9:]]}])) as served:
        result = await run(agent(served, tools=[add], output_type=Verdict))
        form: Any = chat_requests(served)[-1].response_format
    assert result.final_output == Verdict(good=True, why=["a", "b"])
    assert form.model_dump(by_alias=True)["json_schema"]["schema"]["required"] == ["good", "why"]


# --- other ends -------------------------------------------------------------------------------------------------------


async def test_what_is_streamed_is_the_response_as_it_grows() -> None:
    async with serving(scripted([{"reasoning": "hm"}, adding(1, 2)], DONE)) as served:
        result = Runner.run_streamed(agent(served, tools=[add]), "hi", run_config=UNTRACED)
        raw: list[Any] = []
        names: list[str] = []
        async for event in result.stream_events():
            match event.type:
                case "raw_response_event":
                    raw.append(event.data)
                case "run_item_stream_event":
                    names.append(event.name)
                case _:
                    pass
    ends = [at for at, event in enumerate(raw) if event.type == "response.completed"]
    check_stream(raw[: ends[0] + 1])
    check_stream(raw[ends[0] + 1 :])
    assert len(ends) == 2
    assert names == ["reasoning_item_created", "tool_called", "tool_output", "message_output_created"]
    assert "".join(each.delta for each in raw if each.type == "response.output_text.delta") == "Done."


@both
async def test_a_refusal_is_the_agents_error(run: Run) -> None:
    async with serving(scripted([{"refusal": ["N", "o."]}])) as served:
        with pytest.raises(ModelRefusalError, match=r"No\."):
            await run(agent(served))


async def test_a_response_that_fails_ends_its_run() -> None:
    async with serving(scripted([{"text": "a"}, {"fail": "It is gone."}])) as served:
        with pytest.raises(ModelBehaviorError, match=r"It is gone\."):
            await streamed(agent(served))


@both
async def test_a_function_may_give_an_image_and_a_file(run: Run) -> None:
    async with serving(scripted([call("show", id="c1")], DONE)) as served:
        await run(agent(served, tools=[show]))
        content = messages(served)[-1]["content"]
    assert content == [
        {"type": "text", "text": "See."},
        {"type": "image_url", "image_url": {"url": PIXEL}},
        {"type": "text", "text": '<file name="a.txt">\nhi\n</file>'},
    ]


@both
async def test_a_refused_request_is_the_clients_error(run: Run) -> None:
    async with serving(scripted(DONE)) as served:
        with pytest.raises(BadRequestError) as caught:
            await run(agent(served), previous_response_id="resp_" + "0" * 32)
    assert caught.value.param == "previous_response_id"


async def test_runs_share_a_websocket() -> None:
    async with (
        serving(scripted([{"reasoning": "hm"}, adding(1, 2)], DONE)) as served,
        responses_websocket_session(api_key="none", base_url=f"{served.url}/v1") as session,
    ):
        session.run_config.tracing_disabled = True
        who: Agent[Any] = Agent(name="Agent", model="scripted", tools=[add])
        first = session.run_streamed(who, "one", auto_previous_response_id=True)
        events: list[Any] = [event.data async for event in closing(first) if event.type == "raw_response_event"]
        await session.run(who, "two", previous_response_id=first.last_response_id)
        chat = messages(served)
    ends = [at for at, event in enumerate(events) if event.type == "response.completed"]
    check_stream(events[: ends[0] + 1])
    check_stream(events[ends[0] + 1 :])
    assert first.final_output == "Done."
    assert roles_of(chat) == ["user", "assistant", "tool", "assistant", "user", "assistant", "tool"]


async def closing(result: Any) -> AsyncGenerator[Any]:
    async with aclosing(result.stream_events()) as events:
        async for event in events:
            yield event
