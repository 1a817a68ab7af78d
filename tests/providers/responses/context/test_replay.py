"""Items of typed tools as messages to a model: by the store's knowledge, or by the fields of the item itself."""

from typing import Any

import pytest
from pydantic import TypeAdapter

from apis.chat import Message
from apis.errors import InvalidRequest
from apis.wire.items import Item
from providers.responses.context.input_items import check_items
from providers.responses.context.messages import ItemReader
from providers.responses.events.tool_result import ToolResultRecord

ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
Fields = dict[str, Any]
USER: Fields = {"role": "user", "content": "hi"}
CODE: Fields = {
    "type": "code_interpreter_call",
    "id": "ci_1",
    "status": "completed",
    "code": "print(1)",
    "container_id": "cntr_1",
    "outputs": [{"type": "logs", "logs": "1\n"}, {"type": "image", "url": "https://a/b.png"}],
}
FILES: Fields = {
    "type": "file_search_call",
    "id": "fs_1",
    "status": "completed",
    "queries": ["a"],
    "results": [{"file_id": "file_1", "filename": "a.txt", "score": 0.5, "text": "About a.", "attributes": {}}],
}
MCP: Fields = {
    "type": "mcp_call",
    "id": "mcp_1",
    "status": "completed",
    "server_label": "s",
    "name": "add",
    "arguments": '{"a": 1}',
    "output": "2",
}
LISTED: Fields = {
    "type": "mcp_list_tools",
    "id": "mcpl_1",
    "server_label": "s",
    "tools": [{"name": "add", "input_schema": {"type": "object"}, "annotations": {"readOnlyHint": True}}],
}
ASKED: Fields = {"type": "mcp_approval_request", "id": "mcpr_1", "server_label": "s", "name": "add", "arguments": "{}"}
SHELL: Fields = {"type": "shell_call", "id": "sh_1", "call_id": "c1", "action": {"commands": ["ls"]}}
LISTING: Fields = {
    "type": "shell_call_output",
    "call_id": "c1",
    "output": [{"stdout": "a", "stderr": "b", "outcome": {"type": "exit", "exit_code": 1}}],
}


LOST = "[What this gave is not known any more.]"


