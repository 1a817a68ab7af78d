"""Reads the results of MCP servers generously: what is odd in one tool or block of content is mended or left out,
and the rest is kept. The output is a result that the SDK takes in every version of the protocol.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, cast

from mcp_types import JSONRPCError, JSONRPCMessage, JSONRPCRequest, JSONRPCResponse
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, LATEST_HANDSHAKE_VERSION

from providers.common.recent import RecentEntries
from providers.tool_servers.mcp.messages import NESTED_TOO_DEEPLY
from providers.tool_servers.mcp.texts import one_line

_HINTS: Final = ("readOnlyHint", "destructiveHint", "idempotentHint", "openWorldHint")
_UNNAMED_SERVER: Final = {"name": "unnamed", "version": "0"}
_MAX_FAULTS: Final = 1000
_MAX_OPEN_REQUESTS: Final = 4096
"""Requests that may wait for an answer: those that a server never answers are forgotten."""
_MAX_SHOWN_CHARS: Final = 4096
"""Length from which a text in a block of an unknown type is left out: it may be a file in base64."""
_OPAQUE_RESULT_TYPES: Final = ("input_required", "task")

Json = dict[str, Any]


class AnswerMender:
    """Mends the answers to the requests of one session. `faults` says which tools were left out of the newest list, and
    why; of many faults the first ones."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self._methods = RecentEntries[str, str](_MAX_OPEN_REQUESTS)

    def note_request(self, request: JSONRPCRequest) -> None:
        """Remember the method that the answer to the request is read by."""
        self._methods[str(request.id)] = request.method

    def add_fault(self, fault: str) -> None:
        """Remember what a list leaves out."""
        if len(self.faults) < _MAX_FAULTS:
            self.faults.append(fault)

    def mend(self, message: JSONRPCMessage) -> None:
        """Mend the message in its place, where it answers a request of a known method."""
        if isinstance(message, JSONRPCError):
            self._methods.pop(str(message.id), None)
        elif isinstance(message, JSONRPCResponse):
            match self._methods.pop(str(message.id), None):
                case "initialize":
                    message.result = mend_initialization(message.result)
                case "tools/list":
                    message.result = mend_listing(message.result, self.add_fault)
                case "tools/call":
                    message.result = mend_call_result(message.result)
                case _:
                    pass


def mend_listing(result: Json, add_fault: Callable[[str], None]) -> Json:
    """Return a page of tools with the parts of each that are used; `add_fault` is called with those beyond repair."""
    tools: Any = result.get("tools")
    if tools is None:
        tools = []  # as some languages write an empty list
    if isinstance(tools, dict):
        tools = [{"name": name, **_as_object(tool)} for name, tool in cast(Json, tools).items()]
    if not isinstance(tools, list):
        return result
    mended: list[Json] = []
    for entry in cast(list[Any], tools):
        tool = _as_object(entry)
        name, schema = tool.get("name"), _mend_schema(tool.get("inputSchema"))
        if not isinstance(name, str):
            add_fault("one without a name")
        elif NESTED_TOO_DEEPLY in json.dumps(tool.get("inputSchema")):
            add_fault(f"{one_line(name, 64)!r}: its schema is nested too deeply")
        elif schema["type"] != "object":
            add_fault(f"{one_line(name, 64)!r}: it takes no object")
        else:
            mended.append(_mend_tool(name, schema, tool))
    cursor = result.get("nextCursor")
    return {
        "tools": mended,
        "nextCursor": None if cursor in (None, "") else str(cursor),
        "resultType": "complete",
        "ttlMs": 0,
        "cacheScope": "private",
    }


def _mend_tool(name: str, schema: Json, tool: Json) -> Json:
    description, annotations = tool.get("description"), _as_object(tool.get("annotations"))
    # a hint that is neither true nor false could pass for a promise that the server does not make
    hints: Json = {hint: annotations[hint] for hint in _HINTS if isinstance(annotations.get(hint), bool)}
    if isinstance(title := annotations.get("title"), str):
        hints["title"] = title
    return {
        "name": name,
        "description": str(description) if isinstance(description, str | int | float) else "",
        "inputSchema": schema,
        "annotations": hints,
    }


def _mend_schema(schema: Any) -> Json:
    """Return the schema of a tool's arguments without the keywords that are not what JSON Schema has. What is no
    schema at all says nothing about them."""
    mended = {**(_parse_object(schema) if isinstance(schema, str) else _as_object(schema))}
    kind: Any = mended.get("type")
    if kind is None or (isinstance(kind, list) and "object" in kind):
        mended["type"] = "object"
    properties: Any = mended.pop("properties", None)
    if isinstance(properties, dict):
        entries = cast(Json, properties).items()
        mended["properties"] = {name: entry if isinstance(entry, dict | bool) else {} for name, entry in entries}
    if "required" in mended:
        required: Any = mended["required"]
        names = cast(list[Any], required) if isinstance(required, list) else []
        mended["required"] = list(dict.fromkeys(name for name in names if isinstance(name, str)))
    return mended


