"""Streams that keep every law, one of each kind, and the pieces they are built of."""

import copy
from typing import Any

Json = dict[str, Any]
Events = list[Json]

USAGE = {
    "input_tokens": 9,
    "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
    "output_tokens": 7,
    "output_tokens_details": {"reasoning_tokens": 3},
    "total_tokens": 16,
}
UNSET = (
    "completed_at incomplete_details previous_response_id instructions error reasoning usage max_output_tokens "
    "max_tool_calls safety_identifier prompt_cache_key"
)


def response(status: str, output: Events | None = None, **fields: Any) -> Json:
    """A whole response object."""
    return {
        **dict.fromkeys(UNSET.split()),
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "status": status,
        "model": "m",
        "output": output or [],
        "tools": [],
        "tool_choice": "auto",
        "truncation": "disabled",
        "parallel_tool_calls": True,
        "top_p": 1.0,
        "text": {"format": {"type": "text"}},
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "top_logprobs": 0,
        "temperature": 1.0,
        "store": True,
        "background": False,
        "service_tier": "default",
        "metadata": {},
        **fields,
    }


def numbered(events: Events) -> Events:
    for number, event in enumerate(events):
        event["sequence_number"] = number
    return events


def stream(*bodies: Events, status: str = "completed", queued: bool = False, **fields: Any) -> Events:
    """The bodies between a beginning and an end; the final output is that of the done events."""
    begin = [("created", "queued"), ("queued", "queued")] if queued else [("created", "in_progress")]
    beginning = [event(name, response=response(state)) for name, state in (*begin, ("in_progress", "in_progress"))]
    body = [one for part in bodies for one in part]
    done = sorted(
        (one for one in body if one["type"] == "response.output_item.done"), key=lambda one: one["output_index"]
    )
    output = copy.deepcopy([one["item"] for one in done])
    end = event(status, response=response(status, output, **{"usage": USAGE, **fields}))
    return numbered([*beginning, *body, end])


def event(name: str, **fields: Any) -> Json:
    return {"type": f"response.{name}", **copy.deepcopy(fields)}


def item(index: int, added: Json, *inner: tuple[str, Json], done: Json) -> Events:
    """The events of an item: `inner` gets its id and index."""
    place = {"item_id": added["id"], "output_index": index}
    whole = {**added, "status": "completed", **done}
    return [
        event("output_item.added", output_index=index, item={**added, "status": "in_progress"}),
        *(event(name, **place, **fields) for name, fields in inner),
        event("output_item.done", output_index=index, item=whole),
    ]


def streamed(name: str, key: str, *deltas: str, **fields: Any) -> list[tuple[str, Json]]:
    extra = {"logprobs": list[Any]()} if name == "output_text" else {}
    events = [(f"{name}.delta", {"delta": delta, **extra, **fields}) for delta in deltas]
    return [*events, (f"{name}.done", {key: "".join(deltas), **extra, **fields})]


def stages(kind: str, *names: str) -> list[tuple[str, Json]]:
    """The events of a hosted tool that only say how far it is."""
    return [(f"{kind}.{name}", {}) for name in names]


def part(kind: str, *deltas: str, content_index: int = 0) -> list[tuple[str, Json]]:
    place = {"content_index": content_index}
    key = "refusal" if kind == "refusal" else "text"
    empty: Json = {"type": kind, key: "", **({"annotations": [], "logprobs": []} if kind == "output_text" else {})}
    return [
        ("content_part.added", {**place, "part": empty}),
        *streamed(kind, key, *deltas, **place),
        ("content_part.done", {**place, "part": {**empty, key: "".join(deltas)}}),
    ]


def message(index: int, *parts: list[tuple[str, Json]], **done: Any) -> Events:
    content = [fields["part"] for one in parts for name, fields in one if name == "content_part.done"]
    added: Json = {"id": f"msg_{index}", "type": "message", "role": "assistant", "content": [], "phase": "final_answer"}
    return item(index, added, *(step for one in parts for step in one), done={"content": content, **done})


