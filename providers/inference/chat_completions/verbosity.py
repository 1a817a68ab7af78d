"""Instructions about the length of the output, for models that have no such option."""

from collections.abc import Mapping
from typing import Final

VERBOSITY: Final[Mapping[str | None, str]] = {
    "low": "Keep the answer short: say what was asked for and no more.",
    "high": "Make the answer detailed: explain it, with examples where they help.",
}
"""Line of instructions by the request's `verbosity`. The default adds none, so that the prompt stays unchanged."""
