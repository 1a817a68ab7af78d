"""Content of Harmony's system message that a deployment configures. Separate from the renderer, which needs more
packages."""

from collections.abc import Mapping
from datetime import date
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict

from apis.wire.base import Effort

EFFORTS: Final[Mapping[Effort, Effort]] = {
    "none": "low",
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}
"""The effort that Harmony has for each of the API's."""


class HarmonyOptions(BaseModel):
    """Settings of the system message. `today` is the day in UTC; `none` and null omit a line."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    current_date: Literal["today", "none"] | date = "today"
    identity: str | None = "You are ChatGPT, a large language model trained by OpenAI."
    knowledge_cutoff: str | None = "2024-06"
    reasoning_effort: Effort = "medium"

    def used_effort(self, requested: Effort | None) -> Effort:
        """Return the effort that the model is shown, one of the three that Harmony has."""
        return EFFORTS[requested or self.reasoning_effort]
