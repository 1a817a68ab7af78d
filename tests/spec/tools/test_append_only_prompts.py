"""The prompt of a turn begins with the one before, byte for byte and token for token, after calls of any tools: an
engine's prefix cache then has all of it but the end."""

import json
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, cast

import pytest

from apis.chat import ChatRequest
from providers.inference.chat_completions.body import ChatDialect, request_to_body
from providers.inference.harmony.harmony import Harmony
from providers.inference.harmony.options import HarmonyOptions
from tests.spec.tools.test_client_tools import TOOLS
from tests.spec.tools.test_round_trip import CASES, having_all
from tests.support.sdk.answer_shapes import Script, call, function
from tests.support.sdk.conversations import conversations, user
from tests.support.sdk.drawing import draw, drawing
from tests.support.sdk.requests import bare, chat_requests, create
from tests.support.servers.mcp_stack import mcp, stacked
from tests.support.servers.serving import Served

Json = dict[str, Any]
DONE: Script = [{"reasoning": "It is done."}, {"text": "Done."}]
NOTE: Json = {"type": "custom", "name": "note"}
CLIENT_CALLS: Final[dict[str, tuple[Json, Json]]] = {
    **{name: (call(name, written), output) for name, (_, written, _, output, _) in TOOLS.items()},
    "get": (call("get", '{ "a" : 1,\n"b": [] }'), {"type": "function_call_output", "output": "x"}),
    "note": (call("note", "free { text", custom=True), {"type": "custom_tool_call_output", "output": "y"}),
}
CLIENT_TOOLS: Final = [*(tool for tool, *_ in TOOLS.values()), NOTE]


def chat_prompts(requests: Sequence[ChatRequest]) -> list[str]:
    """The prompts as a chat template writes them: tools, then messages, each in the bytes of the body."""
    prompts: list[str] = []
    for request in requests:
        body = json.loads(request_to_body(request, ChatDialect()))
        assert body["messages"]
        prompts.append("\n".join(map(json.dumps, [body.get("tools"), *body["messages"]])) + "\n")
    return prompts


def assert_append_only(prompts: Sequence[Any]) -> None:
    assert len(prompts) > 1
    for number, (earlier, later) in enumerate(pairwise(prompts)):
        assert len(later) > len(earlier), number
        assert later[: len(earlier)] == earlier, number


async def play_chain(served: Served, inputs: Sequence[Any], **fields: Any) -> list[ChatRequest]:
    """Send the inputs as one chain; an input that is an output belongs to the call of the response before it. Returns
    the first prompt of each response."""
    firsts: list[ChatRequest] = []
    previous: Any = None
    for number, text_or_output in enumerate(inputs):
        value: Any = text_or_output
        if not isinstance(text_or_output, str):
            output, call_item = cast(Json, text_or_output), previous.output[-1]
            is_by_id = output["type"] == "local_shell_call_output"
            value = [{**output, **({"id": call_item.id} if is_by_id else {"call_id": call_item.call_id})}]
        before = len(chat_requests(served))
        previous = await create(
            served, input=value, previous_response_id=previous.id if previous is not None else None, **fields
        )
        assert previous.status == "completed", (number, previous.incomplete_details)
        firsts.append(chat_requests(served)[before])
    return firsts


def client_inputs() -> tuple[list[Script], list[Any]]:
    turns: list[Script] = []
    inputs: list[Any] = []
    for name, (requested, output) in CLIENT_CALLS.items():
        turns += [[{"reasoning": "I call."}, {**requested, "id": f"call_{name}"}], DONE]
        inputs += [f"Use {name}.", output]
    return turns, inputs


async def assert_append_only_in_harmony(requests: Sequence[ChatRequest], firsts: Sequence[ChatRequest]) -> None:
    """Harmony shows the reasoning of a turn until its answer is final, as the model was trained: the prompts after an
    answer continue those before the turn. With `reasoning.context: all_turns` every prompt continues the last."""
    harmony = await Harmony.load(HarmonyOptions(current_date="none"))
    after_answers = [request for request in firsts if request.messages[-1].role == "user"]
    assert_append_only([(await harmony.render_prompt(request)).token_ids for request in after_answers])
    prompts = [request.model_copy(update={"all_reasoning": True}) for request in requests]
    assert_append_only([(await harmony.render_prompt(request)).token_ids for request in prompts])


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
@pytest.mark.parametrize("model", ["scripted", "native"])
async def test_prompts_of_all_tools_only_grow(model: str, tmp_path: Path) -> None:
    turns, inputs = client_inputs() if model == "scripted" else ([], [])
    for case_model, hosted in CASES.values():
        if case_model == model:
            turns += [*hosted, DONE]
            inputs.append("Go on.")
    async with having_all(model, turns, tmp_path) as (served, tools):
        fields: Json = {"tools": [*tools, *CLIENT_TOOLS], "instructions": "Be brief.", "model": model}
        firsts = await play_chain(served, inputs, **fields)
        requests = chat_requests(served)
    assert len(requests) == len(turns)
    await assert_append_only_in_harmony(requests, firsts)
    if model == "scripted":
        assert_append_only(chat_prompts(requests))


