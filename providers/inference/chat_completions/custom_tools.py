"""Tools on servers that only know functions: a custom (free text) tool becomes a function with one string, `input`.

The model then writes `{"input": "..."}`, and CustomInputReader unwraps the text while it streams.
"""

import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from apis.chat import (
    CalledFunction,
    ChatCustomTool,
    ChatFunctionTool,
    ChatTool,
    CustomCall,
    CustomToolDefinition,
    FunctionCall,
    NativeTool,
)
from apis.errors import Unsupported
from providers.inference.chat_completions.text_repair import SurrogateJoiner

PlainTool = ChatFunctionTool | ChatCustomTool
"""Tool that any chat model can use, by one plain name."""

INPUT_FIELD: Final = "input"
ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", '"': '"', "\\": "\\", "/": "/"}

_OPENING: Final = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_PARTIAL_OPENING: Final = re.compile(r'\s*(?:$|\{\s*(?:$|"(?:$|i$|in$|inp$|inpu$|input$|input"\s*(?:$|:\s*$))))')
# A quote ends the input only if the object's end or another key follows. A model that forgot to escape a quote
# continues with something else, and then the quote was part of its text.
_POSSIBLE_END: Final = re.compile(r'"\s{0,64}(?:$|\}\s*$|,\s{0,64}(?:$|"[^"\\]{0,64}(?:$|"\s{0,64}$)))')
_NEXT_KEY: Final = re.compile(r'"\s{0,64},\s{0,64}"[^"\\]{0,64}"\s{0,64}:')
_UNESCAPED_TEXT: Final = re.compile(r'[^"\\]*')
_MAX_UNDECIDED_CHARS: Final = 1_000
"""Characters, nearly all of them white space, that are read again with each delta before they are decided."""


def require_plain_tools(tools: Sequence[ChatTool] | None) -> list[PlainTool]:
    """Return the tools unchanged. Raises Unsupported naming the first one that needs a model trained on it."""
    plain: list[PlainTool] = []
    for index, tool in enumerate(tools or ()):
        if isinstance(tool, NativeTool):
            raise Unsupported(f"This model was not trained on the tool '{tool.type}'.", param=f"tools[{index}].type")
        if isinstance(tool, ChatFunctionTool) and tool.function.namespace is not None:
            raise Unsupported(
                "This model knows no namespaces of functions.", param=f"tools[{index}].function.namespace"
            )
        plain.append(tool)
    return plain


def custom_to_function(tool: CustomToolDefinition) -> dict[str, Any]:
    """Return the function tool as which a custom tool is declared."""
    lines = [tool.description] if tool.description else []
    input_description = "The tool's whole input, as plain text."
    if tool.format is not None and tool.format.type == "grammar":
        grammar = tool.format.grammar
        kind = "regular expression" if grammar.syntax == "regex" else "Lark grammar"
        lines.append(f"The input must match this {kind}:\n{grammar.definition}")
    schema = {
        "type": "object",
        "properties": {INPUT_FIELD: {"type": "string", "description": input_description}},
        "required": [INPUT_FIELD],
        "additionalProperties": False,
    }
    # Without `strict`, vLLM enforces only valid JSON, even for a forced call: a bare string instead of the object.
    function: dict[str, Any] = {"name": tool.name, "parameters": schema, "strict": True}
    if lines:
        function["description"] = "\n\n".join(lines)
    return {"type": "function", "function": function}


def custom_call_to_function_call(call: CustomCall) -> FunctionCall:
    """Return a custom call of the history as the function call that the model wrote."""
    arguments = msgspec.json.encode({INPUT_FIELD: call.custom.input}).decode()
    return FunctionCall(id=call.id, function=CalledFunction(name=call.custom.name, arguments=arguments))


class CustomInputReader:
    """Incremental reader: arguments JSON in, the text of its `input` out as soon as it is certain.

    If the model's JSON does not have that shape, its text is the input as it stands.
    """

    __slots__ = ("_buffer", "_odd_pieces", "_state", "_surrogate_joiner")

    def __init__(self) -> None:
        self._buffer = ""
        self._odd_pieces: list[str] = []
        self._surrogate_joiner = SurrogateJoiner()
        self._state = "before"

    def feed(self, text: str) -> str:
        """Return the part of the input that `text` makes certain."""
        if self._state == "after":
            return ""
        if self._state == "odd":
            self._odd_pieces.append(text)
            return ""
        self._buffer += text
        if self._state == "before":
            self._match_opening()
        return self._surrogate_joiner.feed(self._read_certain_text()) if self._state == "inside" else ""

    def finish(self) -> str:
        """Return the rest of the input at the end of the arguments."""
        buffer, self._buffer = self._buffer, ""
        if self._state in ("before", "odd"):
            return _recover_input(buffer + "".join(self._odd_pieces))
        if self._state == "inside" and buffer and not _POSSIBLE_END.match(buffer):
            return self._surrogate_joiner.feed(buffer) + self._surrogate_joiner.flush()
        return self._surrogate_joiner.flush()

    def _match_opening(self) -> None:
        if opening := _OPENING.match(self._buffer):
            self._buffer = self._buffer[opening.end() :]
            self._state = "inside"
        elif len(self._buffer) > _MAX_UNDECIDED_CHARS or not _PARTIAL_OPENING.match(self._buffer):
            self._state = "odd"

    def _read_certain_text(self) -> str:
        """Remove the certain text from the buffer and return it unescaped."""
        buffer, at, out = self._buffer, 0, list[str]()
        while at < len(buffer):
            plain = _UNESCAPED_TEXT.match(buffer, at)
            assert plain is not None  # the pattern also matches the empty text
            out.append(plain[0])
            at = plain.end()
            if at == len(buffer):
                break
            if buffer[at] == "\\":
                if (escape := _parse_escape(buffer, at)) is None:
                    break
                out.append(escape[0])
                at = escape[1]
            elif _NEXT_KEY.match(buffer, at):
                self._state, at = "after", len(buffer)
            elif _POSSIBLE_END.match(buffer, at):
                if len(buffer) - at > _MAX_UNDECIDED_CHARS:
                    self._state, at = "after", len(buffer)
                break
            else:
                out.append('"')
                at += 1
        self._buffer = buffer[at:]
        return "".join(out)


def _parse_escape(text: str, offset: int) -> tuple[str, int] | None:
    """Return the character of the escape at `offset` and the offset after it; None while it is incomplete. An invalid
    escape stands for itself."""
    if offset + 1 == len(text):
        return None
    kind = text[offset + 1]
    if kind != "u":
        return ESCAPES.get(kind, text[offset : offset + 2]), offset + 2
    digits = text[offset + 2 : offset + 6]
    if any(digit not in "0123456789abcdefABCDEF" for digit in digits):
        return "\\u", offset + 2
    return (chr(int(digits, 16)), offset + 6) if len(digits) == 4 else None


def _recover_input(text: str) -> str:
    try:
        value = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return text
    input_text = value.get(INPUT_FIELD)
    return input_text if isinstance(input_text, str) else text
