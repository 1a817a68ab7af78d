"""/v1/vaults: credentials for MCP servers and containers, whose secrets are never shown."""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from apis.errors import Unsupported
from apis.vaults.requests import (
    CreateCredential,
    CreateVault,
    CredentialListParams,
    UpdateCredential,
    UpdateVault,
    VaultListParams,
)
from providers.vaults.kv import StoredVaults
from stack.http.answers import list_response
from stack.http.context import HttpContext, Services
from stack.http.request_body import read_model, read_query
from stack.http.route import VAULTS, Route
from stack.http.routes.agent_beta import CREATED, delete_route, object_response, read_route, write_route


def _require_vaults(services: Services) -> StoredVaults:
    """Return the vaults of the server. Raises Unsupported where it keeps none."""
    vaults = services.stack.vaults
    if not isinstance(vaults, StoredVaults):
        raise Unsupported(
            "This server keeps no secrets: its run config has no `vaults.keys`. Add a section `vaults` with "
            "`provider: kv` and `keys`, of which the first encrypts.",
            code="not_configured",
        )
    return vaults


async def create_vault(http: Request, context: HttpContext, services: Services) -> Response:
    request = await read_model(http, services.max_body_bytes, CreateVault)
    return object_response(
        await _require_vaults(services).credentials.create_vault(request, tenant=context.tenant), CREATED
    )


async def list_vaults(http: Request, context: HttpContext, services: Services) -> Response:
    params = read_query(http, VaultListParams)
    page = await _require_vaults(services).credentials.list_vaults(params, tenant=context.tenant)
    return list_response(page.data, has_more=page.has_more)


async def get_vault(http: Request, context: HttpContext, services: Services) -> Response:
    credentials = _require_vaults(services).credentials
    return object_response(await credentials.get_vault(_vault_id(http), tenant=context.tenant))


async def update_vault(http: Request, context: HttpContext, services: Services) -> Response:
    request = await read_model(http, services.max_body_bytes, UpdateVault)
    credentials = _require_vaults(services).credentials
    return object_response(await credentials.update_vault(_vault_id(http), request, tenant=context.tenant))


async def delete_vault(http: Request, context: HttpContext, services: Services) -> Response:
    credentials = _require_vaults(services).credentials
    return object_response(await credentials.delete_vault(_vault_id(http), tenant=context.tenant))


async def create_credential(http: Request, context: HttpContext, services: Services) -> Response:
    request = await read_model(http, services.max_body_bytes, CreateCredential)
    credentials = _require_vaults(services).credentials
    created = await credentials.create_credential(_vault_id(http), request, tenant=context.tenant)
    return object_response(created, CREATED)


async def list_credentials(http: Request, context: HttpContext, services: Services) -> Response:
    params, credentials = read_query(http, CredentialListParams), _require_vaults(services).credentials
    page = await credentials.list_credentials(_vault_id(http), params, tenant=context.tenant)
    return list_response(page.data, has_more=page.has_more)


async def get_credential(http: Request, context: HttpContext, services: Services) -> Response:
    credentials = _require_vaults(services).credentials
    credential = await credentials.get_credential(_vault_id(http), _credential_id(http), tenant=context.tenant)
    return object_response(credential)


async def update_credential(http: Request, context: HttpContext, services: Services) -> Response:
    request = await read_model(http, services.max_body_bytes, UpdateCredential)
    credentials = _require_vaults(services).credentials
    ids = _vault_id(http), _credential_id(http)
    return object_response(await credentials.update_credential(*ids, request, tenant=context.tenant))


async def delete_credential(http: Request, context: HttpContext, services: Services) -> Response:
    credentials = _require_vaults(services).credentials
    deleted = await credentials.delete_credential(_vault_id(http), _credential_id(http), tenant=context.tenant)
    return object_response(deleted)


def _vault_id(http: Request) -> str:
    return http.path_params["vault_id"]


def _credential_id(http: Request) -> str:
    return http.path_params["credential_id"]


_PATH: Final = "/vaults/{vault_id}"
_CREDENTIALS_PATH: Final = f"{_PATH}/credentials"
_CREDENTIAL_PATH: Final = f"{_CREDENTIALS_PATH}/{{credential_id}}"

VAULT_ROUTES: Final[tuple[Route, ...]] = (
    write_route("/vaults", create_vault, CreateVault, VAULTS),
    read_route("/vaults", list_vaults, VaultListParams, VAULTS),
    read_route(_PATH, get_vault, access=VAULTS),
    write_route(_PATH, update_vault, UpdateVault, VAULTS),
    delete_route(_PATH, delete_vault, VAULTS),
    write_route(_CREDENTIALS_PATH, create_credential, CreateCredential, VAULTS),
    read_route(_CREDENTIALS_PATH, list_credentials, CredentialListParams, VAULTS),
    read_route(_CREDENTIAL_PATH, get_credential, access=VAULTS),
    write_route(_CREDENTIAL_PATH, update_credential, UpdateCredential, VAULTS),
    delete_route(_CREDENTIAL_PATH, delete_credential, VAULTS),
)
