"""Every form of input reaches the model as the right chat messages, and what a response put out may come back in."""

import base64
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import pytest_asyncio

from tests.support.models import documents
from tests.support.models.images import PIXEL_URL
from tests.support.sdk.answer_shapes import SHAPES, Script
from tests.support.sdk.requests import chat_requests, create, messages, plain, refusal
from tests.support.servers.serving import Served, scripted, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

Json = dict[str, Any]
PNG = PIXEL_URL
PDF = f"data:application/pdf;base64,{base64.b64encode(documents.pdf('A page.')).decode()}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncGenerator[Served]:
    async with serving() as served:
        yield served


def call(call_id: str, **fields: Any) -> Json:
    return {"type": "function_call", "call_id": call_id, "name": "get", "arguments": "{}", **fields}


def output(call_id: str, text: Any = "done") -> Json:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def patch(call_id: str) -> Json:
    return {"type": "custom_tool_call", "call_id": call_id, "name": "patch", "input": "*** Begin"}


def patched(call_id: str) -> Json:
    return {"type": "custom_tool_call_output", "call_id": call_id, "output": "ok"}


def thought(*texts: str, summary: bool = False) -> Json:
    parts = [{"type": "summary_text" if summary else "reasoning_text", "text": text} for text in texts]
    return {"type": "reasoning", "summary": parts if summary else [], **({} if summary else {"content": parts})}


def said(text: str, **fields: Any) -> Json:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}], **fields}


def user(content: Any = "hi") -> Json:
    return {"role": "user", "content": content}


def text(said: str) -> Json:
    return {"type": "text", "text": said}


def get(*call_ids: str, arguments: str = "{}") -> list[Json]:
    function = {"name": "get", "arguments": arguments}
    return [{"id": call_id, "type": "function", "function": function} for call_id in call_ids]


def tool(call_id: str, content: Any = "done") -> Json:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


