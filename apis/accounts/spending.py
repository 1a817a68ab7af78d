"""Spend limits: how much money a project, or all projects together, may spend in a month of the clock (UTC)."""

from dataclasses import dataclass
from typing import Final, Literal

from pydantic import Field

from apis.wire.base import Wire

MAX_CENTS: Final = 10**12


@dataclass(frozen=True, slots=True)
class SpendLimit:
    """The most that may be spent in a month, and what is spent or reserved, both in NANOS of the currency."""

    cost: int
    spent: int

    @property
    def is_enforcing(self) -> bool:
        """True if requests are refused because the limit has been reached."""
        return self.spent >= self.cost


class UpdateSpendLimit(Wire):
    """Body that sets a limit; `threshold_amount` is in cents."""

    currency: str = Field(pattern=r"^[A-Z]{3}$")
    interval: Literal["month"]
    threshold_amount: int = Field(ge=0, le=MAX_CENTS)
