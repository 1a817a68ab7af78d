"""Custom (free text) tools on servers that know functions only: declared as a function of one string, `input`.

The model then writes `{"input": "..."}`, and CustomInput takes the wrapping off again while it streams in.
"""

import re
from typing import Any, Final

import msgspec

from apis.chat import CalledFunction, Custom, CustomCall, FunctionCall
from providers.inference.chat_completions.text_repair import SurrogateJoiner

INPUT: Final = "input"
ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", '"': '"', "\\": "\\", "/": "/"}

_OPENING: Final = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_BEGUN_OPENING: Final = re.compile(r'\s*(?:$|\{\s*(?:$|"(?:$|i$|in$|inp$|inpu$|input$|input"\s*(?:$|:\s*$))))')
# A quote ends the input when the object ends behind it, or when another key of it follows. A model that forgot to
# escape a quote goes on with anything else, and then the quote was part of its text.
_END_OR_NOT_YET: Final = re.compile(r'"\s{0,64}(?:$|\}\s*$|,\s{0,64}(?:$|"[^"\\]{0,64}(?:$|"\s{0,64}$)))')
_NEXT_KEY: Final = re.compile(r'"\s{0,64},\s{0,64}"[^"\\]{0,64}"\s{0,64}:')
_PLAIN: Final = re.compile(r'[^"\\]*')


def custom_to_function(tool: Custom) -> dict[str, Any]:
    """A custom tool as the function tool it is declared as."""
    lines = [tool.description] if tool.description else []
    what = "The tool's whole input, as plain text."
    if tool.format is not None and tool.format.type == "grammar":
        grammar = tool.format.grammar
        kind = "regular expression" if grammar.syntax == "regex" else "Lark grammar"
        lines.append(f"The input must match this {kind}:\n{grammar.definition}")
    schema = {
        "type": "object",
        "properties": {INPUT: {"type": "string", "description": what}},
        "required": [INPUT],
        "additionalProperties": False,
    }
    # Without `strict`, vLLM holds even a forced call to some JSON only: a bare string in place of the object.
    function: dict[str, Any] = {"name": tool.name, "parameters": schema, "strict": True}
    if lines:
        function["description"] = "\n\n".join(lines)
    return {"type": "function", "function": function}


def custom_call_to_function_call(call: CustomCall) -> FunctionCall:
    """A custom call of the history as the function call that the model made."""
    arguments = msgspec.json.encode({INPUT: call.custom.input}).decode()
    return FunctionCall(id=call.id, function=CalledFunction(name=call.custom.name, arguments=arguments))


class CustomInput:
    """Arguments JSON in, piece by piece; the text of its `input` out, as soon as it is certain.

    Where the model's JSON is not what was asked for, what it wrote is the input as it stands.
    """

    __slots__ = ("_held", "_joiner", "_state")

    def __init__(self) -> None:
        self._held = ""
        self._joiner = SurrogateJoiner()
        self._state = "before"

    def feed(self, text: str) -> str:
        """What more of the input `text` makes certain."""
        if self._state == "after":
            return ""
        self._held += text
        if self._state == "before":
            self._open()
        return self._joiner.feed(self._take()) if self._state == "inside" else ""

    def finish(self) -> str:
        """What is left when the arguments are over."""
        held, self._held = self._held, ""
        if self._state in ("before", "odd"):
            return _salvage(held)
        if self._state == "inside" and held and not _END_OR_NOT_YET.match(held):
            return self._joiner.feed(held) + self._joiner.flush()
        return self._joiner.flush()

    def _open(self) -> None:
        if opening := _OPENING.match(self._held):
            self._held = self._held[opening.end() :]
            self._state = "inside"
        elif not _BEGUN_OPENING.match(self._held):
            self._state = "odd"

    def _take(self) -> str:
        """Everything of what is held that is certain by now, unescaped; the rest stays held."""
        held, at, out = self._held, 0, list[str]()
        while at < len(held):
            plain = _PLAIN.match(held, at)
            assert plain is not None  # it matches the empty text too
            out.append(plain[0])
            at = plain.end()
            if at == len(held):
                break
            if held[at] == "\\":
                if (escape := _escape(held, at)) is None:
                    break
                out.append(escape[0])
                at = escape[1]
            elif _NEXT_KEY.match(held, at):
                self._state, at = "after", len(held)
            elif _END_OR_NOT_YET.match(held, at):
                break
            else:
                out.append('"')
                at += 1
        self._held = held[at:]
        return "".join(out)


def _escape(text: str, at: int) -> tuple[str, int] | None:
    """The character of the escape at `at` and where it ends; None while it is not whole. A wrong one is itself."""
    if at + 1 == len(text):
        return None
    kind = text[at + 1]
    if kind != "u":
        return ESCAPES.get(kind, text[at : at + 2]), at + 2
    digits = text[at + 2 : at + 6]
    if any(digit not in "0123456789abcdefABCDEF" for digit in digits):
        return "\\u", at + 2
    return (chr(int(digits, 16)), at + 6) if len(digits) == 4 else None


def _salvage(text: str) -> str:
    try:
        value = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return text
    found = value.get(INPUT)
    return found if isinstance(found, str) else text
