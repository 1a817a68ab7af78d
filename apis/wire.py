"""Wire: how every part of a request is read."""

from pydantic import BaseModel, ConfigDict


class Wire(BaseModel):
    """Strict: a number in quotes is not a number. Fields we do not know are dropped."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
