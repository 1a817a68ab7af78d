"""The records of vaults in the KVStore, and their keys.

TENANT/vault/VAULT                        a vault
TENANT/vault_credential/VAULT/CREDENTIAL  a credential, whose secrets are encrypted
/vault_sealed/KEY                         the id of the key under which the record KEY is encrypted: a credential, or
                                          one of another part of the server
/vault_renewal/TENANT/CREDENTIAL          held by the process that requests a new access token
"""

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from apis.errors import AgentNotFound
from apis.storage.keys import record_id

Json = dict[str, Any]
SEALED_PREFIX: Final = "/vault_sealed/"


class VaultRecord(msgspec.Struct):
    """A vault; its time is in seconds of Unix time."""

    name: str | None
    metadata: dict[str, str]
    created_at: int


class SealedSecrets(msgspec.Struct, frozen=True):
    """Encrypted secrets, and what decrypts them: the id of the key, the salt and the nonce."""

    key_id: str
    salt: bytes
    nonce: bytes
    data: bytes


class CredentialRecord(msgspec.Struct):
    """A credential. `auth` is the part of it that is shown; its secrets cannot be decrypted with another one."""

    name: str
    metadata: dict[str, str]
    auth: Json
    sealed: SealedSecrets
    created_at: int
    updated_at: int


@dataclass(frozen=True, slots=True)
class CredentialRef:
    """A credential by its tenant, its vault and its id."""

    tenant: str
    vault_id: str
    id: str

    @property
    def key(self) -> str:
        return credential_prefix(self.tenant, self.vault_id) + self.id

    @property
    def renewal_key(self) -> str:
        return f"/vault_renewal/{self.tenant}/{self.id}"


def vault_key(tenant: str, vault_id: str) -> str:
    return f"{tenant}/vault/{vault_id and record_id(vault_id)}"


def credential_prefix(tenant: str, vault_id: str) -> str:
    """Return the beginning of the keys of a vault's credentials."""
    return f"{tenant}/vault_credential/{record_id(vault_id)}/"


def note_key(key: str) -> str:
    """Return the key of the note that says under which key of the run config a record is encrypted."""
    return f"{SEALED_PREFIX}{key}"


def parse_credential_key(key: str) -> CredentialRef | None:
    """Return the credential with this key; None for the key of another record."""
    tenant, _, rest = key.partition("/vault_credential/")
    vault_id, _, credential_id = rest.partition("/")
    return CredentialRef(tenant, vault_id, credential_id) if credential_id else None


def credential_ref(tenant: str, vault_id: str, credential_id: str) -> CredentialRef:
    """Return the credential of ids that a client has sent."""
    return CredentialRef(tenant, record_id(vault_id), record_id(credential_id))


def show_vault(vault_id: str, record: VaultRecord) -> Json:
    """Return a vault as the API shows it."""
    return {
        "id": vault_id,
        "object": "vault",
        "name": record.name,
        "metadata": record.metadata,
        "created_at": record.created_at,
    }


def show_credential(ref: CredentialRef, record: CredentialRecord) -> Json:
    """Return a credential as the API shows it."""
    return {
        "id": ref.id,
        "object": "vault.credential",
        "vault_id": ref.vault_id,
        "name": record.name,
        "metadata": record.metadata,
        "auth": record.auth,
        "created_at": record.created_at,
        "updated_at": record.updated_at,
    }


def vault_not_found(param: str = "vault_id") -> AgentNotFound:
    """Return the error of an id that no vault of the tenant has."""
    return AgentNotFound("No vault has this id.", param=param)


def credential_not_found(param: str = "credential_id") -> AgentNotFound:
    """Return the error of an id that no credential of the vault has."""
    return AgentNotFound("No credential of this vault has this id.", param=param)
