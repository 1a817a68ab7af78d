"""Bounds of one fetch."""

from dataclasses import dataclass

from apis.errors import FetchFailed


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
