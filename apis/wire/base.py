"""Wire: how every part of a request is read, and what several requests have."""

from typing import Annotated, Literal

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
    """Strict: a number in quotes is not a number. Fields we do not know are dropped."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, defer_build=True)
