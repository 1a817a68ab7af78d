"""What a model is told of how long its answer shall be, where it knows no such option itself."""

from collections.abc import Mapping
from typing import Final

VERBOSITY: Final[Mapping[str | None, str]] = {
    "low": "Keep the answer short: say what was asked for and no more.",
    "high": "Make the answer detailed: explain it, with examples where they help.",
}
"""By the request's `verbosity`. At the usual one nothing is told, so that the prompt stays what it is without it."""
