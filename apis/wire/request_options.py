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


class ModerationPolicyMode(Wire):
    """`score` only reports; `block` keeps flagged content from the model, or from everybody who reads the response."""

    mode: Literal["score", "block"]


class ModerationPolicy(Wire):
    input: ModerationPolicyMode | None = None
    output: ModerationPolicyMode | None = None


class ModerationOptions(Wire):
    """Input and output are judged by a moderation model. Without a policy they are only scored."""

    model: str = Field(min_length=1, max_length=256)
    policy: ModerationPolicy | None = None

    @property
    def blocks_input(self) -> bool:
        return bool(self.policy and self.policy.input and self.policy.input.mode == "block")

    @property
    def blocks_output(self) -> bool:
        return bool(self.policy and self.policy.output and self.policy.output.mode == "block")


class PromptCacheOptions(Wire):
    """With `prewarm` no model is called: the response holds its input for later responses to continue."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m", "12h"] | None = None
    comparison_response_id: str | None = Field(None, max_length=256)
    prewarm: bool | None = None
