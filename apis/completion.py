"""CompletionRequest, the prompts that a model continues; CompletionDelta, a piece that it yields."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from pydantic import Discriminator, Field, Tag

from apis.chat import Sampling
from apis.deltas import Usage
from apis.wire.text_or_tokens import TokenId, text_or_tokens_tag

MAX_COMPLETIONS: Final = 128
"""Completions of one request: its prompts, each `n` times."""


TokenList = Annotated[list[TokenId], Field(min_length=1)]
CompletionPrompt = Annotated[
    Annotated[str, Tag("a text")]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_COMPLETIONS), Tag("some texts")]
    | Annotated[TokenList, Tag("some tokens")]
    | Annotated[list[TokenList], Field(min_length=1, max_length=MAX_COMPLETIONS), Tag("token lists")],
    Discriminator(text_or_tokens_tag),
]


class CompletionRequest(Sampling):
    """Prompts to continue: texts, or ids of the model's own tokens, which are sent to the model without any template.
    Without `max_tokens` the engine decides, usually 16. With `echo` each completion begins with its prompt."""

    model: str = Field(min_length=1, max_length=256)
    prompt: CompletionPrompt
    max_tokens: int | None = Field(None, ge=0, le=2**31 - 1)
    n: int | None = Field(None, ge=1, le=MAX_COMPLETIONS)
    echo: bool | None = None  # pyright: ignore[reportIncompatibleVariableOverride] - frozen, so never written
    suffix: str | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1)

    @property
    def prompt_count(self) -> int:
        """The number of prompts."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return 1
        return len(self.prompt)

    @property
    def completion_count(self) -> int:
        """The number of completions that the request asks for."""
        return self.prompt_count * (self.n or 1)


@dataclass(frozen=True, slots=True)
class CompletionLogprobs:
    """The tokens of a piece with their natural-log probabilities, the likeliest alternatives of each, and where each
    begins in the text. The first token of an echoed prompt has None for a probability and alternatives."""

    tokens: Sequence[str]
    token_logprobs: Sequence[float | None]
    top_logprobs: Sequence[Mapping[str, float] | None]
    text_offset: Sequence[int]


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """A piece of one completion. `index` counts the completions of the first prompt, then those of the second, and so
    on; the last piece of each has a `finish_reason`."""

    index: int
    text: str
    finish_reason: Literal["stop", "length", "content_filter"] | None = None
    logprobs: CompletionLogprobs | None = None


CompletionBatch = Sequence[CompletionDelta | Usage]
"""Pieces that became ready together. The usage of the whole request is the last of the stream, where it is known."""
