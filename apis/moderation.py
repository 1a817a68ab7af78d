"""Moderation: how likely texts and images are harmful, by the categories of OpenAI's API."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal, Self, get_args

from pydantic import Discriminator, Field, Tag

from apis.chat import ImagePart, TextPart
from apis.deltas import Usage
from apis.errors import InvalidRequest
from apis.provider import Provider
from apis.wire.base import Wire
from apis.wire.item_parts import text_or_list

MAX_INPUTS: Final = 32
"""Maximum texts of one request, and parts of one input."""
NO_USAGE: Final = Usage()
Category = Literal[
    "harassment",
    "harassment/threatening",
    "hate",
    "hate/threatening",
    "illicit",
    "illicit/violent",
    "self-harm",
    "self-harm/instructions",
    "self-harm/intent",
    "sexual",
    "sexual/minors",
    "violence",
    "violence/graphic",
]
CATEGORIES: Final[tuple[Category, ...]] = get_args(Category)
ContentPart = TextPart | ImagePart


class ModeratedImageUrl(Wire):
    url: str = Field(min_length=1)


class ModeratedImage(Wire):
    """An image by its URL, or as a data URL."""

    type: Literal["image_url"]
    image_url: ModeratedImageUrl


class ModeratedText(Wire):
    type: Literal["text"]
    text: str


ModeratedPart = Annotated[ModeratedText | ModeratedImage, Field(discriminator="type")]


def _entry_tag(value: object) -> str:
    return "text" if isinstance(value, str) else "part"


ModeratedEntry = Annotated[
    Annotated[str, Tag("text")] | Annotated[ModeratedPart, Tag("part")], Discriminator(_entry_tag)
]


class CreateModeration(Wire):
    """The body of POST /v1/moderations: a text, several texts, of which each has its own result, or the parts of one
    input."""

    model: str | None = Field(None, min_length=1, max_length=256)
    input: Annotated[
        Annotated[str, Tag("text")]
        | Annotated[list[ModeratedEntry], Field(min_length=1, max_length=MAX_INPUTS), Tag("list")],
        Discriminator(text_or_list),
    ]

    def list_inputs(self) -> Sequence[Sequence[ContentPart]]:
        """Return the parts of each input."""
        if isinstance(self.input, str):
            return [[TextPart(text=self.input)]]
        parts = [_to_part(entry) for entry in self.input]
        return [[part] for part in parts] if all(isinstance(entry, str) for entry in self.input) else [parts]


def _to_part(entry: str | ModeratedText | ModeratedImage) -> ContentPart:
    if isinstance(entry, str):
        return TextPart(text=entry)
    if isinstance(entry, ModeratedText):
        return TextPart(text=entry.text)
    return ImagePart.model_validate({"image_url": {"url": entry.image_url.url}})


@dataclass(frozen=True, slots=True)
class ModerationScores:
    """The probability of each category for one input, and the categories whose probability is too high. `model` is the
    model that was asked."""

    scores: Mapping[Category, float]
    flagged: frozenset[Category]
    model: str
    has_text: bool = True
    has_images: bool = False
    usage: Usage = NO_USAGE

    @classmethod
    def of_nothing(cls, model: str) -> Self:
        """Return the scores of an input without any content."""
        return cls(dict.fromkeys(CATEGORIES, 0.0), frozenset(), model, has_text=False)

    def joined_with(self, other: "ModerationScores") -> "ModerationScores":
        """Return the scores of both inputs together: of each category the higher one."""
        usage = Usage(
            self.usage.input_tokens + other.usage.input_tokens, self.usage.output_tokens + other.usage.output_tokens
        )
        return ModerationScores(
            {category: max(score, other.scores[category]) for category, score in self.scores.items()},
            self.flagged | other.flagged,
            self.model,
            self.has_text or other.has_text,
            self.has_images or other.has_images,
            usage,
        )

    def to_json(self) -> dict[str, object]:
        """Return the object of OpenAI's API."""
        kinds = [*(["text"] if self.has_text else []), *(["image"] if self.has_images else [])]
        return {
            "flagged": bool(self.flagged),
            "categories": {category: category in self.flagged for category in self.scores},
            "category_scores": {**self.scores},
            "category_applied_input_types": dict.fromkeys(self.scores, kinds),
        }


class OutputBlocked(Exception):
    """Flagged output is blocked: no client may read it, and no telemetry may hold it. It ends the stream of a model."""


class Moderation(Provider, ABC):
    """Judges texts and images. Its answers are probabilities, which are calibrated only as well as its model is."""

    model: str
    """The id of the model that is asked."""
    window_chars: int
    """Characters of an answer that wait until they are judged, where flagged output is blocked."""
    names: frozenset[str]
    """The names by which requests may call for this moderation, `model` among them."""

    def require_name(self, name: str, param: str) -> None:
        """Raise InvalidRequest for a name by which nothing is moderated here; `param` is its field."""
        if name not in self.names:
            listed = ", ".join(sorted(self.names))
            message = f"The moderation model '{name}' is not served here; these are: {listed}."
            raise InvalidRequest(message, param=param, code="model_not_found")

    @abstractmethod
    async def judge(
        self, parts: Sequence[ContentPart], *, param: str = "input", cache_salt: str | None = None
    ) -> ModerationScores:
        """Return the scores of one input; images are data URLs. `param` names the input in errors.

        Raises the errors of `Inference.decide`, and InvalidRequest for an input that is too long.
        """
