"""Content of Harmony's system message that a deployment configures. Separate from the renderer, which needs more
packages."""

from datetime import date
from typing import Literal

from pydantic import BaseModel, ConfigDict

from apis.wire.base import Effort


class HarmonyOptions(BaseModel):
    """Settings of the system message. `today` is the day in UTC; `none` and null omit a line."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    current_date: Literal["today", "none"] | date = "today"
    identity: str | None = "You are ChatGPT, a large language model trained by OpenAI."
    knowledge_cutoff: str | None = "2024-06"
    reasoning_effort: Effort = "medium"
