"""The requests of OpenAI's Decisions API, and of the System One API of other servers."""

from typing import Annotated, Any, Final, Literal, cast

from pydantic import Discriminator, Field, Tag

from apis.wire.base import JsonValue, Phase, Wire
from apis.wire.item_parts import CallId, ItemStatus, text_or_list

MAX_QUESTIONS: Final = 400
MAX_OPTIONS: Final = 255
MAX_ITEMS: Final = 10_000
"""Items of an input, and parts of one content."""
MAX_NAME_CHARS: Final = 256
MAX_IMAGES: Final = 50

_Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
JsonObjects = list[dict[str, JsonValue]] | dict[str, JsonValue]


class DecisionText(Wire):
    type: Literal["input_text"]
    text: str


class DecisionImage(Wire):
    """An image as a data URL, or by its URL."""

    type: Literal["input_image"]
    image_url: str = Field(min_length=1)
    detail: Literal["low", "high", "auto", "original"] | None = None


class DecisionJson(Wire):
    """An object, or a list of objects, that the model reads as JSON."""

    type: Literal["input_json"]
    data: JsonObjects


class DecisionOutputText(Wire):
    type: Literal["output_text"]
    text: str


class DecisionRefusal(Wire):
    type: Literal["refusal"]
    refusal: str


_Parts = Field(max_length=MAX_ITEMS, fail_fast=True)
_AnyPart = Annotated[DecisionText | DecisionImage | DecisionJson, Field(discriminator="type")]
_VisiblePart = Annotated[DecisionText | DecisionImage, Field(discriminator="type")]
_AnswerPart = Annotated[DecisionOutputText | DecisionRefusal, Field(discriminator="type")]
_Text = Annotated[str, Tag("text")]
_Content = Discriminator(text_or_list)
AnyContent = Annotated[_Text | Annotated[list[_AnyPart], _Parts, Tag("list")], _Content]
VisibleContent = Annotated[_Text | Annotated[list[_VisiblePart], _Parts, Tag("list")], _Content]
AnswerContent = Annotated[_Text | Annotated[list[_AnswerPart], _Parts, Tag("list")], _Content]
TextContent = Annotated[_Text | Annotated[list[DecisionText], _Parts, Tag("list")], _Content]


class DecisionUserMessage(Wire):
    type: Literal["message"] = "message"
    role: Literal["user"]
    content: AnyContent


class DecisionDeveloperMessage(Wire):
    type: Literal["message"] = "message"
    role: Literal["developer", "system"]
    content: TextContent


class DecisionAssistantMessage(Wire):
    type: Literal["message"] = "message"
    role: Literal["assistant"]
    content: AnswerContent
    phase: Phase | None = None


class DecisionFunctionCall(Wire):
    type: Literal["function_call"]
    call_id: CallId
    name: _Name
    arguments: str
    namespace: str | None = Field(None, max_length=MAX_NAME_CHARS)
    id: str | None = None
    status: ItemStatus | None = None


class DecisionCustomCall(Wire):
    type: Literal["custom_tool_call"]
    call_id: CallId
    name: _Name
    input: str
    namespace: str | None = Field(None, max_length=MAX_NAME_CHARS)
    id: str | None = None
    status: ItemStatus | None = None


class DecisionOutput(Wire):
    """The output of a call of either kind."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: CallId
    output: VisibleContent
    id: str | None = None
    status: ItemStatus | None = None


def _item_tag(value: Any) -> str | None:
    """Return the type of an item; a message need not have it."""
    if isinstance(value, dict):
        return cast("dict[str, Any]", value).get("type", "message")
    return getattr(value, "type", None)


DecisionMessage = Annotated[
    DecisionUserMessage | DecisionDeveloperMessage | DecisionAssistantMessage,
    Field(discriminator="role"),
]
DecisionItem = Annotated[
    Annotated[DecisionMessage, Tag("message")]
    | Annotated[DecisionFunctionCall, Tag("function_call")]
    | Annotated[DecisionOutput, Tag("function_call_output")]
    | Annotated[DecisionCustomCall, Tag("custom_tool_call")]
    | Annotated[DecisionOutput, Tag("custom_tool_call_output")],
    Discriminator(_item_tag),
]


class PredicateQuestion(Wire):
    """How likely is it that a statement about the input is true?"""

    type: Literal["predicate"]
    instructions: AnyContent
    name: _Name | None = None


class DecisionChoice(Wire):
    value: str | bool
    description: str | None = None


class ChoiceQuestion(Wire):
    """Which of the choices fits the input?"""

    type: Literal["choice"]
    instructions: AnyContent
    choices: list[DecisionChoice] = Field(min_length=2, max_length=MAX_OPTIONS)
    name: _Name | None = None


class DecisionLevel(Wire):
    label: str = Field(min_length=1)
    description: str | None = None


class ScoreQuestion(Wire):
    """At which of the levels, the lowest first, is the input?"""

    type: Literal["score"]
    instructions: AnyContent
    levels: list[DecisionLevel] = Field(min_length=2, max_length=MAX_OPTIONS)
    name: _Name | None = None


Question = Annotated[PredicateQuestion | ChoiceQuestion | ScoreQuestion, Field(discriminator="type")]


class CreateDecision(Wire):
    """The body of POST /v1/decisions."""

    model: str = Field(min_length=1, max_length=256)
    input: Annotated[
        Annotated[str, Tag("text")]
        | Annotated[list[DecisionItem], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True), Tag("list")],
        Discriminator(text_or_list),
    ]
    questions: list[Question] = Field(min_length=1, max_length=MAX_QUESTIONS)
    prompt_cache_key: str | None = None


class NoulQuestion(Wire):
    """How likely is the answer yes? `criteria` may say what `true` and `false` mean."""

    type: Literal["noul"]
    instructions: JsonValue
    criteria: dict[Literal["true", "false"], JsonValue] | None = None


class CriteriaChoiceQuestion(Wire):
    """Which of the options fits the state? `criteria` maps each option to its description, or to null."""

    type: Literal["choice"]
    instructions: JsonValue
    criteria: dict[str, JsonValue] = Field(min_length=2, max_length=MAX_OPTIONS)


class CriteriaScoreQuestion(Wire):
    """At which of the levels, the lowest first, is the state?"""

    type: Literal["score"]
    instructions: JsonValue
    criteria: list[JsonValue] = Field(min_length=2, max_length=MAX_OPTIONS)


SystemOneQuestion = Annotated[
    NoulQuestion | CriteriaChoiceQuestion | CriteriaScoreQuestion, Field(discriminator="type")
]


class CreateSystemOne(Wire):
    """The body of POST /v1/systemone. `images` are data URLs, or the base64 of their bytes."""

    model: str = Field(min_length=1, max_length=256)
    state: JsonValue
    questions: dict[_Name, SystemOneQuestion] = Field(min_length=1, max_length=MAX_QUESTIONS)
    images: list[str] | None = Field(None, max_length=MAX_IMAGES)
