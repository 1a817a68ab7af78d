"""RunOwners: the callers for whom background responses are executed, and charges that no request has opened."""

from functools import partial
from typing import Final

from apis.accounts.accounts import Accounts, Caller
from apis.accounts.charges import RELEASED_USE, count_aside
from apis.errors import KeyRevoked
from apis.inference import Inference
from apis.storage.kv_store import Put
from apis.storage.records import encode_record
from providers.common.demand import build_demand
from providers.common.moderated_inference import CountUse
from providers.common.permissions import find_model
from providers.responses.background.runs import ClaimedRun
from providers.responses.background.stored_run import parse_stored_request

_KEY_REVOKED_MESSAGE: Final = (
    "The API key that created this response was revoked or has expired, or its project was archived, before the "
    "response was done."
)


class RunOwners:
    """The callers of one stack, who use the models of one Inference."""

    def __init__(self, accounts: Accounts, inference: Inference, retention_s: float) -> None:
        """The request of a run is stored for `retention_s` after the end of its window."""
        self._accounts = accounts
        self._inference = inference
        self._retention_s = retention_s

    async def find(self, claimed_run: ClaimedRun) -> Caller:
        """Return the caller that created the response. Raises KeyRevoked."""
        caller = await self._accounts.find_owner(claimed_run.ref.tenant, claimed_run.stored_request.key_id)
        if caller is None:
            raise KeyRevoked(_KEY_REVOKED_MESSAGE)
        return caller

    def find_counter(self, claimed_run: ClaimedRun) -> CountUse | None:
        """Return the function that counts what a response uses besides its own turns; None where nothing is counted."""
        charge, organization = claimed_run.stored_request.charge, self._accounts.organization()
        if organization is None or charge is None:
            return None
        return partial(count_aside, organization.meter, charge)

    async def open_charge(self, claimed_run: ClaimedRun) -> None:
        """Count a response that was queued by itself, and reserve what it may use, unless that has been done. Raises
        RateLimited, PermissionDenied, KeyRevoked and LeaseLost."""
        ref, stored_request, organization = claimed_run.ref, claimed_run.stored_request, self._accounts.organization()
        if not stored_request.is_uncharged or organization is None:
            return
        caller = await self.find(claimed_run)
        request = parse_stored_request(stored_request, ref.id)
        model = await find_model(caller, request.model, self._inference)
        demand = build_demand(request, model, len(stored_request.request))
        charge = await organization.meter.open_charge((ref.tenant, caller.key_id), caller.find_limits(model), demand)
        stored_request.charge, stored_request.is_uncharged = charge.record, False
        put = Put(ref.request_key, encode_record(stored_request), self._retention_s + request.window_s)
        try:
            await claimed_run.lease.write([put, *charge.adopt_ops(ref.run_key)])
        except BaseException:
            charge.end(RELEASED_USE)
            raise
        charge.confirm_adoption()
