"""The base of all request models, the fields that several requests share, and the JSON of the SDK's own models."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
Includable = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


Phase = Literal["commentary", "final_answer"]


class Wire(BaseModel):
    """A part of a request. It is strict, so a number in quotes is not a number, and it drops unknown fields."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, defer_build=True)


def sdk_model_to_json(model: BaseModel) -> bytes:
    """Return a model of the SDK as the API writes it: without the fields that were never set."""
    serializer: Any = model.__pydantic_serializer__  # model_dump_json() would decode the bytes to text
    return serializer.to_json(model, by_alias=True, exclude_unset=True)