FORMS: dict[str, tuple[Any, list[Json]]] = {
    "a string": ("hi", [user()]),
    "a message without a type": ([user()], [user()]),
    "a message with a type": ([{"type": "message", **user()}], [user()]),
    "a message with an id and a status": ([{"id": "msg_x", "status": "completed", **user()}], [user()]),
    "a system message": ([{"role": "system", "content": "s"}, user()], [{"role": "system", "content": "s"}, user()]),
    "a developer message": ([{"role": "developer", "content": "d"}], [{"role": "developer", "content": "d"}]),
    "one text part": ([user([{"type": "input_text", "text": "hi"}])], [user()]),
    "two text parts": (
        [user([{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}])],
        [user([text("a"), text("b")])],
    ),
    "an image by data": (
        [user([{"type": "input_image", "image_url": PNG, "detail": "low"}])],
        [user([{"type": "image_url", "image_url": {"url": PNG, "detail": "low"}}])],
    ),
    "text and an image by data": (
        [user([{"type": "input_text", "text": "what?"}, {"type": "input_image", "image_url": PNG}])],
        [user([text("what?"), {"type": "image_url", "image_url": {"url": PNG}}])],
    ),
    "a file by data": (
        [user([{"type": "input_file", "file_data": PDF, "filename": "a.pdf"}])],
        [user([text('<file name="a.pdf">\nA page.\n</file>')])],
    ),
    "assistant text": (
        [user(), {"role": "assistant", "content": "yes"}, user("so?")],
        [user(), {"role": "assistant", "content": "yes"}, user("so?")],
    ),
    "assistant parts": (
        [{**said("a"), "content": [{"type": "output_text", "text": "a"}, {"type": "output_text", "text": "b"}]}],
        [{"role": "assistant", "content": "ab"}],
    ),
    "an assistant's input_text": (
        [{"role": "assistant", "content": [{"type": "input_text", "text": "a"}]}],
        [{"role": "assistant", "content": "a"}],
    ),
    "a refusal": (
        [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
        [{"role": "assistant", "refusal": "no"}],
    ),
    "phases": (
        [said("a", phase="commentary"), said("b", phase="final_answer")],
        [
            {"role": "assistant", "content": "a", "phase": "commentary"},
            {"role": "assistant", "content": "b", "phase": "final_answer"},
        ],
    ),
    "a call and its output": (
        [user(), call("c1", arguments='{"a": 1}'), output("c1", "42")],
        [user(), {"role": "assistant", "tool_calls": get("c1", arguments='{"a": 1}')}, tool("c1", "42")],
    ),
    "an output of one text part": (
        [call("c1"), output("c1", [{"type": "input_text", "text": "a"}])],
        [{"role": "assistant", "tool_calls": get("c1")}, tool("c1", "a")],
    ),
    "an output of text and an image": (
        [call("c1"), output("c1", [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": PNG}])],
        [
            {"role": "assistant", "tool_calls": get("c1")},
            tool("c1", [text("a"), {"type": "image_url", "image_url": {"url": PNG}}]),
        ],
    ),
    "an empty output": (
        [call("c1"), output("c1", "")],
        [{"role": "assistant", "tool_calls": get("c1")}, tool("c1", "")],
    ),
    "arguments that are no JSON": (
        [call("c1", arguments="{oops"), output("c1")],
        [{"role": "assistant", "tool_calls": get("c1", arguments="{oops")}, tool("c1")],
    ),
    "a word from the user while a tool runs": (
        [call("c1"), call("c2"), user("still there?"), output("c1"), user("hello?"), output("c2")],
        [
            {"role": "assistant", "tool_calls": get("c1", "c2")},
            tool("c1"),
            tool("c2"),
            user("still there?"),
            user("hello?"),
        ],
    ),
    "a custom call and its output": (
        [patch("c1"), patched("c1")],
        [
            {
                "role": "assistant",
                "tool_calls": [{"id": "c1", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}],
            },
            tool("c1", "ok"),
        ],
    ),
    "calls in parallel": (
        [call("c1"), call("c2"), output("c1"), output("c2")],
        [{"role": "assistant", "tool_calls": get("c1", "c2")}, tool("c1"), tool("c2")],
    ),
    "outputs in another order than the calls": (
        [call("c1"), call("c2"), output("c2"), output("c1")],
        [{"role": "assistant", "tool_calls": get("c1", "c2")}, tool("c2"), tool("c1")],
    ),
    "calls one after the other": (
        [call("c1"), output("c1"), call("c2"), output("c2")],
        [
            {"role": "assistant", "tool_calls": get("c1")},
            tool("c1"),
            {"role": "assistant", "tool_calls": get("c2")},
            tool("c2"),
        ],
    ),
    "reasoning before an answer": (
        [thought("hm"), said("a")],
        [{"role": "assistant", "content": "a", "reasoning": "hm"}],
    ),
    "reasoning of several parts": (
        [thought("one, ", "two"), said("a")],
        [{"role": "assistant", "content": "a", "reasoning": "one, two"}],
    ),
    "reasoning that has a summary only": (
        [thought("short", summary=True), said("a")],
        [{"role": "assistant", "content": "a", "reasoning": "short"}],
    ),
    "reasoning that is encrypted only": (
        [{"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}, said("a")],
        [{"role": "assistant", "content": "a"}],
    ),
    "reasoning, a preamble and a call": (
        [thought("hm"), said("I look.", phase="commentary"), call("c1"), output("c1")],
        [
            {
                "role": "assistant",
                "content": "I look.",
                "reasoning": "hm",
                "phase": "commentary",
                "tool_calls": get("c1"),
            },
            tool("c1"),
        ],
    ),
    "reasoning between calls": (
        [thought("one"), call("c1"), output("c1"), thought("two"), call("c2"), output("c2"), said("a")],
        [
            {"role": "assistant", "reasoning": "one", "tool_calls": get("c1")},
            tool("c1"),
            {"role": "assistant", "reasoning": "two", "tool_calls": get("c2")},
            tool("c2"),
            {"role": "assistant", "content": "a"},
        ],
    ),
    "reasoning between parallel calls": (
        [thought("one"), call("c1"), thought("two"), call("c2"), output("c1"), output("c2")],
        [{"role": "assistant", "reasoning": "one\ntwo", "tool_calls": get("c1", "c2")}, tool("c1"), tool("c2")],
    ),
    "text behind a call": (
        [call("c1"), said("I have called."), output("c1")],
        [{"role": "assistant", "content": "I have called.", "tool_calls": get("c1")}, tool("c1")],
    ),
    "answers in turn": (
        [user("a"), said("b"), user("c"), said("d"), user("e")],
        [user("a"), {"role": "assistant", "content": "b"}, user("c"), {"role": "assistant", "content": "d"}, user("e")],
    ),
    "a search nobody remembers": (
        [{"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}}, user()],
        [user()],
    ),
    "fields nobody knows": (
        [{**user(), "client": {"a": [1]}}, {**call("c1"), "caller": None, "async": None}, {**output("c1"), "x": 1}],
        [user(), {"role": "assistant", "tool_calls": get("c1")}, tool("c1")],
    ),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
async def test_input_reaches_the_model_as_messages(served: Served, form: tuple[Any, list[Json]]) -> None:
    items, expected = form
    await create(served, input=items)
    assert messages(served) == expected


async def test_instructions_are_a_developer_message_before_everything(served: Served) -> None:
    await create(served, input=[{"role": "system", "content": "s"}, user()], instructions="Be brief.")
    assert messages(served)[0] == {"role": "developer", "content": "Be brief."}
    assert [message["role"] for message in messages(served)] == ["developer", "system", "user"]


REFUSED: dict[str, tuple[Any, str, str]] = {
    "an unknown type": ([user(), {"type": "hologram"}], "input[1].type", "hologram"),
    "no type": ([{"content": "x"}], "input[0].type", "input[0].type"),
    "an item that is no object": ([1], "input[0]", "expected an object, but got an integer"),
    "a role nobody has": ([{"role": "tool", "content": "x"}], "input[0].role", "'user'"),
    "no content": ([user(), {"role": "user"}], "input[1].content", "input[1].content"),
    "content that is no text": ([user(5)], "input[0].content", "expected an array, but got an integer"),
    "an unknown part": ([user([{"type": "input_video"}])], "input[0].content[0].type", "input_video"),
    "a text part without text": ([user([{"type": "input_text"}])], "input[0].content[0].text", "Missing"),
    "an uploaded image": (
        [user([{"type": "input_image", "file_id": "file-1"}])],
        "input[0].content[0].file_id",
        "keeps no files",
    ),
    "an image without a URL": ([user([{"type": "input_image"}])], "input[0].content[0].image_url", "image_url"),
    "an image that is none": (
        [user([{"type": "input_image", "image_url": "data:text/html,x"}])],
        "input[0].content[0].image_url",
        "data:image/",
    ),
    "an image of this machine": (
        [user([{"type": "input_image", "image_url": "file:///etc/passwd"}])],
        "input[0].content[0].image_url",
        "https",
    ),
    "an uploaded file": (
        [user([{"type": "input_file", "file_id": "file-1"}])],
        "input[0].content[0].file_id",
        "keeps no files",
    ),
    "a file by a URL of this machine": (
        [user([{"type": "input_file", "file_url": "http://127.0.0.1/a.pdf"}])],
        "input[0].content[0].file_url",
        "127.0.0.1",
    ),
    "a file without data": (
        [user([{"type": "input_file", "filename": "a"}])],
        "input[0].content[0].file_data",
        "file_data",
    ),
    "a bad part in an output": (
        [call("c1"), output("c1", [{"type": "input_image", "file_id": "x"}])],
        "input[1].output[0].file_id",
        "keeps no files",
    ),
    "an id that comes twice": (
        [{"id": "msg_1", **user()}, {"id": "msg_1", **user()}],
        "input[1].id",
        "Duplicate item id 'msg_1'",
    ),
    "a call without an output": ([call("c7"), user()], "input", "No tool output found for function call c7."),
    "a custom call without an output": ([patch("c7"), user()], "input", "c7"),
    "an output without a call": (
        [user(), output("c7")],
        "input",
        "No tool call found for function call output with call_id c7.",
    ),
    "two outputs of one call": ([call("c7"), output("c7"), output("c7", "other")], "input", "call_id c7"),
    "an output before its call": ([output("c7"), call("c7")], "input", "call_id c7"),
    "no arguments": ([{"type": "function_call", "call_id": "c", "name": "n"}], "input[0].arguments", "Missing"),
    "no call_id": ([{"type": "function_call_output", "output": "x"}], "input[0].call_id", "Missing"),
    "nothing at all": ([], "input", "input"),
    "nothing that a model could be told": ([{"type": "reasoning", "summary": []}], "input", "input"),
}


@pytest.mark.parametrize("form", REFUSED.values(), ids=REFUSED)
async def test_wrong_input_is_refused_naming_the_place(served: Served, form: tuple[Any, str, str]) -> None:
    items, param, words = form
    error = await refusal(served, input=items)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert words in error["message"]


async def _follow(served: Served, first: Any, value: list[Any], *, chained: bool) -> list[Json]:
    """Send a second turn, after the first's items in `value` or by its id, and return the model's messages."""
    outputs = [
        {"type": f"{item.type}_output", "call_id": item.call_id, "output": "done"}
        for item in first.output
        if item.type in ("function_call", "custom_tool_call")
    ]
    news = [*outputs, user("and?")]
    if chained:
        await create(served, input=news, previous_response_id=first.id)
    else:
        await create(served, input=[user(), *value, *news])
    return plain(chat_requests(served)[-1].messages)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
async def test_output_sent_back_gives_the_model_the_messages_of_a_chain(shape: Script) -> None:
    async with serving(scripted(shape)) as served:
        first = await create(served)
        by_id = await _follow(served, first, [], chained=True)
        whole = [item.model_dump(mode="json") for item in first.output]
        brief = [item.model_dump(mode="json", exclude_none=True, exclude={"id", "status"}) for item in first.output]
        for items in (first.output, whole, brief):
            assert await _follow(served, first, items, chained=False) == by_id


async def test_reasoning_text_and_call_come_back_as_one_message() -> None:
    shape: Script = [{"reasoning": ["h", "m"]}, {"text": "I look."}, {"call": "get", "arguments": ['{"a"', ":1}"]}]
    async with serving(scripted(shape)) as served:
        response = await _follow(served, await create(served), [], chained=True)
    calls = get("call_1", arguments='{"a":1}')
    assert response == [
        user(),
        {"role": "assistant", "content": "I look.", "reasoning": "hm", "tool_calls": calls},
        tool("call_1"),
        user("and?"),
    ]
