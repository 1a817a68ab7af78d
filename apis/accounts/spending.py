"""SpendLimits: how much money a project, or all projects together, may spend in a month of the clock (UTC)."""

from abc import ABC, abstractmethod
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


class SpendLimits(ABC):
    """The limits of spending, in the store. `project_id` is None for the limit of all projects together.

    Every method raises NotFound for a project that does not exist, and StoreUnavailable.
    """

    @abstractmethod
    async def get(self, project_id: str | None) -> SpendLimit:
        """Return the limit. Raises NotFound where none is set."""

    @abstractmethod
    async def set(self, project_id: str | None, cost: int) -> SpendLimit:
        """Set the limit in NANOS of the currency; it holds everywhere within MAX_KEY_AGE_S, and counts what was spent
        since the month began. Requests that are in progress meanwhile are counted when they end only if another limit
        applies to them."""

    @abstractmethod
    async def delete(self, project_id: str | None) -> None:
        """Remove the limit. Raises NotFound where none is set."""
