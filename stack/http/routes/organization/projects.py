"""/v1/organization/projects and their service accounts."""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from apis.accounts.directory import (
    CreateProject,
    CreateServiceAccount,
    CreateServiceAccountKey,
    KeyOptions,
    ProjectPage,
    UpdateProject,
    UpdateServiceAccount,
)
from apis.accounts.requests import AccountPage
from apis.errors import InvalidRequest
from stack.http.answers import value_response
from stack.http.context import HttpContext, Services
from stack.http.request_body import read_model
from stack.http.route import ADMINISTRATION, Route
from stack.http.routes.calls import ApiCalls
from stack.http.routes.organization.objects import (
    new_key_to_json,
    project_to_json,
    require_directory,
    service_account_to_json,
)

_PROJECT: Final = "/organization/projects/{project_id}"
_ACCOUNT: Final = f"{_PROJECT}/service_accounts/{{service_account_id}}"


async def create_project(http: Request, _context: HttpContext, services: Services) -> Response:
    request = await read_model(http, CreateProject)
    return value_response(project_to_json(await require_directory(services).create_project(request.name)))


async def update_project(http: Request, _context: HttpContext, services: Services) -> Response:
    request = await read_model(http, UpdateProject)
    project = await require_directory(services).rename_project(http.path_params["project_id"], request.name)
    return value_response(project_to_json(project))


async def create_service_account(http: Request, _context: HttpContext, services: Services) -> Response:
    request = await read_model(http, CreateServiceAccount)
    without_key = bool(request.create_service_account_only)
    if without_key and request.expires_in_seconds is not None:
        raise InvalidRequest("An account without a key has nothing that expires.", param="expires_in_seconds")
    directory, role = require_directory(services), "none" if without_key else "member"
    account = await directory.create_service_account(http.path_params["project_id"], request.name, role=role)
    fields = {**service_account_to_json(account), "api_key": None}
    if not without_key:
        options = KeyOptions("Secret Key", expires_in_s=request.expires_in_seconds)
        fields["api_key"] = new_key_to_json(await directory.create_key(account, options))
    return value_response(fields)


async def update_service_account(http: Request, _context: HttpContext, services: Services) -> Response:
    request = await read_model(http, UpdateServiceAccount)
    directory = require_directory(services)
    account = await directory.rename_service_account(
        http.path_params["project_id"], http.path_params["service_account_id"], request.name
    )
    return value_response(service_account_to_json(account))


async def create_service_account_key(http: Request, _context: HttpContext, services: Services) -> Response:
    request = await read_model(http, CreateServiceAccountKey)
    directory = require_directory(services)
    account = await directory.get_service_account(
        http.path_params["project_id"], http.path_params["service_account_id"]
    )
    options = KeyOptions(request.name or "Secret Key", request.scopes, request.expires_in_seconds)
    return value_response(new_key_to_json(await directory.create_key(account, options)))


_projects = ApiCalls(require_directory, project_to_json, of_tenants=False)
list_projects = _projects.calling("list_projects", lambda directory: directory.list_projects)
get_project = _projects.calling("get_project", lambda directory: directory.get_project)
archive_project = _projects.calling("archive_project", lambda directory: directory.archive_project)
_accounts = ApiCalls(require_directory, service_account_to_json, of_tenants=False)
list_service_accounts = _accounts.calling("list_service_accounts", lambda directory: directory.list_service_accounts)
get_service_account = _accounts.calling("get_service_account", lambda directory: directory.get_service_account)
delete_service_account = _accounts.deleting(
    "delete_service_account",
    lambda directory: directory.delete_service_account,
    "organization.project.service_account.deleted",
)

PROJECT_ROUTES: Final = (
    Route("POST", "/organization/projects", ADMINISTRATION, create_project, body=CreateProject, stores=False),
    Route("GET", "/organization/projects", ADMINISTRATION, list_projects, query=ProjectPage),
    Route("GET", _PROJECT, ADMINISTRATION, get_project),
    Route("POST", _PROJECT, ADMINISTRATION, update_project, body=UpdateProject, stores=False),
    Route("POST", f"{_PROJECT}/archive", ADMINISTRATION, archive_project, stores=False),
    Route(
        "POST",
        f"{_PROJECT}/service_accounts",
        ADMINISTRATION,
        create_service_account,
        body=CreateServiceAccount,
        stores=False,
    ),
    Route("GET", f"{_PROJECT}/service_accounts", ADMINISTRATION, list_service_accounts, query=AccountPage),
    Route("GET", _ACCOUNT, ADMINISTRATION, get_service_account),
    Route("POST", _ACCOUNT, ADMINISTRATION, update_service_account, body=UpdateServiceAccount, stores=False),
    Route("DELETE", _ACCOUNT, ADMINISTRATION, delete_service_account),
    Route(
        "POST",
        f"{_ACCOUNT}/api_keys",
        ADMINISTRATION,
        create_service_account_key,
        body=CreateServiceAccountKey,
        stores=False,
    ),
)
