"""Secrets of vaults for containers: which of them go to which hosts of a container's network."""

from collections.abc import Collection, Sequence

from apis.errors import InvalidRequest, ToolFailed
from apis.vaults.vaults import SecretVariable, Vaults
from apis.wire.tools import DomainSecret, NetworkAllowlist
from providers.common.secret_spellings import MAX_SECRET_VALUES, MAX_SECRETS_BYTES


async def add_variables(
    policy: NetworkAllowlist, vaults: Vaults, vault_ids: Sequence[str], *, tenant: str, taken: Collection[str] = ()
) -> NetworkAllowlist:
    """Return the network of a container with the secrets of vaults for its hosts. A secret of the network itself, or a
    variable that is `taken`, goes before one of its name. Raises InvalidRequest, which names `vault_ids`, where one
    cannot be used, or where they are too long together."""
    try:
        variables = await vaults.list_variables(vault_ids, tenant=tenant)
    except ToolFailed as exc:
        raise InvalidRequest(exc.message, param="vault_ids") from exc
    secrets = [*(policy.domain_secrets or ())]
    names = {secret.name for secret in secrets}.union(taken)
    secrets += [
        DomainSecret(domain=host, name=variable.name, value=variable.value)
        for variable in variables
        if variable.name not in names
        for host in _pick_hosts(variable, policy.allowed_domains)
    ]
    if sum(len(secret.value) for secret in secrets) > MAX_SECRETS_BYTES:
        message = f"The secrets of a container have at most {MAX_SECRETS_BYTES} characters, counted for each host."
        raise InvalidRequest(message, param="vault_ids")
    if len({secret.value for secret in secrets}) > MAX_SECRET_VALUES:
        message = f"The secrets of a container have at most {MAX_SECRET_VALUES} different values."
        raise InvalidRequest(message, param="vault_ids")
    return policy.model_copy(update={"domain_secrets": secrets or None})


def _pick_hosts(variable: SecretVariable, domains: Sequence[str]) -> list[str]:
    """Return the hosts of a variable that the network of a container permits. `*.` begins a domain with all hosts below
    it, of which only those are known that the variable names."""
    named = [domain.lower() for domain in domains]
    if variable.hosts is None:
        return [domain for domain in named if not domain.startswith("*.")]
    wide = tuple(domain[1:] for domain in named if domain.startswith("*."))
    return [host for host in variable.hosts if host in named or host.endswith(wide)]
