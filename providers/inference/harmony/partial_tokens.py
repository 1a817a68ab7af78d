"""Ids of tokens that are parts of a character, found from the bytes that they make together."""

from providers.inference.harmony.vocabulary import FIRST_SPECIAL, Vocabulary

MAX_BYTES = 1024
"""Bytes of text that are searched; more than any sequence of partial characters that is not noise."""


class PartialTokens:
    """Index of the tokens whose bytes end within a character. Building it takes a third of a second."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._ids: dict[bytes, int] = {}
        for token in range(FIRST_SPECIAL):
            data = vocabulary.decode_bytes(token)
            if not _is_whole(data):
                self._ids[data] = token

    def find_ids(self, text: str, count: int, last: int) -> list[int]:
        """Return the ids of `count` tokens of which each ended within a character, and `last`, which completed it.

        `text` is that of all of them. The tokenizer's own way to write the text comes first, then any other with the
        same bytes; where there is none, because the text has replacement characters, the ids are those of the text.
        """
        canonical = self._vocabulary.encode(text)
        if len(canonical) == count + 1 and canonical[-1] == last:
            return canonical
        data, end = text.encode("utf-8", "surrogatepass"), self._vocabulary.decode_bytes(last)
        if data.endswith(end) and len(data) <= MAX_BYTES:
            found = self._split(data[: len(data) - len(end)], count)
            if found is not None:
                return [*found, last]
        return [*self._vocabulary.encode(text.removesuffix(end.decode("utf-8", "replace"))), last]

    def _split(self, data: bytes, count: int) -> list[int] | None:
        """Return `count` tokens with these bytes together: breadth first, so the time is at most the square of the
        length for each token."""
        ways: dict[int, list[int]] = {0: []}
        for _ in range(count):
            ways = {
                end: [*ids, token]
                for start, ids in ways.items()
                for end in range(start + 1, len(data) + 1)
                if (token := self._ids.get(data[start:end])) is not None
            }
        return ways.get(len(data))


def _is_whole(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
