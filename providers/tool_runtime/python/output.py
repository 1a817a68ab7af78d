"""Output of a program, bounded to its head and its tail, as text that can be stored."""

import re
from typing import Final

_ESCAPE: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])")
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class ProgramOutput:
    """Buffer of at most `max_bytes`: half of them from the beginning of the output, half from its end."""

    def __init__(self, max_bytes: int) -> None:
        self._half_bytes = max_bytes // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._total_bytes = 0

    def feed(self, data: bytes) -> None:
        self._total_bytes += len(data)
        room = self._half_bytes - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        # In blocks: cutting at each feed would move the whole tail for every small write.
        if len(self._tail) > 4 * self._half_bytes:
            del self._tail[: -self._half_bytes]

    def text(self) -> str:
        """Return the whole output, or its two ends around a line that says how many bytes are missing between them."""
        tail = self._tail[-self._half_bytes :]
        left_out = self._total_bytes - len(self._head) - len(tail)
        if not left_out:
            return render_terminal_text(bytes(self._head + tail))
        mark = f"\n[... {left_out} bytes of output are left out here ...]\n"
        return render_terminal_text(bytes(self._head)) + mark + render_terminal_text(bytes(tail))


def render_terminal_text(data: bytes) -> str:
    """Return the text that a terminal would show: without colours, of overwritten lines the last state, and U+FFFD
    for bytes that are neither UTF-8 nor printable."""
    text = _ESCAPE.sub("", data.decode(errors="replace").replace("\r\n", "\n"))
    lines = (line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return _CONTROL.sub("\ufffd", "\n".join(lines))