async def test_prompts_with_generated_images_only_grow() -> None:
    turns: list[Script] = [[draw()], DONE, DONE]
    async with drawing(*turns, model="scripted") as (served, _):
        await play_chain(served, ["Draw.", "Why?"], tools=[{"type": "image_generation"}])
        assert_append_only(chat_prompts(chat_requests(served)))


def echo(text: str) -> Json:
    return call("real__echo", json.dumps({"text": text}), id=f"echo_{text}")


def calls_by_message(request: ChatRequest) -> list[list[str]]:
    """The ids of the calls of each message that has some."""
    return [[each.id for each in message.tool_calls] for message in request.messages if message.tool_calls]


HOW = ["chained", "in a conversation", "sent back", "sent back, nothing stored", "referred to"]


async def play_kept(how: str, served: Served, inputs: Sequence[list[Json]], **fields: Any) -> None:
    """Send the inputs one after the other, the conversation kept in one of the ways that clients have; a function's
    output and an approval go to the call that the response before them ended with."""
    said: list[Json] = []
    previous: Any = None
    more: Json = {"store": False} if how == "sent back, nothing stored" else {}
    if how == "in a conversation":
        more = {"conversation": (await conversations(served).create()).id}
    for new in inputs:
        for item in new:
            if item.get("type") == "function_call_output":
                item["call_id"] = previous.output[-1].call_id
            elif item.get("type") == "mcp_approval_response":
                item["approval_request_id"] = previous.output[-1].id
        if how == "chained" and previous is not None:
            more = {"previous_response_id": previous.id}
        said += new
        sent = new if how in ("chained", "in a conversation") else [*said]
        previous = await create(served, input=sent, **more, **fields)
        assert previous.status == "completed"
        by_reference = how == "referred to"
        said += [{"type": "item_reference", "id": each.id} if by_reference else bare(each) for each in previous.output]


@pytest.mark.parametrize("how", HOW)
async def test_prompts_keep_apart_what_a_model_called_in_two_turns_without_reasoning(how: str) -> None:
    get, output = call("get", "{}"), {"type": "function_call_output", "output": "x"}
    turns: list[Script] = [
        [echo("a")],
        [{**get, "id": "get_1"}],
        [echo("b")],
        [{"calls": [echo("c"), {**get, "id": "get_2"}]}],
        [echo("d")],
        DONE[1:],
    ]
    async with stacked(*turns) as (served, real):
        inputs = [[user("Go on.")], [{**output}], [{**output}]]
        await play_kept(how, served, inputs, tools=[mcp(real), function("get")])
        requests = chat_requests(served)
    assert len(requests) == len(turns)
    assert_append_only(chat_prompts(requests))
    assert calls_by_message(requests[-1]) == [["echo_a"], ["get_1"], ["echo_b"], ["echo_c", "get_2"], ["echo_d"]]


@pytest.mark.parametrize("how", HOW)
async def test_prompts_show_an_approved_call_where_the_model_made_it(how: str) -> None:
    note, get = call("real__note", '{"text": "a"}', id="note"), call("get", "{}", id="get")
    turns: list[Script] = [[{"calls": [echo("a"), note]}], [get], DONE[1:]]
    async with stacked(*turns) as (served, real):
        tools = [mcp(real, require_approval={"never": {"tool_names": ["echo"]}}), function("get")]
        approval = {"type": "mcp_approval_response", "approve": True}
        output = {"type": "function_call_output", "output": "x"}
        await play_kept(how, served, [[user("Go on.")], [approval], [output]], tools=tools)
        requests = chat_requests(served)
    assert_append_only(chat_prompts(requests))
    # a request for approval that was not stored has no id of its call, which the model reads under another one
    assert [len(calls) for calls in calls_by_message(requests[-1])] == [2, 1]


async def test_prompts_keep_apart_calls_that_a_model_made_while_an_earlier_one_ran() -> None:
    slow = call("slow", "{}", id="slow_1")
    turns: list[Script] = [[slow], [echo("a")], [{**slow, "id": "slow_2"}], [echo("b")], DONE[1:], DONE[1:]]
    async with stacked(*turns) as (served, real):
        tools = [mcp(real), function("slow", **{"async": True})]
        await play_kept("chained", served, [[user("Go on.")], [user("And?")]], tools=tools)
        requests = chat_requests(served)
    assert_append_only(chat_prompts(requests))
    assert calls_by_message(requests[-1]) == [["slow_1"], ["echo_a"], ["slow_2"], ["echo_b"]]
