"""Inputs that are one text or several, or one list of a model's own tokens or several."""

from typing import Annotated, Any, cast

from pydantic import Field

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
"""Id of a token in the model's own vocabulary."""


def text_or_tokens_tag(value: Any) -> str:
    """Return the tag of the input's form, so that validation reports the errors of that form only. The tags contain a
    space because they must not equal a key of the input."""
    first = cast("list[Any]", value)[:1] if isinstance(value, list) else None
    if first is None:
        return "a text"
    if first and isinstance(first[0], list):
        return "token lists"
    return "some tokens" if first and type(first[0]) is int else "some texts"
