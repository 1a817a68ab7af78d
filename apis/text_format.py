"""The form that the text of an answer is to have."""

from typing import Annotated, Literal

from pydantic import Field

from apis.inference import JsonObjectFormat, JsonSchema, TextFormat


class JsonSchemaFormat(JsonSchema):
    """The answer is JSON of this schema."""

    type: Literal["json_schema"]


TextFormatOption = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]