def reasoning(index: int, *deltas: str, summary: bool = False) -> Events:
    added: Json = {"id": f"rs_{index}", "type": "reasoning", "summary": [], "content": []}
    if not deltas:
        return item(index, added, done={})
    whole = {"type": "summary_text" if summary else "reasoning_text", "text": "".join(deltas)}
    if not summary:
        return item(index, added, *part("reasoning_text", *deltas), done={"content": [whole]})
    place = {"summary_index": 0}
    return item(
        index,
        added,
        ("reasoning_summary_part.added", {**place, "part": {**whole, "text": ""}}),
        *streamed("reasoning_summary_text", "text", *deltas, **place),
        ("reasoning_summary_part.done", {**place, "part": whole}),
        done={"summary": [whole]},
    )


def call(index: int, *deltas: str, kind: str = "function_call", key: str = "arguments", **done: Any) -> Events:
    added: Json = {"id": f"fc_{index}", "type": kind, "call_id": f"call_{index}", "name": "get", key: ""}
    events = streamed(f"{kind}_{key}", key, *deltas)
    return item(index, added, *events, done={key: "".join(deltas), **done})


def web_search(index: int, *queries: str, **done: Any) -> Events:
    action = {"type": "search", "query": "q", "queries": ["q"]}
    added: Json = {"id": f"ws_{index}", "type": "web_search_call", "action": action}
    return item(index, added, *stages("web_search_call", *queries), done=done)


def cited() -> list[tuple[str, Json]]:
    """A text with two citations, each announced when it has been sent."""
    steps = part("output_text", "See ", "[1]", " and ", "[2]", ".")
    cites = [
        {"type": "url_citation", "start_index": start, "end_index": start + 3, "title": "T", "url": "https://a.example"}
        for start in (4, 12)
    ]
    for number, position in ((1, 5), (0, 3)):
        place = {"content_index": 0, "annotation_index": number, "annotation": cites[number]}
        steps.insert(position, ("output_text.annotation.added", place))
    steps[-1][1]["part"]["annotations"] = cites
    return steps


def parallel(first: Events, second: Events) -> Events:
    """The first added and its deltas, then the second, and both done: the last two events of each."""
    return [*first[:-2], *second[:-2], *first[-2:], *second[-2:]]


def shell(index: int, *commands: tuple[str, ...], outputs: Events, steps: list[tuple[int, Json]]) -> Events:
    """A shell call in a container and its output, whose deltas come as `steps`; a step without one ends a command."""
    texts = ["".join(pieces) for pieces in commands]
    action: Json = {"commands": texts, "timeout_ms": None, "max_output_length": None}
    environment = {"type": "container_reference", "container_id": "c"}
    added: Json = {"id": f"sh_{index}", "type": "shell_call", "call_id": "call_s", "environment": environment}
    inner: list[tuple[str, Json]] = []
    for number, pieces in enumerate(commands):
        place = {"command_index": number}
        inner.append(("shell_call_command.added", {**place, "command": ""}))
        inner += [("shell_call_command.delta", {**place, "delta": piece}) for piece in pieces]
        inner.append(("shell_call_command.done", {**place, "command": texts[number]}))
    ends = [
        ("shell_call_output_content.delta", {"command_index": number, "delta": delta})
        if delta
        else ("shell_call_output_content.done", {"command_index": number, "output": [outputs[number]]})
        for number, delta in steps
    ]
    result: Json = {"id": f"sho_{index}", "type": "shell_call_output", "call_id": "call_s", "output": []}
    call_events = item(index, {**added, "action": {**action, "commands": []}}, *inner, done={"action": action})
    for one in call_events:
        one.pop("item_id", None)
    return [*call_events, *item(index + 1, result, *ends, done={"output": outputs})]


