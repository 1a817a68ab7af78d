"""/v1/organization/projects and their service accounts."""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from apis.accounts.directory import (
    AccountPage,
    CreateProject,
    CreateServiceAccount,
    CreateServiceAccountKey,
    KeyOptions,
    ProjectPage,
    UpdateProject,
    UpdateServiceAccount,
)
from apis.errors import InvalidRequest
from stack.http.answers import deleted_response, list_response, value_response
from stack.http.context import HttpContext, Services
from stack.http.request_body import read_model, read_query
from stack.http.route import ADMINISTRATION, Route
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


async def list_projects(http: Request, _context: HttpContext, services: Services) -> Response:
    page = await require_directory(services).list_projects(read_query(http, ProjectPage))
    return list_response([project_to_json(project) for project in page.data], has_more=page.has_more)


async def get_project(http: Request, _context: HttpContext, services: Services) -> Response:
    return value_response(project_to_json(await require_directory(services).get_project(_project_id(http))))


async def update_project(http: Request, _context: HttpContext, services: Services) -> Response:
    request = await read_model(http, UpdateProject)
    project = await require_directory(services).rename_project(_project_id(http), request.name)
    return value_response(project_to_json(project))


async def archive_project(http: Request, _context: HttpContext, services: Services) -> Response:
    return value_response(project_to_json(await require_directory(services).archive_project(_project_id(http))))


async def create_service_account(http: Request, _context: HttpContext, services: Services) -> Response:
    request = await read_model(http, CreateServiceAccount)
    without_key = bool(request.create_service_account_only)
    if without_key and request.expires_in_seconds is not None:
        raise InvalidRequest("An account without a key has nothing that expires.", param="expires_in_seconds")
    directory, role = require_directory(services), "none" if without_key else "member"
    account = await directory.create_service_account(_project_id(http), request.name, role=role)
    fields = {**service_account_to_json(account), "api_key": None}
    if not without_key:
        options = KeyOptions("Secret Key", expires_in_s=request.expires_in_seconds)
        fields["api_key"] = new_key_to_json(await directory.create_key(account, options))
    return value_response(fields)


async def list_service_accounts(http: Request, _context: HttpContext, services: Services) -> Response:
    query = read_query(http, AccountPage)
    page = await require_directory(services).list_service_accounts(_project_id(http), query)
    return list_response([service_account_to_json(account) for account in page.data], has_more=page.has_more)


async def get_service_account(http: Request, _context: HttpContext, services: Services) -> Response:
    account = await require_directory(services).get_service_account(_project_id(http), _account_id(http))
    return value_response(service_account_to_json(account))


async def update_service_account(http: Request, _context: HttpContext, services: Services) -> Response:
    request = await read_model(http, UpdateServiceAccount)
    directory = require_directory(services)
    account = await directory.rename_service_account(_project_id(http), _account_id(http), request.name)
    return value_response(service_account_to_json(account))


async def delete_service_account(http: Request, _context: HttpContext, services: Services) -> Response:
    await require_directory(services).delete_service_account(_project_id(http), _account_id(http))
    return deleted_response(_account_id(http), "organization.project.service_account.deleted")


async def create_service_account_key(http: Request, _context: HttpContext, services: Services) -> Response:
    request = await read_model(http, CreateServiceAccountKey)
    directory = require_directory(services)
    account = await directory.get_service_account(_project_id(http), _account_id(http))
    options = KeyOptions(request.name or "Secret Key", request.scopes, request.expires_in_seconds)
    return value_response(new_key_to_json(await directory.create_key(account, options)))


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


def _project_id(http: Request) -> str:
    return http.path_params["project_id"]


def _account_id(http: Request) -> str:
    return http.path_params["service_account_id"]
