"""How items become the messages a model sees, and which items are refused."""

from typing import Any

import pytest
from pydantic import TypeAdapter

from apis.chat import Message
from apis.errors import InvalidRequest, StackError
from apis.wire.items import Item
from providers.responses.context.input_items import check_items
from providers.responses.context.messages import ItemReader
from providers.responses.events.tool_result import ToolResultRecord

ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
Fields = dict[str, Any]


def user(content: Any) -> Fields:
    return {"role": "user", "content": content}


def said(*texts: str, **fields: Any) -> Fields:
    return {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": text} for text in texts],
        **fields,
    }


def thought(text: str) -> Fields:
    return {
        "type": "reasoning",
        "id": f"rs_{text}",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
    }


def call(number: int, **fields: Any) -> Fields:
    return {"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": "{}", **fields}


def output(number: int, value: Any = "done") -> Fields:
    return {"type": "function_call_output", "call_id": f"c{number}", "output": value}


def search(item_id: str) -> Fields:
    return {"type": "web_search_call", "id": item_id, "status": "completed", "action": {"type": "search", "query": "q"}}


RESULTS_BY_ITEM = {
    "ws_1": ToolResultRecord("c9", "web_search", '{"query":"q"}', "[1] A page"),
    "ws_2": ToolResultRecord("c8", "web_search", "{}", "Nothing."),
}


def model_call(identity: str, name: str = "f", arguments: str = "{}") -> Fields:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def answer(identity: str, content: Any = "done") -> Fields:
    return {"role": "tool", "tool_call_id": identity, "content": content}


def assistant(content: str | None = None, **fields: Any) -> Fields:
    return {"role": "assistant", **({"content": content} if content is not None else {}), **fields}


