"""Prices: the cost of tokens by model, in integers, so that sums are exact."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pydantic import BaseModel, ConfigDict, Field

from apis.accounts.charges import ChargeEnd, Demand
from apis.accounts.limits import NANOS
from apis.accounts.usage import UsageCounts

_PRICED_TOKENS: Final = 1_000_000
"""Tokens that a price in the run config is for."""


class ModelPrice(BaseModel):
    """The price of a million tokens in the currency: `cached` are input tokens that an engine had in its cache, by
    default as dear as the others."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    input: float = Field(ge=0, le=1_000_000)
    output: float = Field(ge=0, le=1_000_000)
    cached: float | None = Field(default=None, ge=0, le=1_000_000)


@dataclass(frozen=True, slots=True)
class Prices:
    """The prices by model; models without one cost nothing."""

    by_model: Mapping[str, ModelPrice]

    def cost_of(self, model: str, counts: UsageCounts) -> int:
        """Return the cost of the tokens in NANOS of the currency, rounded down."""
        price = self.by_model.get(model)
        if price is None:
            return 0
        cached = price.input if price.cached is None else price.cached
        return (
            _to_nanos(price.input) * (counts.input_tokens - counts.cached_tokens)
            + _to_nanos(cached) * counts.cached_tokens
            + _to_nanos(price.output) * counts.output_tokens
        ) // _PRICED_TOKENS

    def cost_of_end(self, end: ChargeEnd) -> int:
        """Return the cost with which a charge ended."""
        return self.cost_of(end.record.priced_as or end.subject.model, end.counts)

    def estimate(self, demand: Demand) -> int:
        """Return the cost of what a request may use, in NANOS of the currency."""
        name = self.find_name(demand) or demand.model
        return self.cost_of(name, UsageCounts(1, demand.input_tokens, 0, demand.output_tokens))

    def find_name(self, demand: Demand) -> str | None:
        """Return the name of the model that has a price; None if none of its names has one."""
        names = (demand.model, *demand.model_aliases)
        return next((name for name in names if name in self.by_model), None)


def _to_nanos(price: float) -> int:
    return round(price * NANOS)
