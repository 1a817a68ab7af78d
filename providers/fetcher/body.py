"""Bounds of one fetch, and decompression of response bodies in small pieces within them."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from apis.errors import FetchFailed

ACCEPTED_ENCODINGS: Final = "gzip, deflate"
_CHUNK_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """`deadline` is on the event loop's clock, `timeout_s` seconds after the fetch began. `read_timeout_s` bounds the
    silence between two reads, `raw_bytes` a body as sent, `inflated_bytes` a body after decompression."""

    deadline: float
    timeout_s: float
    read_timeout_s: float
    raw_bytes: int
    inflated_bytes: int

    def timeout_error(self) -> FetchFailed:
        return FetchFailed(f"The server did not answer in time ({self.timeout_s:g} s in all).")


def too_large_error(max_bytes: int) -> FetchFailed:
    return FetchFailed(f"The answer is larger than {max_bytes} bytes.")


class Inflater:
    """Decompresses the body of one `Content-Encoding`. Raises FetchFailed for an encoding outside
    `ACCEPTED_ENCODINGS`, and for a body that is not in its encoding."""

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding.strip().lower().removeprefix("x-")
        if self._encoding not in ("", "identity", "gzip", "deflate"):
            raise FetchFailed("The server answered in an encoding that was not asked for.")
        self._stream: zlib._Decompress | None = None  # pyright: ignore[reportPrivateUsage] - the only name of the type

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the output for `data`, which is not empty, in chunks of at most 64 KiB, each produced on demand."""
        if self._encoding in ("", "identity"):
            yield data
            return
        if self._stream is None:
            self._stream = zlib.decompressobj(wbits=self._window_bits(data[0]))
        while not self._stream.eof:
            try:
                chunk = self._stream.decompress(data, _CHUNK_BYTES)
            except zlib.error:
                raise FetchFailed("The server's answer is not in the encoding that it names.") from None
            data = self._stream.unconsumed_tail
            if chunk:
                yield chunk
            if not data and len(chunk) < _CHUNK_BYTES:
                return

    def finish(self) -> None:
        """Mark the end of the body. Raises FetchFailed when the compressed stream is incomplete."""
        if self._stream is not None and not self._stream.eof:
            raise FetchFailed("The server broke off its answer.")

    def _window_bits(self, first_byte: int) -> int:
        """Servers send "deflate" with or without a zlib header; the low half of a header's first byte is always 8."""
        if self._encoding == "gzip":
            return 31
        return 15 if first_byte & 0x0F == 8 else -15
