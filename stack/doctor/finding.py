"""A finding of `stack doctor`."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check. The message of a warning or a failure ends with its remedy. A warning is for what a
    stack can do without."""

    check: str
    status: Status
    message: str
