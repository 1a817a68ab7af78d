"""StoredVaults: vaults in a KVStore, encrypted under keys of the run config."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Annotated

from pydantic import Field, SecretStr

from apis.documents.fetcher import Fetcher
from apis.errors import ToolFailed
from apis.storage.kv_store import Delete, KVStore, Op
from apis.vaults.vaults import SecretVariable, TokenUse, Vaults
from providers.common.supervision import supervise
from providers.vaults.auth import normalize_url
from providers.vaults.credentials import StoredCredentials
from providers.vaults.oauth import AccessTokens
from providers.vaults.records import (
    CredentialRecord,
    CredentialRef,
    credential_ref,
    note_key,
    vault_key,
    vault_not_found,
)
from providers.vaults.sealed_records import SealedRecords
from providers.vaults.sealing import SecretSealer


class StoredVaults(Vaults):
    """The vaults of all tenants of a store; `credentials` serves the API of their owners.

    Promises (tests/spec/agents/test_vaults.py):
    - A secret leaves this class for the server that it is for; no answer, error, event or log has it.
    - Who can read and write the store can neither read a secret nor have it sent elsewhere.
    """

    class Config(Vaults.Config):
        """`keys` are secrets of at least 32 characters: the first encrypts, and all decrypt. A tenant may have
        `max_vaults`, of `max_credentials` each. With `allow_http`, secrets are sent to `http://` addresses too, where
        others on the way can read them."""

        keys: tuple[Annotated[SecretStr, Field(min_length=32)], ...] = Field(min_length=1)
        max_vaults: int = Field(default=100, ge=1, le=1000)
        max_credentials: int = Field(default=100, ge=1, le=1000)
        allow_http: bool = False

    def __init__(self, config: Config, kv_store: KVStore, fetcher: Fetcher) -> None:
        self._kv = kv_store
        self._sealer = SecretSealer([key.get_secret_value() for key in config.keys])
        self._records = SealedRecords(kv_store, self._sealer)
        self.credentials = StoredCredentials(
            kv_store,
            self._sealer,
            max_vaults=config.max_vaults,
            max_credentials=config.max_credentials,
            allow_http=config.allow_http,
        )
        self._tokens = AccessTokens(self.credentials, fetcher)
        self._resealing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        if len(self._sealer.key_ids) > 1:
            self._resealing = supervise(
                "the encryption under the first key of `vaults.keys`",
                partial(self._records.reseal, self.credentials.reseal),
            )

    async def close(self) -> None:
        if self._resealing is not None:
            self._resealing.cancel()
            await asyncio.wait({self._resealing})

    async def describe_secrets(self) -> str:
        counts = await self._records.count_by_key()
        first, *others = (f"{key_id} ({counts.pop(key_id, 0)})" for key_id in self._sealer.key_ids)
        line = f"credentials of vaults and confidential records are encrypted under the key {first}"
        line += f"; {', '.join(others)} can still be decrypted" if others else ""
        lost = ", ".join(f"{key_id} ({count})" for key_id, count in sorted(counts.items()))
        return line + (f"; LOST: `vaults.keys` lacks {lost}" if lost else "")

    async def check(self, vault_ids: Sequence[str], *, tenant: str) -> None:
        existing = await self.list_existing(vault_ids, tenant=tenant)
        for index, vault_id in enumerate(vault_ids):
            if vault_id not in existing:
                raise vault_not_found(f"vault_ids[{index}]")

    async def list_existing(self, vault_ids: Sequence[str], *, tenant: str) -> list[str]:
        entries = await self._kv.get_many([vault_key(tenant, vault_id) for vault_id in vault_ids]) if vault_ids else []
        return [vault_id for vault_id, entry in zip(vault_ids, entries, strict=True) if entry is not None]

    def build_put(self, data: bytes, key: str, expect: int | None = None) -> Sequence[Op]:
        return self._records.build_put(data, key, expect)

    def build_delete(self, key: str) -> Sequence[Op]:
        return [Delete(key), Delete(note_key(key))]

    def unseal(self, sealed: bytes, key: str) -> bytes:
        return self._records.unseal(sealed, key)

    async def find_token(self, use: TokenUse, *, tenant: str, refused: str | None = None) -> str | None:
        matching = await self._find_credential(use, tenant)
        return None if matching is None else await self._tokens.find(*matching, refused)

    async def _find_credential(self, use: TokenUse, tenant: str) -> tuple[CredentialRef, CredentialRecord] | None:
        url = normalize_url(use.server_url)
        if use.credential_id is not None:
            for vault_id in use.vault_ids:
                ref = credential_ref(tenant, vault_id, use.credential_id)
                record = await self.credentials.load(ref)
                if record is not None and _is_for(record, url):
                    return ref, record
            raise ToolFailed("No credential of the named vaults has this id and is for this MCP server.")
        matching = [
            (ref, record)
            for vault_id in dict.fromkeys(use.vault_ids)
            for ref, record in await self.credentials.list_stored(vault_id, tenant)
            if _is_for(record, url)
        ]
        if len(matching) > 1:
            raise ToolFailed("Several credentials are for this MCP server: name one of them by `credential_id`.")
        return matching[0] if matching else None

    async def list_variables(self, vault_ids: Sequence[str], *, tenant: str) -> list[SecretVariable]:
        variables: dict[str, SecretVariable] = {}
        for vault_id in vault_ids:
            for ref, record in await self.credentials.list_stored(vault_id, tenant):
                if record.auth.get("type") == "environment_variable":
                    value = self.credentials.unseal(ref, record)["value"]
                    name, hosts = record.auth["secret_name"], record.auth["networking"].get("allowed_hosts")
                    variables.setdefault(name, SecretVariable(name, value, hosts))
        return [*variables.values()]


def _is_for(record: CredentialRecord, url: str) -> bool:
    return normalize_url(record.auth.get("mcp_server_url", "")) == url
