"""Options of a request that are objects of their own: programs, background execution, images, the prompt cache."""

from typing import Literal

from pydantic import Field

from apis.wire.base import Wire
from apis.wire.completion_window import BackgroundWindow


class AccessPrograms(Wire):
    cyber: Literal["standard"] | None = None


class BackgroundOptions(Wire):
    """With another window than `soonest`, the response waits below all other work, and fails when it has not begun by
    the window's end."""

    completion_window: BackgroundWindow | None = None


class ImageOptions(Wire):
    context_compression: Literal["auto", "disabled"] | None = None


class PromptCacheOptions(Wire):
    """With `prewarm` no model is called: the response holds its input for later responses to continue."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m", "12h"] | None = None
    comparison_response_id: str | None = Field(None, max_length=256)
    prewarm: bool | None = None
