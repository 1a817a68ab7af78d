"""Makes text safe to encode: halves of surrogate pairs are joined across deltas, and a half left alone is U+FFFD."""


class SurrogateJoiner:
    """A JSON escape of an emoji is two halves, and a server that cuts text anywhere may send them in two chunks."""

    __slots__ = ("pending_half",)

    def __init__(self) -> None:
        self.pending_half = ""

    def feed(self, text: str) -> str:
        """`text` without lone surrogates. A first half at its end is held back until its second half comes."""
        if not self.pending_half and text.isascii():
            return text
        text = self.pending_half + text
        self.pending_half = text[-1] if text and "\ud800" <= text[-1] <= "\udbff" else ""
        return repair_surrogates(text[:-1] if self.pending_half else text)

    def flush(self) -> str:
        """What stands for a half whose other one never came."""
        half, self.pending_half = self.pending_half, ""
        return "\ufffd" if half else ""


def repair_surrogates(text: str) -> str:
    """`text` with surrogate pairs joined and lone surrogates replaced."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
