"""Makes text safe to encode: halves of surrogate pairs are joined across deltas, and a half left alone is U+FFFD."""


class SurrogateJoiner:
    """A JSON escape of an emoji is two halves, and a server that cuts text anywhere may send them in two chunks."""

    __slots__ = ("half",)

    def __init__(self) -> None:
        self.half = ""

    def feed(self, text: str) -> str:
        """`text` without lone surrogates. A first half at its end is held back until its second half comes."""
        if not self.half and text.isascii():
            return text
        text = self.half + text
        self.half = text[-1] if text and "\ud800" <= text[-1] <= "\udbff" else ""
        return encodable(text[:-1] if self.half else text)

    def flush(self) -> str:
        """What stands for a half whose other one never came."""
        half, self.half = self.half, ""
        return "\ufffd" if half else ""


def encodable(text: str) -> str:
    """`text` with surrogate pairs joined and lone surrogates replaced."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
