"""Vaults: the secrets of tenants, as those who send them to servers ask for them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from apis.errors import Unsupported
from apis.provider import Provider
from apis.storage.kv_store import Op


@dataclass(frozen=True, slots=True)
class TokenUse:
    """The MCP server that a token is for, among the credentials of these vaults. `server_url` is `connector:NAME` for a
    connector of the run config. With `credential_id`, it is the token of that credential."""

    vault_ids: Sequence[str]
    server_url: str
    credential_id: str | None = None


@dataclass(frozen=True, slots=True)
class SecretVariable:
    """A secret for the environment variable `name` of containers. It is sent to these hosts alone; None stands for each
    host that the network of the container names."""

    name: str
    value: str = field(repr=False)
    hosts: Sequence[str] | None


class Vaults(Provider, ABC):
    """Secrets of tenants. Implementations never show one to a client, log or record, and send one to the server that it
    is for and to no other. Another tenant's vault is an unknown one. What was changed or deleted counts for the next
    use."""

    @abstractmethod
    async def check(self, vault_ids: Sequence[str], *, tenant: str) -> None:
        """Raise AgentNotFound for the first of the vaults that the tenant does not have, with its place in
        `vault_ids`."""

    @abstractmethod
    async def list_existing(self, vault_ids: Sequence[str], *, tenant: str) -> list[str]:
        """Return those of the vaults that the tenant still has."""

    @abstractmethod
    def build_put(self, data: bytes, key: str, expect: int | None = None) -> Sequence[Op]:
        """Return the operations that store the data of a record, encrypted: the value under its key begins with a zero
        byte. Where the keys of the run config change, it is encrypted again."""

    @abstractmethod
    def build_delete(self, key: str) -> Sequence[Op]:
        """Return the operations that delete an encrypted record."""

    @abstractmethod
    def unseal(self, sealed: bytes, key: str) -> bytes:
        """Return the data of the record with this key from its encrypted value. Raises StorageCorrupt where its key is
        no more in the run config, or it is not as it was written."""

    @abstractmethod
    async def find_token(self, use: TokenUse, *, tenant: str, refused: str | None = None) -> str | None:
        """Return the token for a server, None where no credential is for it. With `refused`, the token that the server
        has refused, return another one, and None where there is none. Raises ToolFailed where several credentials are
        for the server, or where the one that is cannot be used."""

    @abstractmethod
    async def list_variables(self, vault_ids: Sequence[str], *, tenant: str) -> list[SecretVariable]:
        """Return the secrets for containers. Of several with one name, the first counts. Raises ToolFailed where one
        cannot be used."""


async def check_vaults(vaults: Vaults | None, vault_ids: Sequence[str] | None, *, tenant: str) -> None:
    """Raise AgentNotFound for the first of the vaults of a request that the tenant does not have, and Unsupported where
    the server has none."""
    if not vault_ids:
        return
    if vaults is None:
        raise Unsupported(
            "This server keeps no secrets: its run config has no `vaults.keys`.",
            param="vault_ids",
            code="not_configured",
        )
    await vaults.check(vault_ids, tenant=tenant)
