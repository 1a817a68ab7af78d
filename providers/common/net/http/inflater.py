"""Inflater: decompresses the body of a response in small pieces, so that a short body does not become long at once."""

import asyncio
import zlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Final

INFLATED_ENCODINGS: Final = "gzip, deflate"
"""The encodings that are decompressed, as a value of Accept-Encoding."""
PLAIN_ENCODINGS: Final = frozenset({"", "identity", "none", "utf-8", "utf8"})
"""Content encodings that are none: some servers name the character set in their place."""
PIECE_BYTES: Final = 64 * 1024


class EncodingError(ValueError):
    """A body has an encoding that is not decompressed, or is not in the encoding that its head names."""


class Inflater:
    """Decompresses one body. `holds_more` says that output is left, which the next call returns."""

    __slots__ = ("_data", "_is_gzip", "_stream", "holds_more")

    def __init__(self, encoding: str) -> None:
        self._is_gzip = encoding == "gzip"
        self._data: bytes = b""
        self._stream: zlib._Decompress | None = None  # pyright: ignore[reportPrivateUsage] - the only name of the type
        self.holds_more = False

    def inflate(self, data: bytes = b"") -> bytes:
        """Return output for the bytes held and for `data`, at most PIECE_BYTES. Raises EncodingError."""
        data = self._data + data if self._data else data
        if self._stream is None and data:
            self._stream = zlib.decompressobj(wbits=self._window_bits(data[0]))
        if self._stream is None or self._stream.eof:  # what follows the end is dropped
            return b""
        try:
            piece = self._stream.decompress(data, PIECE_BYTES)
        except zlib.error:
            raise EncodingError("The server's answer is not in the encoding that it names.") from None
        self._data = self._stream.unconsumed_tail
        self.holds_more = not self._stream.eof and (bool(self._data) or len(piece) == PIECE_BYTES)
        return piece

    @property
    def is_cut(self) -> bool:
        """True for a body that has begun and not ended."""
        return self._stream is not None and not self._stream.eof

    def _window_bits(self, first_byte: int) -> int:
        """Servers send "deflate" with or without a zlib header; the low half of a header's first byte is always 8."""
        if self._is_gzip:
            return 31
        return 15 if first_byte & 0x0F == 8 else -15


def inflater_of(header: str) -> Inflater | None:
    """Return what decompresses a body with this `Content-Encoding`; None for a body that is plain. Raises EncodingError
    for an encoding that is not decompressed."""
    encodings = [name for part in header.split(",") if (name := part.strip().lower()) not in PLAIN_ENCODINGS]
    if not encodings:
        return None
    encoding = encodings[0].removeprefix("x-")
    if len(encodings) > 1 or encoding not in ("gzip", "deflate"):
        name = header.strip()[:32].encode("ascii", "replace").decode()
        raise EncodingError(f"The server answered in the encoding '{name}', which was not asked for.")
    return Inflater(encoding)


async def inflate_chunks(chunks: AsyncIterator[bytes], encoding: str) -> AsyncGenerator[bytes]:
    """Yield the decompressed body whose `Content-Encoding` is `encoding`, in pieces that are made on demand; between
    two, the event loop is left to others. Raises EncodingError, also for a compressed body that is cut off."""
    inflater = inflater_of(encoding)
    async for chunk in chunks:
        piece = inflater.inflate(chunk) if inflater is not None else chunk
        while piece:
            yield piece
            await asyncio.sleep(0)
            piece = inflater.inflate() if inflater is not None and inflater.holds_more else b""
    if inflater is not None and inflater.is_cut:
        raise EncodingError("The server broke off its answer.")