def web(kind: str, **action: Any) -> Fields:
    return {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": kind, **action}}


def approval(*, approve: bool, **fields: Any) -> Fields:
    return {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": approve, **fields}


def called(identity: str, name: str, arguments: str, output: str, **fields: Any) -> list[Fields]:
    """The two messages of one call."""
    function = {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "assistant", "tool_calls": [function], **fields},
        {"role": "tool", "tool_call_id": identity, "content": output},
    ]


def custom(identity: str, name: str, text: str, output: str) -> list[Fields]:
    call = {"id": identity, "type": "custom", "custom": {"name": name, "input": text}}
    return [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": identity, "content": output},
    ]


TABLE: dict[str, tuple[list[Fields], list[Fields]]] = {
    "code": ([USER, CODE], [USER, *called("ci_1", "python", '{"code":"print(1)"}', "1\n")]),
    "code without a word": (
        [USER, {**CODE, "outputs": []}],
        [USER, *called("ci_1", "python", '{"code":"print(1)"}', "(no output)")],
    ),
    "code whose outputs are not included": (
        [USER, {**CODE, "outputs": None}],
        [USER, *called("ci_1", "python", '{"code":"print(1)"}', LOST)],
    ),
    "code that was cut off": ([USER, {**CODE, "status": "incomplete", "outputs": None}], [USER]),
    "code that was not run": ([USER, {**CODE, "status": "failed", "outputs": None}], [USER]),
    "files": ([USER, FILES], [USER, *called("fs_1", "file_search", '{"queries":["a"]}', "a.txt\nAbout a.")]),
    "files whose results are not included": (
        [USER, {**FILES, "results": None}],
        [USER, *called("fs_1", "file_search", '{"queries":["a"]}', LOST)],
    ),
    "a search in files that failed": ([USER, {**FILES, "status": "failed", "results": None}], [USER]),
    "a search": ([USER, web("search", query="q")], [USER, *called("ws_1", "web_search", '{"query":"q"}', LOST)]),
    "a search of several queries": (
        [USER, web("search", queries=["q", "r"])],
        [USER, *called("ws_1", "web_search", '{"query":"q"}', LOST)],
    ),
    "a search and its sources": (
        [USER, web("search", query="q", sources=[{"type": "url", "url": "https://a/b"}, {"type": "api"}, 5])],
        [
            USER,
            *called(
                "ws_1",
                "web_search",
                '{"query":"q"}',
                "Pages were found, whose text is not known any more:\nhttps://a/b",
            ),
        ],
    ),
    "a search and its results": (
        [USER, {**web("search", query="q"), "results": [{"url": "https://a/b", "title": "A", "text": "Sun."}]}],
        [USER, *called("ws_1", "web_search", '{"query":"q"}', "A\nhttps://a/b\nSun.")],
    ),
    "an opened page": (
        [USER, web("open_page", url="https://a/b")],
        [USER, *called("ws_1", "open_page", '{"page":"https://a/b"}', LOST)],
    ),
    "a find in a page": (
        [USER, web("find", url="https://a/b", pattern="sun")],
        [USER, *called("ws_1", "find_in_page", '{"pattern":"sun","page":"https://a/b"}', LOST)],
    ),
    "a page without its URL": ([USER, web("open_page")], [USER]),
    "a search that failed": ([USER, {**web("search", query="q"), "status": "failed"}], [USER]),
    "no files": (
        [USER, {**FILES, "results": []}],
        [USER, *called("fs_1", "file_search", '{"queries":["a"]}', "Nothing was found.")],
    ),
    "a server's tools": ([USER, LISTED], [USER]),
    "a server's call": ([USER, MCP], [USER, *called("mcp_1", "s__add", '{"a": 1}', "2")]),
    "a server's call that failed": (
        [USER, {**MCP, "output": None, "error": {"type": "http_error", "code": 500, "message": "no"}}],
        [USER, *called("mcp_1", "s__add", '{"a": 1}', '{"type":"http_error","code":500,"message":"no"}')],
    ),
    "a call that waits for approval": ([USER, ASKED], [USER]),
    "a call that was approved": (
        [USER, ASKED, approval(approve=True), MCP],
        [USER, *called("mcp_1", "s__add", '{"a": 1}', "2")],
    ),
    "a call that was not": (
        [USER, ASKED, approval(approve=False, reason="Too dear.")],
        [USER, *called("mcpr_1", "s__add", "{}", "Not run: the user did not approve this call. They said: Too dear.")],
    ),
    "a shell": (
        [USER, SHELL, LISTING],
        [USER, *called("c1", "shell", '{"commands":["ls"]}', "a\nstderr:\nb\nexit code 1")],
    ),
    "a search for tools that a server ran": (
        [USER, {"type": "tool_search_call", "arguments": {}}, {"type": "tool_search_output", "tools": []}],
        [USER],
    ),
    "a patch": (
        [
            USER,
            {"type": "apply_patch_call", "call_id": "c1", "operation": {"type": "delete_file", "path": "a"}},
            {"type": "apply_patch_call_output", "call_id": "c1", "status": "completed"},
        ],
        [USER, *called("c1", "apply_patch", '{"type":"delete_file","path":"a"}', "Done.")],
    ),
}


def record_result(
    items: list[Fields], store: dict[str, ToolResultRecord] | None = None, *, grouped: bool = False
) -> list[Message]:
    read = ITEMS.validate_python(items)
    check_items(read)
    return ItemReader(store or {}, supports_namespaces=grouped).read_all(read)


def messages(fields: list[Fields]) -> list[Message]:
    return [Message.model_validate(each) for each in fields]


@pytest.mark.parametrize(("items", "expected"), TABLE.values(), ids=TABLE)
def test_items_of_typed_tools_become_messages(items: list[Fields], expected: list[Fields]) -> None:
    assert record_result(items) == messages(expected)
    again = ITEMS.validate_json(ITEMS.dump_json(ITEMS.validate_python(items)))
    assert ItemReader({}).read_all(again) == messages(expected)


def test_what_the_store_knows_comes_before_what_the_item_says() -> None:
    store = {
        "ci_1": ToolResultRecord("c9", "python", "1 + 1", "2", custom=True),
        "sh_1": ToolResultRecord("c1", "shell", '{"commands": ["ls"]}', ""),
    }
    expected = [
        USER,
        *custom("c9", "python", "1 + 1", "2"),
        USER,
        *called("c1", "shell", '{"commands": ["ls"]}', "a\nstderr:\nb\nexit code 1"),
    ]
    assert record_result([USER, CODE, USER, SHELL, LISTING], store) == messages(expected)


def test_a_refused_call_goes_by_the_name_and_id_it_had() -> None:
    store = {"mcpr_1": ToolResultRecord("c7", "s.add", "{}", "")}
    refused = record_result([USER, ASKED, approval(approve=False)], store)
    assert refused == messages([USER, *called("c7", "s.add", "{}", "Not run: the user did not approve this call.")])


def test_calls_of_several_turns_become_messages_one_after_the_other() -> None:
    store = {
        "ci_1": ToolResultRecord("c1", "python", "1", "one", custom=True, turn=0),
        "ci_2": ToolResultRecord("c2", "python", "2", "two", custom=True, turn=1),
    }
    expected = [USER, *custom("c1", "python", "1", "one"), *custom("c2", "python", "2", "two")]
    assert record_result([USER, CODE, {**CODE, "id": "ci_2"}], store) == messages(expected)


def test_a_model_that_knows_namespaces_gets_its_own_names() -> None:
    find = {"type": "function_call", "call_id": "c1", "name": "find", "namespace": "crm", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": "42"}
    expected = [
        USER,
        *custom("ci_1", "python", "print(1)", "1\n"),
        USER,
        *called("mcp_1", "s.add", '{"a": 1}', "2"),
        USER,
        *called("c1", "crm.find", "{}", "42"),
    ]
    assert record_result([USER, CODE, USER, MCP, USER, find, output], grouped=True) == messages(expected)


@pytest.mark.parametrize(
    "items", [[SHELL], [LISTING], [USER, {"type": "local_shell_call_output", "id": "c1", "output": ""}]]
)
def test_a_call_without_output_or_an_output_without_call_is_refused(items: list[Fields]) -> None:
    with pytest.raises(InvalidRequest):
        record_result(items)
