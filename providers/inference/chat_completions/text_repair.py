"""Make text safe to encode: surrogate halves are joined across deltas, and a lone half becomes U+FFFD."""


class SurrogateJoiner:
    """Joins surrogate pairs. A JSON escape of an emoji is two halves, and a server may send them in two chunks."""

    __slots__ = ("pending_half",)

    def __init__(self) -> None:
        self.pending_half = ""

    def feed(self, text: str) -> str:
        """Return `text` without lone surrogates. A first half at its end is held until the second half arrives."""
        if not self.pending_half and text.isascii():
            return text
        text = self.pending_half + text
        self.pending_half = text[-1] if text and "\ud800" <= text[-1] <= "\udbff" else ""
        return repair_surrogates(text[:-1] if self.pending_half else text)

    def flush(self) -> str:
        """Return the replacement character for a pending half without its second one, or nothing."""
        half, self.pending_half = self.pending_half, ""
        return "\ufffd" if half else ""


def repair_surrogates(text: str) -> str:
    """Return `text` with surrogate pairs joined and lone surrogates replaced."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
