"""GrowingText: the text of an item, which grows by a delta for each token."""


class GrowingText:
    """Text in UTF-8: a list of the deltas would take 70 bytes for each token, and this takes as many as its bytes."""

    __slots__ = ("_utf8",)

    def __init__(self) -> None:
        self._utf8 = bytearray()

    def append(self, text: str) -> None:
        """Add `text`, which may hold half of a surrogate pair."""
        self._utf8 += text.encode("utf-8", "surrogatepass")

    def __str__(self) -> str:
        """Return the whole text."""
        return self._utf8.decode("utf-8", "surrogatepass")
