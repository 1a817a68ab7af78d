"""/v1/organization/projects/{project_id}/api_keys, and /v1/organization/admin_api_keys."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from starlette.requests import Request
from starlette.responses import Response

from apis.accounts.accounts import ADMIN_TENANT
from apis.accounts.directory import (
    AdminKeyPage,
    CreateAdminKey,
    KeyOptions,
    KeyPage,
    ServiceAccount,
    StoredKey,
    UpdateKey,
)
from apis.errors import NotFound
from apis.storage.pages import Page
from stack.http.answers import deleted_response, value_response
from stack.http.context import HttpContext, Services
from stack.http.request_body import read_model, read_query
from stack.http.route import ADMINISTRATION, Route
from stack.http.routes.organization.objects import JsonObject, admin_key_to_json, key_to_json, require_directory

if TYPE_CHECKING:
    from providers.accounts.directory import StoredDirectory

_KEYS: Final = "/organization/projects/{project_id}/api_keys"
_ADMIN_KEYS: Final = "/organization/admin_api_keys"


async def list_keys(http: Request, _context: HttpContext, services: Services) -> Response:
    directory, query = require_directory(services), read_query(http, KeyPage)
    project_id = http.path_params["project_id"]
    access = await _project_access(directory, project_id)
    if query.owner_project_access not in (None, "any", access):
        return value_response(Page([]))
    page = await directory.list_keys(project_id, query)
    return value_response(Page(await _render_keys(directory, page.data, access), page.has_more))


async def get_key(http: Request, _context: HttpContext, services: Services) -> Response:
    directory, project_id = require_directory(services), http.path_params["project_id"]
    access = await _project_access(directory, project_id)
    key = await directory.get_key(project_id, http.path_params["api_key_id"])
    (rendered,) = await _render_keys(directory, [key], access)
    return value_response(rendered)


async def update_key(http: Request, _context: HttpContext, services: Services) -> Response:
    request = await read_model(http, UpdateKey)
    directory, project_id = require_directory(services), http.path_params["project_id"]
    access = await _project_access(directory, project_id)
    key = await directory.update_key(project_id, http.path_params["api_key_id"], request)
    (rendered,) = await _render_keys(directory, [key], access)
    return value_response(rendered)


async def revoke_key(http: Request, _context: HttpContext, services: Services) -> Response:
    directory, key_id = require_directory(services), http.path_params["api_key_id"]
    project = await directory.get_project(http.path_params["project_id"])
    await directory.revoke_key(project.id, key_id)
    return deleted_response(key_id, "organization.project.api_key.deleted")


async def create_admin_key(http: Request, _context: HttpContext, services: Services) -> Response:
    request = await read_model(http, CreateAdminKey)
    options = KeyOptions(request.name, expires_in_s=request.expires_in_seconds)
    new = await require_directory(services).create_key(None, options)
    return value_response({**admin_key_to_json(new.key, None), "value": new.value})


async def list_admin_keys(http: Request, _context: HttpContext, services: Services) -> Response:
    directory, query = require_directory(services), read_query(http, AdminKeyPage)
    page = await directory.list_keys(ADMIN_TENANT, query, newest_first=query.order == "desc")
    uses = await directory.last_uses(page.data)
    keys = [admin_key_to_json(key, used_at) for key, used_at in zip(page.data, uses, strict=True)]
    return value_response(Page(keys, page.has_more))


async def get_admin_key(http: Request, _context: HttpContext, services: Services) -> Response:
    directory = require_directory(services)
    key = await directory.get_key(ADMIN_TENANT, http.path_params["key_id"])
    (used_at,) = await directory.last_uses([key])
    return value_response(admin_key_to_json(key, used_at))


async def revoke_admin_key(http: Request, _context: HttpContext, services: Services) -> Response:
    key_id = http.path_params["key_id"]
    await require_directory(services).revoke_key(ADMIN_TENANT, key_id)
    return deleted_response(key_id, "organization.admin_api_key.deleted")


KEY_ROUTES: Final = (
    Route("GET", _KEYS, ADMINISTRATION, list_keys, query=KeyPage),
    Route("GET", f"{_KEYS}/{{api_key_id}}", ADMINISTRATION, get_key),
    Route("POST", f"{_KEYS}/{{api_key_id}}", ADMINISTRATION, update_key, body=UpdateKey, stores=False),
    Route("DELETE", f"{_KEYS}/{{api_key_id}}", ADMINISTRATION, revoke_key),
    Route("POST", _ADMIN_KEYS, ADMINISTRATION, create_admin_key, body=CreateAdminKey, stores=False),
    Route("GET", _ADMIN_KEYS, ADMINISTRATION, list_admin_keys, query=AdminKeyPage),
    Route("GET", f"{_ADMIN_KEYS}/{{key_id}}", ADMINISTRATION, get_admin_key),
    Route("DELETE", f"{_ADMIN_KEYS}/{{key_id}}", ADMINISTRATION, revoke_admin_key),
)


async def _project_access(directory: "StoredDirectory", project_id: str) -> str:
    project = await directory.get_project(project_id)
    return "active" if project.archived_at is None else "inactive"


async def _render_keys(directory: "StoredDirectory", keys: Sequence[StoredKey], access: str) -> list[JsonObject]:
    owners: dict[str, ServiceAccount | None] = {}
    for key in keys:
        account_id = key.service_account_id
        if account_id is not None and account_id not in owners:
            try:
                owners[account_id] = await directory.get_service_account(key.project_id, account_id)
            except NotFound:  # deleted a moment ago, and its keys with it
                owners[account_id] = None
    uses = await directory.last_uses(keys)
    return [
        key_to_json(key, owners.get(key.service_account_id or ""), used_at, project_access=access)
        for key, used_at in zip(keys, uses, strict=True)
    ]
