"""StoredPrompt: one prompt as the operator writes it in YAML, in the run config or in a file of its own."""

from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, model_validator

from apis.responses import ReasoningOptions, TextOptions
from apis.wire.tool_choice import ToolChoice
from apis.wire.tools import Tool
from providers.responses.prompts.template_text import TemplateText, parse_template_text

DEFAULT_FIELDS: Final = (
    *("model", "tools", "tool_choice", "parallel_tool_calls", "text", "reasoning"),
    *("temperature", "top_p", "max_output_tokens"),
)
"""Fields of a version that apply to a request without them."""


def _to_text(value: object) -> object:
    """Return a number as text: YAML reads a version such as 2 as a number."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


VersionName = Annotated[str, BeforeValidator(_to_text), Field(min_length=1, max_length=256)]
PromptId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,256}$")]


class PromptMessage(BaseModel):
    """A message at the beginning of the input; its text may hold variables."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: Literal["user", "assistant", "system", "developer"]
    content: str = Field(min_length=1)

    _text: TemplateText = PrivateAttr()

    @model_validator(mode="after")
    def _parse(self) -> Self:
        self._text = parse_template_text(self.content)
        return self

    @property
    def text(self) -> TemplateText:
        """The content, parsed."""
        return self._text


class PromptVersion(BaseModel):
    """One version of a prompt. `instructions` hold for the response only; `messages` begin its input and are stored
    with it, so that the responses that follow it see them. The other fields are defaults of the request's own."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    instructions: str | None = None
    messages: list[PromptMessage] = Field(default_factory=list[PromptMessage], max_length=1000)
    model: str | None = Field(None, min_length=1, max_length=256, pattern=r"^[^\x00-\x20\x7f]+$")
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    max_output_tokens: int | None = Field(None, ge=16, le=2**31 - 1)

    _instructions_text: TemplateText | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _parse(self) -> Self:
        if not self.instructions and not self.messages:
            raise ValueError("holds neither instructions nor messages: write at least one of them.")
        if self.instructions:
            self._instructions_text = parse_template_text(self.instructions)
        return self

    @property
    def instructions_text(self) -> TemplateText | None:
        """The instructions, parsed; None without any."""
        return self._instructions_text

    @property
    def variables(self) -> frozenset[str]:
        """The names of all variables in the instructions and messages."""
        texts = [message.text for message in self.messages]
        return frozenset[str]().union(*(text.names for text in [*texts, *filter(None, [self._instructions_text])]))


class StoredPrompt(BaseModel):
    """A prompt with its versions, by name. `default_version` may be absent where there is one version only."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    versions: dict[VersionName, PromptVersion] = Field(min_length=1)
    default_version: VersionName | None = None

    @model_validator(mode="after")
    def _check_default(self) -> Self:
        if self.default_version is None and len(self.versions) > 1:
            raise ValueError(f"needs default_version: one of {', '.join(self.versions)}.")
        if self.default_version is not None and self.default_version not in self.versions:
            raise ValueError(f"has a default_version that is none of its versions: {', '.join(self.versions)}.")
        return self

    @property
    def default(self) -> str:
        """The name of the version that requests without one get."""
        return self.default_version or next(iter(self.versions))


class PromptFile(StoredPrompt):
    """A prompt in a file of its own, whose name without its ending is the id unless the file has one."""

    id: PromptId | None = None
