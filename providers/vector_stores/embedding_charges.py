"""Charges of files that are made searchable: their tokens count under the limits of their tenant, and in its usage."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from apis.accounts.accounts import Accounts
from apis.accounts.charges import RELEASED_USE, Charge, Demand, Use
from apis.accounts.usage import count_one_request
from apis.deltas import Usage
from apis.documents.reader import UnreadableFile
from apis.errors import ModelNotFound, PermissionDenied, QuotaExceeded
from apis.inference import Inference
from providers.common.permissions import find_model

_BYTES_PER_TOKEN: Final = 4


@dataclass(slots=True)
class EmbeddedTokens:
    """The tokens of a file that have been embedded."""

    count: int = 0


@asynccontextmanager
async def charging_embeddings(
    accounts: Accounts | None, inference: Inference, tenant: str, model_name: str, text_bytes: int
) -> AsyncGenerator[EmbeddedTokens]:
    """Count the embedding of a file as one request of its tenant, with the tokens that are embedded within the context.

    Raises RateLimited for a limit that allows it later, and UnreadableFile for one that does not.
    """
    charge, embedded = await _open_charge(accounts, inference, tenant, model_name, text_bytes), EmbeddedTokens()
    try:
        yield embedded
    finally:
        if charge is not None:
            use = Use(model_name, count_one_request(Usage(embedded.count), {}), category="embeddings")
            charge.end(use if embedded.count else RELEASED_USE)


async def _open_charge(
    accounts: Accounts | None, inference: Inference, tenant: str, model_name: str, text_bytes: int
) -> Charge | None:
    organization = None if accounts is None else accounts.organization()
    if accounts is None or organization is None:
        return None
    caller = await accounts.find_owner(tenant, "")
    if caller is None:
        raise UnreadableFile("server_error", "The project of the file was archived.")
    try:
        model = await find_model(caller, model_name, inference)
        assert model is not None  # it is named
        demand = Demand(model.name, text_bytes // _BYTES_PER_TOKEN, model_aliases=model.aliases)
        return await organization.meter.open_charge((tenant, ""), caller.find_limits(model), demand)
    except (ModelNotFound, PermissionDenied, QuotaExceeded) as exc:
        raise UnreadableFile("server_error", exc.message) from exc
