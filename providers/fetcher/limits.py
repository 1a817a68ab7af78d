"""What one fetch may take."""

from dataclasses import dataclass

from apis.errors import FetchFailed


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """`deadline` by the loop's clock, `timeout_s` after the fetch began; `read_timeout_s` between two reads;
    `raw_bytes` of a body as it is sent, `inflated_bytes` as it is read."""

    deadline: float
    timeout_s: float
    read_timeout_s: float
    raw_bytes: int
    inflated_bytes: int


def too_large_error(max_bytes: int) -> FetchFailed:
    return FetchFailed(f"The answer is larger than {max_bytes} bytes.")
