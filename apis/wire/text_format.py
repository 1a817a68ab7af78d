"""The forms that the text of an answer, or the input of a custom tool, may have."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from apis.wire.base import JsonValue, Wire


class Grammar(Wire):
    syntax: Literal["lark", "regex"]
    definition: str = Field(min_length=1)


class TextFormatInput(Wire):
    type: Literal["text"] = "text"


class TextFormat(Wire):
    type: Literal["text"] = "text"


class JsonObjectFormat(Wire):
    type: Literal["json_object"] = "json_object"


class JsonSchema(Wire):
    model_config = ConfigDict(populate_by_name=True)

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    schema_: dict[str, JsonValue] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(JsonSchema):
    """The answer is JSON of this schema."""

    type: Literal["json_schema"]


TextFormatOption = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]
