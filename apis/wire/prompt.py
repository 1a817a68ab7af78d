"""The reference of a request to a prompt: a template that the operator has written, and the values of its variables."""

from typing import Annotated, Any, cast

from pydantic import Discriminator, Field, Tag

from apis.wire.base import Wire
from apis.wire.item_parts import InputFile, InputImage, InputText


def _value_tag(value: Any) -> str | None:
    """Return the tag of a variable's form. That of a text contains a space because it must not equal a key."""
    if isinstance(value, str):
        return "a text"
    kind = cast("dict[str, Any]", value).get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if isinstance(kind, str) else None


PromptValue = Annotated[
    Annotated[str, Tag("a text")]
    | Annotated[InputText, Tag("input_text")]
    | Annotated[InputImage, Tag("input_image")]
    | Annotated[InputFile, Tag("input_file")],
    Discriminator(_value_tag),
]


class PromptReference(Wire):
    """A prompt by its id. Without `version` it is the prompt's default version; the response names the one used."""

    id: str = Field(min_length=1, max_length=256)
    version: str | None = Field(None, min_length=1, max_length=256)
    variables: dict[str, PromptValue] | None = Field(None, max_length=256)
