"""Permissions: what a caller may ask of models and tools, checked on the request as it will run.

The HTTP edge asks before a request is counted under limits, and the preparation of a response again, as its last step
before the run: with the tools that its prompt, its chain or its conversation has added.
"""

from collections.abc import Iterable, Iterator
from typing import Final, cast

from pydantic import BaseModel

from apis.accounts.accounts import Caller
from apis.accounts.scopes import VAULT_USERS
from apis.errors import ModelNotFound, PermissionDenied
from apis.inference import Inference, ModelNames

_ITEM_FIELDS: Final = ("input", "items")
"""Fields whose items may load tools."""


async def find_model(caller: Caller, model: str | None, inference: Inference) -> ModelNames | None:
    """Return the names of the model of a request; None where it names none. Raises ModelNotFound for a name that no
    list has, where the caller's models are closed or limited by their names; and UpstreamError."""
    if not model:
        return None
    names = await inference.find_names(model)
    if not names.is_listed and caller.needs_listed_models:
        listed = {each.id for each in await inference.models()}
        if listed.isdisjoint(names.names):
            raise ModelNotFound(model, listed)
    return names


def require_request(caller: Caller, request: BaseModel, model: ModelNames | None) -> None:
    """Raise PermissionDenied if the caller's key or project is bound to other models or tools than the request has,
    or the project to other service tiers, or if the key may not use vaults. `model` has the names of the request's
    model."""
    if getattr(request, "vault_ids", None) and not caller.grant.scopes & VAULT_USERS:
        raise PermissionDenied("This key may not use vaults: its scopes have no api.vaults.read.", param="vault_ids")
    if not caller.is_restricted:
        return
    fields = type(request).model_fields
    if "model" in fields:
        caller.require_model(model)
        caller.settings.require_model(model)
    if "service_tier" in fields:
        caller.settings.require_tier(getattr(request, "service_tier", None))
    require_tools(caller, _declared_tools(getattr(request, "tools", None), ""))
    for name in _ITEM_FIELDS:
        items: object = getattr(request, name, None)
        if isinstance(items, list):
            require_tools(caller, _tools_of_items(cast("list[object]", items), name))


async def require_prepared(caller: Caller, request: BaseModel, items: Iterable[object], inference: Inference) -> None:
    """Check a request as it will run: its prompt is rendered, and `items` are its whole conversation. Raises as
    `require_request` and `find_model`."""
    if not caller.is_restricted:
        return
    require_request(caller, request, await find_model(caller, getattr(request, "model", None), inference))
    require_tools(caller, ((tool, "input") for tool, _ in _tools_of_items(items, "input")))


def require_tools(caller: Caller, tools: Iterable[tuple[object, str]]) -> None:
    """Raise PermissionDenied for the first of the tools that the caller may not use; each comes with its place in the
    request."""
    if caller.grant.tools is None and not caller.settings.disabled_tools:
        return
    for tool, param in tools:
        tool_type = getattr(tool, "type", None)
        if isinstance(tool_type, str):
            caller.require_tool(tool_type, param)
            environment = getattr(tool, "environment", None)
            caller.settings.require_tool(tool_type, getattr(environment, "type", None), param)


def _declared_tools(tools: object, prefix: str) -> Iterator[tuple[object, str]]:
    """Yield the tools of a request, or those that one of its items loads, with their places."""
    if isinstance(tools, list):
        for index, tool in enumerate(cast("list[object]", tools)):
            yield tool, f"{prefix}tools[{index}]"


def _tools_of_items(items: Iterable[object], field: str) -> Iterator[tuple[object, str]]:
    for index, item in enumerate(items):
        tools: object = vars(item).get("tools")  # getattr costs a microsecond for each of many items without it
        if tools is not None:
            yield from _declared_tools(tools, f"{field}[{index}].")
