"""Metering: the check of a request, what it reserves under the limits of its key, and the usage with which it ends."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast

from pydantic import BaseModel

from apis.accounts.accounts import Accounts, Caller
from apis.accounts.charges import RELEASED_USE, UNKNOWN_USE, Charge, Demand, Meter, Use
from apis.accounts.project_settings import OPEN_SETTINGS
from apis.accounts.usage import UsageCounts, count_one_request
from apis.agents import MODEL_PREFIX
from apis.chat import ChatRequest
from apis.deltas import Usage
from apis.errors import ModelNotFound, PermissionDenied
from apis.images import CreateImage
from apis.inference import ModelNames
from apis.moderation import CreateModeration
from apis.responses import CreateResponse
from providers.common.demand import build_demand
from providers.common.permissions import find_model, require_request
from stack.build import Stack
from stack.http.request_record import DISCONNECTED_STATUS, RequestRecord

if TYPE_CHECKING:  # its modules are loaded where there are agents
    from providers.agents.kv import StoredAgents

RequestT = TypeVar("RequestT", bound=BaseModel)


class GrantedRequest(NamedTuple, Generic[RequestT]):
    """A request that its caller may send. `resolved` is the request with the fields of its prompt, and `model` has the
    names of its model: what permissions, limits and prices go by. `sent` goes on to its handler."""

    sent: RequestT
    resolved: BaseModel
    model: ModelNames | None


async def grant_request(stack: Stack, caller: Caller, request: RequestT) -> GrantedRequest[RequestT]:
    """Resolve a request and check it: the one place on the way of every request that names a model or tools. One whose
    model is a stored agent goes on with the agent's fields. Raises PermissionDenied, ModelNotFound, and InvalidRequest
    for a prompt that is not there."""
    if stack.agents is not None and (getattr(request, "model", None) or "").startswith(MODEL_PREFIX):
        request = await _resolve_agent(stack.agents, caller, request)
    resolved: BaseModel = request
    if isinstance(request, CreateResponse) and request.prompt is not None:
        resolved = stack.responses.resolve_prompt(request)
    if not (caller.is_restricted or caller.limits) and stack.accounts.organization() is None:
        return GrantedRequest(_apply_settings(caller, request), resolved, None)
    if isinstance(request, CreateImage):
        model = _find_image_model(stack, caller, request)
    elif isinstance(request, CreateModeration):
        model = await _find_moderation_model(stack, caller, request)
    else:
        name = getattr(resolved, "model", None)
        model = await find_model(caller, name, stack.inference) if name else None
    require_request(caller, resolved, model)
    return GrantedRequest(_apply_settings(caller, request), resolved, model)


async def _resolve_agent(agents: "StoredAgents", caller: Caller, request: RequestT) -> RequestT:
    """Return a request whose model is a stored agent with the agent's fields put under its own."""
    if not isinstance(request, CreateResponse | ChatRequest):
        return request
    definitions = await agents.load_definitions()
    if isinstance(request, CreateResponse):
        return cast("RequestT", await definitions.resolve_response(request, tenant=caller.tenant))
    return cast("RequestT", await definitions.resolve_chat(request, tenant=caller.tenant))


def _find_image_model(stack: Stack, caller: Caller, request: CreateImage) -> ModelNames | None:
    """Return the name of the image model of a request; None where only the images server knows it. Raises
    ModelNotFound for a name that the run config does not have, where the caller's models are closed or limited by their
    names."""
    capabilities = stack.image_generator.capabilities if stack.image_generator is not None else None
    default = capabilities.default_model if capabilities is not None else None
    name = request.model or default
    if name is None:
        return None
    if caller.needs_listed_models and capabilities is not None and name not in {default, *capabilities.models}:
        raise ModelNotFound(name, capabilities.models)
    return ModelNames(name, frozenset({name}))


async def _find_moderation_model(stack: Stack, caller: Caller, request: CreateModeration) -> ModelNames | None:
    """Return the names of the model that moderates, by all of which a request may call for it."""
    moderation = stack.moderation
    if moderation is None:
        return None if request.model is None else ModelNames(request.model, frozenset({request.model}))
    names = await find_model(caller, moderation.model, stack.inference)
    return None if names is None else replace(names, names=names.names | moderation.names)


async def open_charge(
    accounts: Accounts, caller: Caller, granted: GrantedRequest[Any], body_bytes: int, *, is_batch: bool = False
) -> Charge | None:
    """Count the request and reserve what it may use under all limits that apply. Returns None where nothing is counted.
    Raises RateLimited, and PermissionDenied for a model without a price under a limit of money."""
    organization = accounts.organization()
    if organization is None:
        return None
    demand = build_demand(granted.resolved, granted.model, body_bytes, is_batch=is_batch)
    return await _open(organization.meter, caller, granted, demand)


async def count_request(
    accounts: Accounts, caller: Caller, granted: GrantedRequest[Any], embedded_bytes: int = 0
) -> Charge | None:
    """Count a request for which no model generates, and the tokens of the text that is embedded for it. Raises as
    `open_charge`."""
    organization = accounts.organization()
    if organization is None:
        return None
    demand = build_demand(granted.resolved, granted.model, embedded_bytes, generates=False)
    charge = await _open(organization.meter, caller, granted, demand)
    charge.end(Use("", UsageCounts(input_tokens=demand.input_tokens)))
    return charge


async def _open(meter: Meter, caller: Caller, granted: GrantedRequest[Any], demand: Demand) -> Charge:
    charge = await meter.open_charge((caller.tenant, caller.key_id), caller.find_limits(granted.model), demand)
    charge.input_tokens = demand.input_tokens
    return charge


def end_charge(charge: Charge | None, record: RequestRecord) -> None:
    """Count what the record of a request says that it has used, unless the response that it created was stored with
    its usage. A failed request gets back what it has reserved. One that was broken off does not, because its model has
    worked: what was streamed until then is counted where it is more."""
    if charge is None:
        return
    if record.tokens is not None:
        counts = count_one_request(record.tokens, record.tool_calls)
        charge.end(Use(record.model, counts, category=record.usage_category, service_tier=record.service_tier))
    elif (record.status >= 400 and record.status != DISCONNECTED_STATUS) or record.outcome == "failed":
        charge.end(RELEASED_USE)
    elif output_tokens := record.estimate_streamed():
        counts = count_one_request(Usage(charge.input_tokens, output_tokens), {})
        charge.end(Use(record.model, counts, uses_reserved=True))
    else:
        charge.end(UNKNOWN_USE)


def _apply_settings(caller: Caller, request: RequestT) -> RequestT:
    """Return the request as the settings of its project have it: with their default tier where it names none, and
    without storing where nothing may be stored. Raises PermissionDenied if it cannot do without."""
    settings = caller.settings
    if settings is OPEN_SETTINGS:
        return request
    fields = type(request).model_fields
    changes: dict[str, object] = {}
    if settings.default_tier != "standard" and getattr(request, "service_tier", None) in (None, "auto"):
        changes["service_tier"] = settings.default_tier
    if settings.stores_nothing:
        for name in ("background", "conversation"):
            if getattr(request, name, None):
                raise PermissionDenied(f"This project stores nothing: '{name}' needs that.", param=name)
        changes["store"] = False
    changes = {name: value for name, value in changes.items() if name in fields}
    return request.model_copy(update=changes) if changes else request
