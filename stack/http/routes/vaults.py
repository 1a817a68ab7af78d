"""/v1/vaults: credentials for MCP servers and containers, whose secrets are never shown."""

from typing import Final

from apis.errors import Unsupported
from apis.vaults.requests import (
    CreateCredential,
    CreateVault,
    UpdateCredential,
    UpdateVault,
    VaultListParams,
)
from providers.vaults.kv import StoredVaults
from stack.http.context import Services
from stack.http.route import VAULTS, Route
from stack.http.routes.agent_beta import (
    CREATED,
    delete_route,
    read_route,
    write_route,
)
from stack.http.routes.calls import ApiCalls


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


_PATH: Final = "/vaults/{vault_id}"
_CREDENTIALS_PATH: Final = f"{_PATH}/credentials"
_CREDENTIAL_PATH: Final = f"{_CREDENTIALS_PATH}/{{credential_id}}"

_vaults = ApiCalls(lambda services: _require_vaults(services).credentials)
create_vault = _vaults.calling("create_vault", lambda vaults: vaults.create_vault, CREATED)
list_vaults = _vaults.calling("list_vaults", lambda vaults: vaults.list_vaults)
get_vault = _vaults.calling("get_vault", lambda vaults: vaults.get_vault)
update_vault = _vaults.calling("update_vault", lambda vaults: vaults.update_vault)
delete_vault = _vaults.calling("delete_vault", lambda vaults: vaults.delete_vault)
create_credential = _vaults.calling("create_credential", lambda vaults: vaults.create_credential, CREATED)
list_credentials = _vaults.calling("list_credentials", lambda vaults: vaults.list_credentials)
get_credential = _vaults.calling("get_credential", lambda vaults: vaults.get_credential)
update_credential = _vaults.calling("update_credential", lambda vaults: vaults.update_credential)
delete_credential = _vaults.calling("delete_credential", lambda vaults: vaults.delete_credential)

VAULT_ROUTES: Final[tuple[Route, ...]] = (
    write_route("/vaults", create_vault, CreateVault, VAULTS),
    read_route("/vaults", list_vaults, VaultListParams, VAULTS),
    read_route(_PATH, get_vault, access=VAULTS),
    write_route(_PATH, update_vault, UpdateVault, VAULTS),
    delete_route(_PATH, delete_vault, VAULTS),
    write_route(_CREDENTIALS_PATH, create_credential, CreateCredential, VAULTS),
    read_route(_CREDENTIALS_PATH, list_credentials, VaultListParams, VAULTS),
    read_route(_CREDENTIAL_PATH, get_credential, access=VAULTS),
    write_route(_CREDENTIAL_PATH, update_credential, UpdateCredential, VAULTS),
    delete_route(_CREDENTIAL_PATH, delete_credential, VAULTS),
)
