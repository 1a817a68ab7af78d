"""Repetitions: what of a message has been read before, where servers send messages in place of deltas or after them."""

from typing import Literal

ProseKind = Literal["text", "reasoning", "refusal"]


class Repetitions:
    """The texts of one answer by kind. Of those that came as deltas only the length and the last piece are kept."""

    __slots__ = ("_messages", "_sizes")

    def __init__(self) -> None:
        self._sizes: dict[ProseKind, tuple[int, str]] = {}
        self._messages: dict[ProseKind, str] = {}

    def add_deltas(self, kind: ProseKind, size_bytes: int, last: str) -> None:
        """Count deltas of this many bytes of UTF-8, of which `last` is the last one."""
        former = self._sizes.get(kind)
        self._sizes[kind] = size_bytes if former is None else former[0] + size_bytes, last

    def find_end(self, kind: ProseKind, text: str | None) -> str | None:
        """Return the end of a text that goes on after the deltas that it sums up; None where it says nothing new."""
        if kind not in self._sizes or not text:
            return text
        (size_bytes, last), data = self._sizes[kind], text.encode("utf-8", "surrogatepass")
        is_longer = len(data) > size_bytes and data[:size_bytes].endswith(last.encode("utf-8", "surrogatepass"))
        return data[size_bytes:].decode("utf-8", "surrogatepass") if is_longer else None

    def find_growth(self, kind: ProseKind, text: str | None, *, is_last: bool) -> str | None:
        """Return a message's text without the earlier messages that it begins with."""
        former = self._messages.get(kind, "")
        if not text:
            return text
        if former and text.startswith(former) and (is_last or text != former):
            self._messages[kind] = text
            return text[len(former) :]
        self._messages[kind] = former + text
        return text