TABLE: dict[str, tuple[list[Fields], list[Fields]]] = {
    "nothing": ([], []),
    "text": ([user("hi")], [user("hi")]),
    "one part of text": ([user([{"type": "input_text", "text": "hi"}])], [user("hi")]),
    "several parts": (
        [
            user(
                [
                    {"type": "input_text", "text": "hi"},
                    {"type": "input_image", "image_url": "https://a/b", "detail": "low"},
                ]
            )
        ],
        [
            user(
                [
                    {"type": "text", "text": "hi"},
                    {"type": "image_url", "image_url": {"url": "https://a/b", "detail": "low"}},
                ]
            )
        ],
    ),
    "a file": (
        [user([{"type": "input_file", "file_data": "data:x", "filename": "a.pdf"}])],
        [user([{"type": "file", "file": {"file_data": "data:x", "filename": "a.pdf"}}])],
    ),
    "roles": (
        [{"role": "system", "content": "s"}, {"role": "developer", "content": "d"}, user("u")],
        [{"role": "system", "content": "s"}, {"role": "developer", "content": "d"}, user("u")],
    ),
    "an answer": ([user("hi"), said("a", "b"), user("go on")], [user("hi"), assistant("ab"), user("go on")]),
    "an answer as text": ([{"role": "assistant", "content": "a"}], [assistant("a")]),
    "a refusal": (
        [{"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
        [assistant(refusal="no")],
    ),
    "two answers": ([said("a"), said("b")], [assistant("a"), assistant("b")]),
    "phases": (
        [said("a", phase="commentary"), said("b", phase="final_answer")],
        [assistant("a", phase="commentary"), assistant("b", phase="final_answer")],
    ),
    "a thought and an answer": ([thought("t"), said("a")], [assistant("a", reasoning="t")]),
    "two thoughts": (
        [thought("t"), thought("u"), said("a")],
        [assistant(reasoning="t"), assistant("a", reasoning="u")],
    ),
    "a thought after an answer": (
        [said("a"), thought("t"), said("b")],
        [assistant("a"), assistant("b", reasoning="t")],
    ),
    "an empty thought": ([{"type": "reasoning", "summary": []}, said("a")], [assistant("a")]),
    "a thought as a summary": (
        [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}, said("a")],
        [assistant("a", reasoning="s")],
    ),
    "a thought alone": ([thought("t"), user("x")], [assistant(reasoning="t"), user("x")]),
    "a call": (
        [user("x"), thought("t"), said("a"), call(1), output(1)],
        [user("x"), assistant("a", reasoning="t", tool_calls=[model_call("c1")]), answer("c1")],
    ),
    "parallel calls": (
        [call(1), call(2), output(2, "two"), output(1, "one")],
        [assistant(tool_calls=[model_call("c1"), model_call("c2")]), answer("c2", "two"), answer("c1", "one")],
    ),
    "calls one after the other": (
        [call(1), output(1), call(2), output(2)],
        [
            assistant(tool_calls=[model_call("c1")]),
            answer("c1"),
            assistant(tool_calls=[model_call("c2")]),
            answer("c2"),
        ],
    ),
    "a call whose text follows it": (
        [call(1), said("a"), output(1)],
        [assistant("a", tool_calls=[model_call("c1")]), answer("c1")],
    ),
    "an incomplete call": ([call(1, status="incomplete"), user("x")], [user("x")]),
    "arguments that are no JSON": (
        [call(1, arguments="{oops"), output(1)],
        [assistant(tool_calls=[model_call("c1", arguments="{oops")]), answer("c1")],
    ),
    "an output of parts": (
        [call(1), output(1, [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}])],
        [
            assistant(tool_calls=[model_call("c1")]),
            answer("c1", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
        ],
    ),
    "a custom call": (
        [
            {"type": "custom_tool_call", "call_id": "c1", "name": "f", "input": "raw"},
            {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        ],
        [assistant(tool_calls=[{"id": "c1", "type": "custom", "custom": {"name": "f", "input": "raw"}}]), answer("c1")],
    ),
    "a search": (
        [user("x"), thought("t"), search("ws_1"), said("a")],
        [
            user("x"),
            assistant(reasoning="t", tool_calls=[model_call("c9", "web_search", '{"query":"q"}')]),
            answer("c9", "[1] A page"),
            assistant("a"),
        ],
    ),
    "two searches at once": (
        [search("ws_1"), search("ws_2"), said("a")],
        [
            assistant(tool_calls=[model_call("c9", "web_search", '{"query":"q"}'), model_call("c8", "web_search")]),
            answer("c9", "[1] A page"),
            answer("c8", "Nothing."),
            assistant("a"),
        ],
    ),
    "a search and a call": (
        [search("ws_1"), call(1), output(1)],
        [
            assistant(tool_calls=[model_call("c9", "web_search", '{"query":"q"}'), model_call("c1")]),
            answer("c9", "[1] A page"),
            answer("c1"),
        ],
    ),
    "a search that was cut off": ([{**search("ws_7"), "status": "incomplete"}, said("a")], [assistant("a")]),
}


@pytest.mark.parametrize(("items", "messages"), TABLE.values(), ids=TABLE)
def test_items_become_messages(items: list[Fields], messages: list[Fields]) -> None:
    read = ITEMS.validate_python(items)
    check_items(read)
    assert ItemReader(RESULTS_BY_ITEM).read_all(read) == [Message.model_validate(each) for each in messages]


@pytest.mark.parametrize(("items", "messages"), TABLE.values(), ids=TABLE)
def test_nothing_is_lost_on_the_way_through_the_store(items: list[Fields], messages: list[Fields]) -> None:
    read = ITEMS.validate_python(items)
    again = ITEMS.validate_json(ITEMS.dump_json(read))
    assert ItemReader(RESULTS_BY_ITEM).read_all(again) == [Message.model_validate(each) for each in messages]


@pytest.mark.parametrize(
    ("items", "says"),
    [
        ([call(1)], "No tool output found for function call c1."),
        ([call(1), user("x"), call(2), output(2)], "No tool output found for function call c1."),
        ([output(1)], "No tool call found for function call output with call_id c1."),
        ([output(1), call(1)], "No tool call found for function call output with call_id c1."),
        ([call(1), output(1), output(1)], "The call with call_id c1 has an output already."),
        ([{"type": "item_reference", "id": "msg_1"}], "Item with id 'msg_1' not found."),
    ],
)
def test_calls_and_outputs_belong_together(items: list[Fields], says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ItemReader({}).read_all(ITEMS.validate_python(items))
    assert (caught.value.message, caught.value.param) == (says, "input")


@pytest.mark.parametrize(
    ("part", "kind", "param"),
    [
        ({"type": "input_image"}, InvalidRequest, "image_url"),
        ({"type": "input_image", "image_url": ""}, InvalidRequest, "image_url"),
        ({"type": "input_image", "image_url": "file:///etc/passwd"}, InvalidRequest, "image_url"),
        ({"type": "input_image", "image_url": "data:text/html;base64,AA"}, InvalidRequest, "image_url"),
        ({"type": "input_image", "image_url": "data:image/png,AA"}, InvalidRequest, "image_url"),
        ({"type": "input_image", "image_url": "https://a/b", "file_id": "file-1"}, InvalidRequest, "file_id"),
        ({"type": "input_file"}, InvalidRequest, "file_data"),
        ({"type": "input_file", "file_url": ""}, InvalidRequest, "file_data"),
        ({"type": "input_file", "file_url": "https://a/b", "file_id": "file-1"}, InvalidRequest, "file_url"),
        ({"type": "input_file", "file_data": "aGk=", "file_url": "https://a/b"}, InvalidRequest, "file_url"),
    ],
)
def test_parts_that_are_not_offered_are_named(part: Fields, kind: type[StackError], param: str) -> None:
    text = {"type": "input_text", "text": "x"}
    for items, where in (
        ([user("x"), user([text, part])], "input[1].content[1]"),
        ([call(1), output(1, [part])], "input[1].output[0]"),
    ):
        with pytest.raises(kind) as caught:
            check_items(ITEMS.validate_python(items))
        assert caught.value.param == f"{where}.{param}"


@pytest.mark.parametrize("url", ["https://a/b.png", "http://a/b", "data:image/png;base64,AA=="])
def test_images_by_url_and_by_data_are_taken(url: str) -> None:
    check_items(ITEMS.validate_python([user([{"type": "input_image", "image_url": url}])]))


def test_an_id_may_be_given_once() -> None:
    one = {**user("x"), "id": "msg_1"}
    with pytest.raises(InvalidRequest) as caught:
        check_items(ITEMS.validate_python([one, user("y"), one]))
    assert caught.value.param == "input[2].id"
    reference = {"type": "item_reference", "id": "msg_1"}
    check_items(ITEMS.validate_python([one, reference, reference]))
