"""The code of a call, taken out of its arguments while the model writes them."""

import json
import re
from typing import Any, Final, Literal, cast

from apis.errors import ToolFailed

_BEGINNING: Final = re.compile(r'\s*\{\s*"code"\s*:\s*"')
_BARE_BEGINNING: Final = '{"code":"'
_STRING: Final = re.compile(r'(?:[^"\\]++|\\u[0-9a-fA-F]{4}|\\[^u])*+')
_LONE: Final = re.compile("[\ud800-\udfff]")
_LONGEST_BEGINNING: Final = 100
_LONGEST_ESCAPE: Final = len(r"\ud83d\ude00")


class CodeText:
    """Reads `{"code": "..."}`, cut anywhere, or raw code. What begins like no object is raw code too: models that
    were trained on a Python tool of their own forget the JSON now and then. `code` is what was read so far."""

    def __init__(self, *, raw: bool) -> None:
        self._reading: Literal["beginning", "code", "raw", "nothing"] = "raw" if raw else "beginning"
        self._tail = ""
        self._pieces: list[str] = []

    @property
    def code(self) -> str:
        return "".join(self._pieces)

    def feed(self, piece: str) -> str:
        """More of the arguments; gives the code that is new in it."""
        if self._reading == "nothing":
            return ""
        self._tail += piece
        if self._reading == "beginning":
            self._begin()
        if self._reading == "raw":
            return self._add(self._tail, "")
        return self._decode() if self._reading == "code" else ""

    def end(self, arguments: str) -> str:
        """All is fed; gives the code that could not be read before. Raises ToolFailed where the arguments are not
        what they should be."""
        rest = ""
        if self._reading != "raw":
            whole = _code_in(arguments)
            if not self._pieces:
                rest = self._add(whole, "")
            elif whole != self.code:
                raise ToolFailed("The arguments of `python` hold `code` twice.")
        if not self.code.strip():
            raise ToolFailed("`python` needs code to run.")
        return rest

    def _begin(self) -> None:
        found = _BEGINNING.match(self._tail)
        bare = "".join(self._tail.split())
        if found:
            self._reading = "code"
            self._tail = self._tail[found.end() :]
        elif bare and bare[0] != "{":
            self._reading = "raw"
        elif not _BARE_BEGINNING.startswith(bare) or len(self._tail) > _LONGEST_BEGINNING:
            self._reading = "nothing"  # something stands before the code: `end` finds it

    def _decode(self) -> str:
        """The part of the tail that is whole: no escape may be cut, nor two that are one character together."""
        end = _STRING.match(self._tail).end()  # pyright: ignore[reportOptionalMemberAccess] - it matches nothing too
        raw, rest = self._tail[:end], self._tail[end:]
        closed = rest.startswith('"')
        try:
            text = cast(str, json.loads(f'"{raw}"', strict=False))
        except ValueError:
            self._reading = "nothing"
            return ""
        if not closed and "\ud800" <= text[-1:] <= "\udbff":
            text, rest = text[:-1], raw[-6:] + rest
        if closed or len(rest) > _LONGEST_ESCAPE:
            self._reading = "nothing"
        return self._add(text, rest)

    def _add(self, text: str, rest: str) -> str:
        self._tail = rest
        code = _LONE.sub("\ufffd", text)
        if code:
            self._pieces.append(code)
        return code


def _code_in(arguments: str) -> str:
    """Line breaks that a model did not escape are forgiven: they mean what they look like."""
    try:
        given: Any = json.loads(arguments or "{}", strict=False)
    except (ValueError, RecursionError) as exc:
        raise ToolFailed(f"The arguments of `python` are not JSON: {exc}.") from exc
    code: Any = cast(dict[str, Any], given).get("code") if isinstance(given, dict) else None
    if not isinstance(code, str):
        raise ToolFailed("The arguments of `python` must be an object with the text `code`.")
    return _LONE.sub("\ufffd", code)
