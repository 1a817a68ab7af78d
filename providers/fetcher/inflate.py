"""Inflating bodies piece by piece, so that a small one cannot become a large one at once."""

import zlib
from collections.abc import Iterator
from typing import Final

from apis.errors import FetchFailed

ACCEPTED_ENCODINGS: Final = "gzip, deflate"
_CHUNK_BYTES: Final = 64 * 1024


class Inflater:
    """Turns the bytes of a `Content-Encoding` into those that were meant. Raises FetchFailed for an encoding that was
    not asked for, and for a body that is not in it."""

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding.strip().lower().removeprefix("x-")
        if self._encoding not in ("", "identity", "gzip", "deflate"):
            raise FetchFailed("The server answered in an encoding that was not asked for.")
        self._stream: zlib._Decompress | None = None  # pyright: ignore[reportPrivateUsage] - the only name of the type

    def feed(self, data: bytes) -> Iterator[bytes]:
        """What `data`, which is not empty, adds: in pieces of at most 64 KiB, each made when it is asked for."""
        if self._encoding in ("", "identity"):
            yield data
            return
        if self._stream is None:
            self._stream = zlib.decompressobj(wbits=self._window_bits(data[0]))
        while not self._stream.eof:
            try:
                piece = self._stream.decompress(data, _CHUNK_BYTES)
            except zlib.error:
                raise FetchFailed("The server's answer is not in the encoding that it names.") from None
            data = self._stream.unconsumed_tail
            if piece:
                yield piece
            if not data and len(piece) < _CHUNK_BYTES:
                return

    def finish(self) -> None:
        """The body is over. Raises FetchFailed when it was cut off."""
        if self._stream is not None and not self._stream.eof:
            raise FetchFailed("The server broke off its answer.")

    def _window_bits(self, first_byte: int) -> int:
        """Servers mean two things by "deflate"; the first byte of the one with a header is always of one form."""
        if self._encoding == "gzip":
            return 31
        return 15 if first_byte & 0x0F == 8 else -15
