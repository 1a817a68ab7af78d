"""Below /v1/organization/projects/{project_id}: model, hosted tool and service tier permissions, and data retention."""

from dataclasses import replace
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from apis.accounts.project_settings import (
    HOSTED_TOOLS,
    OPEN_SETTINGS,
    ProjectSettings,
    UpdateDataRetention,
    UpdateHostedToolPermissions,
    UpdateModelPermissions,
    UpdateServiceTierSettings,
)
from stack.http.answers import value_response
from stack.http.context import HttpContext, Services
from stack.http.request_body import read_model
from stack.http.route import ADMINISTRATION, Route
from stack.http.routes.organization.objects import JsonObject, require_organization

_PROJECT: Final = "/organization/projects/{project_id}"
_MODELS: Final = f"{_PROJECT}/model_permissions"
_TOOLS: Final = f"{_PROJECT}/hosted_tool_permissions"
_TIERS: Final = f"{_PROJECT}/service_tier_settings"
_RETENTION: Final = f"{_PROJECT}/data_retention"


async def get_model_permissions(http: Request, _context: HttpContext, services: Services) -> Response:
    return value_response(_models_to_json(await _load_settings(http, services)))


async def update_model_permissions(http: Request, _context: HttpContext, services: Services) -> Response:
    request = await read_model(http, UpdateModelPermissions)
    models = tuple(dict.fromkeys(request.model_ids))
    requested = {"model_permissions": {"mode": request.mode, "model_ids": models}}
    settings = await _set_fields(http, services, {"model_mode": request.mode, "model_ids": models}, requested)
    return value_response(_models_to_json(settings))


async def delete_model_permissions(http: Request, _context: HttpContext, services: Services) -> Response:
    fields = {"model_mode": OPEN_SETTINGS.model_mode, "model_ids": OPEN_SETTINGS.model_ids}
    await _set_fields(http, services, fields, {"model_permissions": None})
    return value_response({"object": "project.model_permissions.deleted", "deleted": True})


async def get_hosted_tool_permissions(http: Request, _context: HttpContext, services: Services) -> Response:
    return value_response(_tools_to_json(await _load_settings(http, services)))


async def update_hosted_tool_permissions(http: Request, _context: HttpContext, services: Services) -> Response:
    request = await read_model(http, UpdateHostedToolPermissions)
    requested = request.model_dump(exclude_none=True)

    def change(settings: ProjectSettings) -> ProjectSettings:
        disabled = {name for name, permission in requested.items() if not permission["enabled"]}
        disabled |= set(settings.disabled_tools) - requested.keys()
        return replace(settings, disabled_tools=tuple(name for name in HOSTED_TOOLS if name in disabled))

    settings = await require_organization(services).settings.change_settings(
        http.path_params["project_id"], change, {"hosted_tool_permissions": requested}
    )
    return value_response(_tools_to_json(settings))


async def get_service_tier_settings(http: Request, _context: HttpContext, services: Services) -> Response:
    return value_response(_tiers_to_json(await _load_settings(http, services)))


async def update_service_tier_settings(http: Request, _context: HttpContext, services: Services) -> Response:
    request = await read_model(http, UpdateServiceTierSettings)
    changes: JsonObject = {}
    if request.default is not None:
        changes["default_tier"] = request.default
    if request.enabled_tiers is not None:
        changes["enabled_tiers"] = None if request.enabled_tiers == "all" else tuple(request.enabled_tiers)
    requested = {"service_tier_settings": request.model_dump(exclude_none=True)}
    return value_response(_tiers_to_json(await _set_fields(http, services, changes, requested)))


async def get_data_retention(http: Request, _context: HttpContext, services: Services) -> Response:
    return value_response(_retention_to_json(await _load_settings(http, services)))


async def update_data_retention(http: Request, _context: HttpContext, services: Services) -> Response:
    request = await read_model(http, UpdateDataRetention)
    changes = request.model_dump()
    settings = await _set_fields(http, services, changes, {"data_retention": changes})
    return value_response(_retention_to_json(settings))


PERMISSION_ROUTES: Final = (
    Route("GET", _MODELS, ADMINISTRATION, get_model_permissions),
    Route("POST", _MODELS, ADMINISTRATION, update_model_permissions, body=UpdateModelPermissions, stores=False),
    Route("DELETE", _MODELS, ADMINISTRATION, delete_model_permissions),
    Route("GET", _TOOLS, ADMINISTRATION, get_hosted_tool_permissions),
    Route(
        "POST", _TOOLS, ADMINISTRATION, update_hosted_tool_permissions, body=UpdateHostedToolPermissions, stores=False
    ),
    Route("GET", _TIERS, ADMINISTRATION, get_service_tier_settings),
    Route("POST", _TIERS, ADMINISTRATION, update_service_tier_settings, body=UpdateServiceTierSettings, stores=False),
    Route("GET", _RETENTION, ADMINISTRATION, get_data_retention),
    Route("POST", _RETENTION, ADMINISTRATION, update_data_retention, body=UpdateDataRetention, stores=False),
)


async def _set_fields(http: Request, services: Services, fields: JsonObject, requested: JsonObject) -> ProjectSettings:
    """Set fields of the project's settings, and return the settings."""

    def change(settings: ProjectSettings) -> ProjectSettings:
        return replace(settings, **fields)

    return await require_organization(services).settings.change_settings(
        http.path_params["project_id"], change, requested
    )


async def _load_settings(http: Request, services: Services) -> ProjectSettings:
    return await require_organization(services).settings.get_settings(http.path_params["project_id"])


def _models_to_json(settings: ProjectSettings) -> JsonObject:
    """Return a `project.model_permissions`. A project without any may use every model: its list of denied ones is
    empty."""
    return {"object": "project.model_permissions", "mode": settings.model_mode, "model_ids": settings.model_ids}


def _tools_to_json(settings: ProjectSettings) -> JsonObject:
    permissions = {name: {"enabled": name not in settings.disabled_tools} for name in HOSTED_TOOLS}
    return {"object": "project.hosted_tool_permissions", **permissions}


def _tiers_to_json(settings: ProjectSettings) -> JsonObject:
    tiers = "all" if settings.enabled_tiers is None else settings.enabled_tiers
    return {"object": "project.service_tier_settings", "default": settings.default_tier, "enabled_tiers": tiers}


def _retention_to_json(settings: ProjectSettings) -> JsonObject:
    """Return a `project.data_retention`. `retention_days` is an extension."""
    days = settings.retention_days
    return {"object": "project.data_retention", "type": settings.retention_type, "retention_days": days}
