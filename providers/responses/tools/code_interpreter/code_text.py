"""Extracts the code of a call from its arguments while the model writes them."""

import json
import re
from typing import Any, Final, Literal, cast

from apis.errors import ToolFailed
from providers.responses.tools.json_strings import decode_string_piece, replace_surrogates

_OBJECT_PREFIX: Final = re.compile(r'\s*\{\s*"code"\s*:\s*"')
_COMPACT_PREFIX: Final = '{"code":"'
_MAX_PREFIX_CHARS: Final = 100


class CodeParser:
    """Reads `{"code": "..."}` in chunks, or raw code. Text that does not begin like an object is raw code too: models
    that were trained on a native Python tool sometimes omit the JSON."""

    def __init__(self, *, is_raw: bool) -> None:
        self._state: Literal["beginning", "code", "raw", "nothing"] = "raw" if is_raw else "beginning"
        self._buffer = ""
        self._code_chunks: list[str] = []

    @property
    def code(self) -> str:
        """The code read so far."""
        return "".join(self._code_chunks)

    def feed(self, chunk: str) -> str:
        """Take the next chunk of the arguments and return the new code in it."""
        if self._state == "nothing":
            return ""
        self._buffer += chunk
        if self._state == "beginning":
            self._detect_format()
        if self._state == "raw":
            return self._append_code(self._buffer, "")
        return self._decode_buffer() if self._state == "code" else ""

    def finish(self, arguments: str) -> str:
        """Return the code that `feed` could not read. Raises ToolFailed for invalid arguments."""
        unread_code = ""
        if self._state != "raw":
            code = _parse_code(arguments)
            if not self._code_chunks:
                unread_code = self._append_code(code, "")
            elif code != self.code:
                raise ToolFailed("The arguments of `python` hold `code` twice.")
        if not self.code.strip():
            raise ToolFailed("`python` needs code to run.")
        return unread_code

    def _detect_format(self) -> None:
        match = _OBJECT_PREFIX.match(self._buffer)
        bare = "".join(self._buffer.split())
        if match:
            self._state = "code"
            self._buffer = self._buffer[match.end() :]
        elif bare and bare[0] != "{":
            self._state = "raw"
        elif not _COMPACT_PREFIX.startswith(bare) or len(self._buffer) > _MAX_PREFIX_CHARS:
            self._state = "nothing"  # another key precedes `code`: `finish` reads it

    def _decode_buffer(self) -> str:
        """Return the complete part of the buffer."""
        try:
            piece = decode_string_piece(self._buffer)
        except ValueError:
            self._state = "nothing"
            return ""
        if piece.is_closed:
            self._state = "nothing"
        return self._append_code(piece.text, piece.rest)

    def _append_code(self, text: str, remainder: str) -> str:
        self._buffer = remainder
        code = replace_surrogates(text)
        if code:
            self._code_chunks.append(code)
        return code


def _parse_code(arguments: str) -> str:
    """Return the code in the arguments. Line breaks that the model did not escape are accepted."""
    try:
        value: Any = json.loads(arguments or "{}", strict=False)
    except (ValueError, RecursionError) as exc:
        raise ToolFailed(f"The arguments of `python` are not JSON: {exc}.") from exc
    code: Any = cast(dict[str, Any], value).get("code") if isinstance(value, dict) else None
    if not isinstance(code, str):
        raise ToolFailed("The arguments of `python` must be an object with the text `code`.")
    return replace_surrogates(code)
