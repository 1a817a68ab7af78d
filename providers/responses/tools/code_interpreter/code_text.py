"""The code of a call, taken out of its arguments while the model writes them."""

import json
import re
from typing import Any, Final, Literal, cast

from apis.errors import ToolFailed

_OBJECT_PREFIX: Final = re.compile(r'\s*\{\s*"code"\s*:\s*"')
_COMPACT_PREFIX: Final = '{"code":"'
_STRING_BODY: Final = re.compile(r'(?:[^"\\]++|\\u[0-9a-fA-F]{4}|\\[^u])*+')
_LONE_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_MAX_PREFIX_CHARS: Final = 100
_MAX_ESCAPE_CHARS: Final = len(r"\ud83d\ude00")


class CodeParser:
    """Reads `{"code": "..."}`, cut anywhere, or raw code. What begins like no object is raw code too: models that
    were trained on a Python tool of their own forget the JSON now and then. `code` is what was read so far."""

    def __init__(self, *, is_raw: bool) -> None:
        self._state: Literal["beginning", "code", "raw", "nothing"] = "raw" if is_raw else "beginning"
        self._buffer = ""
        self._code_chunks: list[str] = []

    @property
    def code(self) -> str:
        return "".join(self._code_chunks)

    def feed(self, chunk: str) -> str:
        """More of the arguments; gives the code that is new in it."""
        if self._state == "nothing":
            return ""
        self._buffer += chunk
        if self._state == "beginning":
            self._detect_format()
        if self._state == "raw":
            return self._append_code(self._buffer, "")
        return self._decode_buffer() if self._state == "code" else ""

    def finish(self, arguments: str) -> str:
        """All is fed; gives the code that could not be read before. Raises ToolFailed where the arguments are not
        what they should be."""
        rest = ""
        if self._state != "raw":
            whole = _parse_code(arguments)
            if not self._code_chunks:
                rest = self._append_code(whole, "")
            elif whole != self.code:
                raise ToolFailed("The arguments of `python` hold `code` twice.")
        if not self.code.strip():
            raise ToolFailed("`python` needs code to run.")
        return rest

    def _detect_format(self) -> None:
        found = _OBJECT_PREFIX.match(self._buffer)
        bare = "".join(self._buffer.split())
        if found:
            self._state = "code"
            self._buffer = self._buffer[found.end() :]
        elif bare and bare[0] != "{":
            self._state = "raw"
        elif not _COMPACT_PREFIX.startswith(bare) or len(self._buffer) > _MAX_PREFIX_CHARS:
            self._state = "nothing"  # something stands before the code: `end` finds it

    def _decode_buffer(self) -> str:
        """The part of the tail that is whole: no escape may be cut, nor two that are one character together."""
        end = _STRING_BODY.match(self._buffer).end()  # pyright: ignore[reportOptionalMemberAccess] - it matches nothing too
        raw, rest = self._buffer[:end], self._buffer[end:]
        closed = rest.startswith('"')
        try:
            text = cast(str, json.loads(f'"{raw}"', strict=False))
        except ValueError:
            self._state = "nothing"
            return ""
        if not closed and "\ud800" <= text[-1:] <= "\udbff":
            text, rest = text[:-1], raw[-6:] + rest
        if closed or len(rest) > _MAX_ESCAPE_CHARS:
            self._state = "nothing"
        return self._append_code(text, rest)

    def _append_code(self, text: str, remainder: str) -> str:
        self._buffer = remainder
        code = _LONE_SURROGATE.sub("\ufffd", text)
        if code:
            self._code_chunks.append(code)
        return code


def _parse_code(arguments: str) -> str:
    """Line breaks that a model did not escape are forgiven: they mean what they look like."""
    try:
        given: Any = json.loads(arguments or "{}", strict=False)
    except (ValueError, RecursionError) as exc:
        raise ToolFailed(f"The arguments of `python` are not JSON: {exc}.") from exc
    code: Any = cast(dict[str, Any], given).get("code") if isinstance(given, dict) else None
    if not isinstance(code, str):
        raise ToolFailed("The arguments of `python` must be an object with the text `code`.")
    return _LONE_SURROGATE.sub("\ufffd", code)
