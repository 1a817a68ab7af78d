"""The JSON of projects, accounts and keys, as the SDK's types in `openai.types.admin.organization` read it.

Importing these types would cost every start a tenth of a second, so the objects are built by hand and the tests compare
them with the SDK's types.
"""

from typing import TYPE_CHECKING, Any

from apis.accounts.directory import NewKey, Project, ServiceAccount, StoredKey
from apis.errors import Unsupported
from stack.http.context import Services

if TYPE_CHECKING:
    from providers.accounts.directory import StoredDirectory
    from providers.accounts.organization import StoredOrganization

JsonObject = dict[str, Any]


def require_organization(services: Services) -> "StoredOrganization":
    """Return what is kept of projects and keys. Raises Unsupported where they are those of the run config."""
    organization = services.stack.organization
    if organization is None:
        raise Unsupported(
            "Projects and keys are those of the run config here: set `accounts: {provider: stored}` to manage them.",
            code="not_configured",
        )
    return organization


def require_directory(services: Services) -> "StoredDirectory":
    """Return the directory of projects and keys. Raises as `require_organization`."""
    return require_organization(services).directory


def project_to_json(project: Project) -> JsonObject:
    """Return an `organization.project`."""
    return {
        "id": project.id,
        "object": "organization.project",
        "name": project.name,
        "created_at": project.created_at,
        "archived_at": project.archived_at,
        "status": "active" if project.archived_at is None else "archived",
    }


def service_account_to_json(account: ServiceAccount) -> JsonObject:
    """Return an `organization.project.service_account`."""
    return {
        "id": account.id,
        "object": "organization.project.service_account",
        "name": account.name,
        "role": account.role,
        "created_at": account.created_at,
    }


def new_key_to_json(new: NewKey) -> JsonObject:
    """Return an `organization.project.service_account.api_key`, the one object with the key's own text."""
    return {
        "id": new.key.id,
        "object": "organization.project.service_account.api_key",
        "name": new.key.name,
        "value": new.value,
        "created_at": new.key.created_at,
        "expires_at": new.key.expires_at,
    }


def key_to_json(
    key: StoredKey, owner: ServiceAccount | None, last_used_at: int | None, *, project_access: str
) -> JsonObject:
    """Return an `organization.project.api_key`. `scopes` is an extension."""
    account = None
    if owner is not None:
        account = {"id": owner.id, "name": owner.name, "role": owner.role, "created_at": owner.created_at}
    return {
        "id": key.id,
        "object": "organization.project.api_key",
        "name": key.name,
        "redacted_value": key.redacted_value,
        "created_at": key.created_at,
        "last_used_at": last_used_at,
        "expires_at": key.expires_at,
        "owner": {"type": "service_account", "service_account": account},
        "owner_project_access": project_access,
        "scopes": [*key.scopes],
    }


def admin_key_to_json(key: StoredKey, last_used_at: int | None) -> JsonObject:
    """Return an `organization.admin_api_key`. There are no users here: the owner is the organization's operator."""
    return {
        "id": key.id,
        "object": "organization.admin_api_key",
        "name": key.name,
        "redacted_value": key.redacted_value,
        "created_at": key.created_at,
        "last_used_at": last_used_at,
        "expires_at": key.expires_at,
        "owner": {"type": "user", "object": "organization.user", "name": "operator", "role": "owner"},
    }