def mend_initialization(result: Json) -> Json:
    """Return what the handshake needs; the rest is not used."""
    info, instructions = _as_object(result.get("serverInfo")), result.get("instructions")
    texts = {name: info[name] for name in _UNNAMED_SERVER if isinstance(info.get(name), str)}
    capabilities = _as_object(result.get("capabilities")).get("tools")
    version = result.get("protocolVersion")
    return {
        # a version that no SDK knows is that of a server without one, which takes what is usual
        "protocolVersion": version if version in HANDSHAKE_PROTOCOL_VERSIONS else LATEST_HANDSHAKE_VERSION,
        "serverInfo": {**_UNNAMED_SERVER, **texts},
        "capabilities": {} if capabilities is None else {"tools": {}},
        "instructions": instructions if isinstance(instructions, str) else None,
    }


def mend_call_result(result: Json) -> Json:
    """Return a result of texts alone, block by block, with the structured content unless a text repeats it."""
    if result.get("resultType") in _OPAQUE_RESULT_TYPES or isinstance(result.get("task"), dict):
        return result
    texts = [*_content_to_texts(result.get("content"))]
    structured = result.get("structuredContent")
    if structured is not None and not _is_repeated(structured, texts):
        texts.append(_to_json(structured))
    if not texts and "content" not in result and structured is None:
        rest = {name: value for name, value in result.items() if name not in ("_meta", "isError", "resultType")}
        texts = [_to_json(rest.get("toolResult", rest))] if rest else []
    return {
        "content": [{"type": "text", "text": text} for text in texts],
        "isError": result.get("isError") in (True, 1, "true", "True"),
        "resultType": "complete",
    }


def _content_to_texts(content: Any) -> Iterator[str]:
    if content is None:
        return
    for block in cast(list[Any], content) if isinstance(content, list) else [content]:
        if isinstance(block, dict):
            text = _block_to_text(cast(Json, block))
        else:
            text = block if isinstance(block, str) else _to_json(block)
        if text:
            yield text


def _block_to_text(block: Json) -> str:
    """Return what a model can read of one block; of an unknown or broken one, its text or its fields."""
    match block:
        case {"text": str(text)}:  # of every type: no other has one
            return text
        case {"type": ("image" | "audio") as kind, "data": str(data)}:
            return _describe(kind, block.get("mimeType"), _base64_size(data))
        case {"type": "resource_link", "uri": str(uri)}:
            about = block.get("description") or block.get("title") or block.get("name")
            return _describe("resource", uri, block.get("mimeType"), about)
        case {"type": "resource", "resource": {"text": str(text)} as resource}:
            return f"{_describe('resource', resource.get('uri'), resource.get('mimeType'))}\n{text}"
        case {"type": "resource", "resource": {"blob": str(blob)} as resource}:
            return _describe("resource", resource.get("uri"), resource.get("mimeType"), _base64_size(blob))
        case _:
            fields = {name: value for name, value in block.items() if name not in ("_meta", "annotations")}
            return "" if fields in ({"type": "text"}, {"type": "text", "text": None}) else _to_json(_shorten(fields))


def _shorten(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _MAX_SHOWN_CHARS:
        return f"[{len(value)} characters]"
    if isinstance(value, dict):
        return {name: _shorten(inner) for name, inner in cast(Json, value).items()}
    if isinstance(value, list):
        return [_shorten(inner) for inner in cast(list[Any], value)]
    return value


def _is_repeated(structured: Any, texts: Sequence[str]) -> bool:
    """Return True where the texts hold the structured content as JSON, as servers do for clients that do not know it.
    SDKs wrap a value that is no object into `result`, and write each element of a list as a block of its own."""
    values = [structured]
    if isinstance(structured, dict) and [*cast(Json, structured)] == ["result"]:
        values.append(structured["result"])
    for value in values:
        for text in (*texts, "\n".join(texts)):
            if text == value or _parse(text) == (value,):
                return True
        if (
            isinstance(value, list)
            and texts
            and [_parse(text) or (text,) for text in texts] == [(element,) for element in cast(list[Any], value)]
        ):
            return True
    joined = "".join("".join(texts).split())
    return any("".join(json.dumps(structured, ensure_ascii=is_ascii).split()) in joined for is_ascii in (False, True))


def _parse(text: str) -> tuple[Any] | None:
    """Return the value of a JSON text in a tuple, or None where it is none."""
    try:
        return (json.loads(text),)
    except (ValueError, RecursionError):
        return None


def _parse_object(text: str) -> Json:
    parsed = _parse(text)
    return _as_object(parsed[0]) if parsed else {}


def _as_object(value: Any) -> Json:
    return cast(Json, value) if isinstance(value, dict) else {}


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _base64_size(data: str) -> str:
    return f"{len(data) * 3 // 4} bytes"


def _describe(*parts: Any) -> str:
    return one_line(f"[{', '.join(str(part) for part in parts if part)}]", 4096)