TRIO = ("in_progress", "searching", "completed")
CODE: Json = {"id": "ci_0", "type": "code_interpreter_call", "code": "", "container_id": "c", "outputs": None}
LISTING: Json = {"id": "mcpl_0", "type": "mcp_list_tools", "server_label": "s", "tools": []}
MCP_CALL: Json = {"id": "mcp_1", "type": "mcp_call", "server_label": "s", "name": "t", "arguments": ""}
APPROVAL: Json = {"id": "mcpr_2", "type": "mcp_approval_request", "server_label": "s", "name": "t", "arguments": "{}"}
CUT: Json = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
FAILED: Json = {"status": "failed", "error": {"code": "server_error", "message": "m"}}

LEGAL: dict[str, Events] = {
    "text": stream(message(0, part("output_text", "Hel", "lo"))),
    "queued": stream(message(0, part("output_text", "")), queued=True),
    "two parts": stream(message(0, part("output_text", "a"), part("refusal", "No", ".", content_index=1))),
    "reasoning": stream(reasoning(0, "thin", "king"), message(1, part("output_text", "Hi"))),
    "summary": stream(reasoning(0, "in ", "short", summary=True), message(1, part("output_text", "Hi"))),
    "no reasoning to show": stream(reasoning(0), message(1, part("output_text", "Hi"))),
    "calls": stream(parallel(call(0, '{"a"', ": 1}"), call(1, '{"b"', ": 2}"))),
    "custom": stream(call(0, "*** ", "Begin", kind="custom_tool_call", key="input")),
    "search": stream(reasoning(0, "hm"), web_search(1, *TRIO), message(2, cited())),
    "failed search": stream(web_search(0, "in_progress", "searching", status="failed"), call(1, "{}")),
    "file search": stream(
        item(
            0, {"id": "fs_0", "type": "file_search_call", "queries": ["q"]}, *stages("file_search_call", *TRIO), done={}
        )
    ),
    "image": stream(
        item(
            0,
            {"id": "ig_0", "type": "image_generation_call", "result": None},
            ("image_generation_call.in_progress", {}),
            ("image_generation_call.generating", {}),
            ("image_generation_call.partial_image", {"partial_image_b64": "aGk=", "partial_image_index": 0}),
            ("image_generation_call.completed", {}),
            done={"result": "aGk="},
        )
    ),
    "code": stream(
        item(
            0,
            CODE,
            ("code_interpreter_call.in_progress", {}),
            *streamed("code_interpreter_call_code", "code", "1", "+1"),
            ("code_interpreter_call.interpreting", {}),
            ("code_interpreter_call.completed", {}),
            done={"code": "1+1", "outputs": [{"type": "logs", "logs": "2"}]},
        )
    ),
    "mcp": stream(
        item(0, LISTING, ("mcp_list_tools.in_progress", {}), ("mcp_list_tools.completed", {}), done={}),
        item(
            1,
            MCP_CALL,
            ("mcp_call.in_progress", {}),
            *streamed("mcp_call_arguments", "arguments", "{", "}"),
            ("mcp_call.completed", {}),
            done={"arguments": "{}", "output": "o"},
        ),
        item(2, APPROVAL, done={}),
    ),
    "shell": stream(
        shell(
            0,
            ("ec", "ho a"),
            ("ls",),
            outputs=[
                {"stdout": "a\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}},
                {"stdout": "bc", "stderr": "e", "outcome": {"type": "timeout"}},
            ],
            steps=[(1, {"stdout": "b"}), (0, {"stdout": "a\n"}), (1, {"stdout": "c", "stderr": "e"}), (0, {}), (1, {})],
        ),
        message(2, part("output_text", "Hi")),
    ),
    "incomplete": stream(reasoning(0, "x"), message(1, part("output_text", "Hel"), status="incomplete"), **CUT),
    "failed": stream(message(0, part("output_text", "Hel"), status="incomplete"), **FAILED),
    "failed with an error event": stream([{"type": "error", "code": None, "message": "m", "param": None}], **FAILED),
}
