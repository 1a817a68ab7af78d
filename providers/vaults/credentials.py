"""StoredCredentials: the vaults of tenants and their credentials in the KVStore."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from apis.errors import InvalidRequest, ToolFailed
from apis.storage.keys import new_id_key
from apis.storage.kv_store import ABSENT, Delete, KVStore, Op, Put
from apis.storage.pages import Page
from apis.storage.records import decode_record, delete_all, encode_record
from apis.vaults.requests import (
    CreateCredential,
    CreateVault,
    UpdateCredential,
    UpdateVault,
    VaultListParams,
)
from providers.common.state.change import change, change_existing, write_prepared
from providers.common.state.scan import read_page, report_damaged, scan_records, skipping_damaged
from providers.common.state.tenant_records import TenantRecords
from providers.vaults.auth import rotate_auth, split_auth
from providers.vaults.records import (
    CredentialRecord,
    CredentialRef,
    Json,
    VaultRecord,
    credential_not_found,
    credential_prefix,
    credential_ref,
    note_key,
    show_credential,
    show_vault,
    vault_key,
    vault_not_found,
)
from providers.vaults.sealing import Secrets, SecretSealer, UnsealFailed


class StoredCredentials:
    """The vaults of one store, of which a tenant may have `max_vaults` with `max_credentials` each. With `allow_http`,
    secrets are sent to `http://` too."""

    def __init__(
        self, kv: KVStore, sealer: SecretSealer, *, max_vaults: int, max_credentials: int, allow_http: bool
    ) -> None:
        self.kv = kv
        self._sealer = sealer
        self._max_vaults = max_vaults
        self._max_credentials = max_credentials
        self._allow_http = allow_http
        self._vaults = TenantRecords(kv, "vault", VaultRecord, lambda _: vault_not_found())

    async def create_vault(self, request: CreateVault, *, tenant: str) -> Json:
        """Create a vault. Raises InvalidRequest if the tenant has as many as it may."""
        await self.kv.require_room(tenant)
        vault_id, record = f"vault_{new_id_key()}", VaultRecord(request.name, request.metadata or {}, int(time.time()))
        await self._vaults.create(tenant, vault_id, record, self._max_vaults, self._build_error)
        return show_vault(vault_id, record)

    async def get_vault(self, vault_id: str, *, tenant: str) -> Json:
        """Return the vault. Raises AgentNotFound."""
        return show_vault(vault_id, await self._vaults.load(tenant, vault_id))

    async def list_vaults(self, params: VaultListParams, *, tenant: str) -> Page[Json]:
        """Return a page of vaults; a filtered one may have fewer than there are, and then names the last one that was
        looked at. Raises AgentNotFound for an unknown cursor."""
        return await self._vaults.list(tenant, params, show_vault, _build_filter(params))

    async def update_vault(self, vault_id: str, request: UpdateVault, *, tenant: str) -> Json:
        """Change the fields that the request has, and return the vault. Raises AgentNotFound."""

        def edit(record: VaultRecord) -> VaultRecord:
            if "name" in request.model_fields_set:
                record.name = request.name
            if "metadata" in request.model_fields_set:
                record.metadata = request.metadata or {}
            return record

        return show_vault(vault_id, await self._vaults.change(tenant, vault_id, edit))

    async def delete_vault(self, vault_id: str, *, tenant: str) -> Json:
        """Delete a vault with its credentials; one that is damaged, too. Raises AgentNotFound."""

        async def prepare() -> Sequence[Op]:
            entry = await self._vaults.get(tenant, vault_id)
            await delete_all(self.kv, credential_prefix(tenant, vault_id), durable=True)
            await delete_all(self.kv, note_key(credential_prefix(tenant, vault_id)))
            # a credential that came meanwhile has changed the version
            return await self._vaults.build_delete_ops(tenant, vault_id, entry)

        await write_prepared(self.kv, prepare)
        return {"id": vault_id, "object": "vault.deleted", "deleted": True}

    async def create_credential(self, vault_id: str, request: CreateCredential, *, tenant: str) -> Json:
        """Create a credential. Raises AgentNotFound for an unknown vault, and InvalidRequest for one that is full."""
        await self.kv.require_room(tenant)
        visible, secret_fields = split_auth(request.auth, allow_http=self._allow_http)
        ref, now = credential_ref(tenant, vault_id, f"vcred_{new_id_key()}"), int(time.time())
        sealed = self._sealer.seal(secret_fields, ref, visible)
        record = CredentialRecord(request.name, request.metadata or {}, visible, sealed, now, now)

        async def prepare() -> Sequence[Op]:
            vault = await self._vaults.get(tenant, vault_id)
            rows = await self.kv.scan(credential_prefix(tenant, vault_id), limit=self._max_credentials)
            if len(rows) >= self._max_credentials:
                raise InvalidRequest(
                    f"A vault has at most {self._max_credentials} credentials (`vaults.max_credentials`)."
                )
            return [Put(vault_key(tenant, vault_id), vault.value, None, vault.version), *self._put_ops(ref, record)]

        await write_prepared(self.kv, prepare)
        return show_credential(ref, record)

    async def get_credential(self, vault_id: str, credential_id: str, *, tenant: str) -> Json:
        """Return the credential. Raises AgentNotFound."""
        ref = credential_ref(tenant, vault_id, credential_id)
        record = await self.load(ref)
        if record is None:
            raise credential_not_found()
        return show_credential(ref, record)

    async def list_credentials(self, vault_id: str, params: VaultListParams, *, tenant: str) -> Page[Json]:
        """Return a page of credentials, as `list_vaults` does. Raises AgentNotFound, also for an unknown cursor."""
        await self._vaults.load(tenant, vault_id)

        def show(credential_id: str, record: CredentialRecord) -> Json:
            return show_credential(CredentialRef(tenant, vault_id, credential_id), record)

        prefix, unknown_cursor = credential_prefix(tenant, vault_id), credential_not_found("after")
        return await read_page(self.kv, prefix, CredentialRecord, params, unknown_cursor, show, _build_filter(params))

    async def update_credential(
        self, vault_id: str, credential_id: str, request: UpdateCredential, *, tenant: str
    ) -> Json:
        """Change the fields that the request has, and return the credential. Raises AgentNotFound, and InvalidRequest
        for fields of another type."""
        ref = credential_ref(tenant, vault_id, credential_id)

        def edit(record: CredentialRecord) -> CredentialRecord:
            if request.auth is not None:
                record.auth, secret_fields = rotate_auth(request.auth, record.auth, self._unseal_stored(ref, record))
                record.sealed = self._sealer.seal(secret_fields, ref, record.auth)
            if "metadata" in request.model_fields_set:
                record.metadata = request.metadata or {}
            record.updated_at = int(time.time())
            return record

        not_found, also = credential_not_found(), partial(_sealed_ops, ref)
        record = await change_existing(self.kv, ref.key, CredentialRecord, edit, not_found, also=also)
        return show_credential(ref, record)

    async def delete_credential(self, vault_id: str, credential_id: str, *, tenant: str) -> Json:
        """Delete the credential. Raises AgentNotFound."""
        ref = credential_ref(tenant, vault_id, credential_id)
        if await self.kv.get(ref.key) is None:
            raise credential_not_found()
        await self.kv.write([Delete(ref.key), Delete(note_key(ref.key))])
        return {"id": credential_id, "object": "vault.credential.deleted", "deleted": True}

    async def load(self, ref: CredentialRef) -> CredentialRecord | None:
        """Return the credential, None where there is none."""
        entry = await self.kv.get(ref.key)
        return None if entry is None else decode_record(entry, CredentialRecord)

    async def list_stored(self, vault_id: str, tenant: str) -> list[tuple[CredentialRef, CredentialRecord]]:
        """Return the readable credentials of a vault, oldest first."""
        prefix = credential_prefix(tenant, vault_id)
        rows = scan_records(self.kv, prefix, CredentialRecord)
        return [(CredentialRef(tenant, vault_id, row.key.removeprefix(prefix)), row.record) async for row in rows]

    def unseal(self, ref: CredentialRef, record: CredentialRecord) -> Secrets:
        """Return the secrets of a credential. Raises ToolFailed, and reports it to the operator, where they cannot be
        decrypted."""
        try:
            return self._sealer.unseal(record.sealed, ref, record.auth)
        except UnsealFailed as exc:
            report_damaged(self.kv, ref.key, CredentialRecord.__name__, exc)
            raise ToolFailed(f"The credential {ref.id} cannot be decrypted: {exc}.") from None

    def _unseal_stored(self, ref: CredentialRef, record: CredentialRecord) -> Secrets:
        try:
            return self.unseal(ref, record)
        except ToolFailed as exc:
            raise InvalidRequest(f"{exc.message} Delete it and create another one.", param="credential_id") from None

    async def put_secrets(self, ref: CredentialRef, before: CredentialRecord, auth: Json, secrets: Secrets) -> bool:
        """Store other secrets of a credential, unless it has others than `before` by now; return whether they are."""

        def edit(record: CredentialRecord | None) -> CredentialRecord | None:
            if record is None or record.sealed != before.sealed:
                return None
            record.auth, record.sealed = auth, self._sealer.seal(secrets, ref, auth)
            return record

        changed = await change(self.kv, ref.key, CredentialRecord, edit, also=partial(_sealed_ops, ref))
        return changed is not None

    async def reseal(self, ref: CredentialRef) -> bool:
        """Encrypt a credential under the first key; return whether it is one, and can be decrypted."""
        with suppress(ToolFailed), skipping_damaged(self.kv, ref.key, CredentialRecord.__name__):
            record = await self.load(ref)
            return record is not None and await self.put_secrets(ref, record, record.auth, self.unseal(ref, record))
        return False

    def _put_ops(self, ref: CredentialRef, record: CredentialRecord) -> list[Op]:
        return [Put(ref.key, encode_record(record), None, ABSENT), *_sealed_ops(ref, record)]

    def _build_error(self, _count: int) -> InvalidRequest:
        return InvalidRequest(f"A project has at most {self._max_vaults} vaults (`vaults.max_vaults`).")


def _sealed_ops(ref: CredentialRef, record: CredentialRecord) -> Sequence[Op]:
    return (Put(note_key(ref.key), record.sealed.key_id.encode()),)


def _build_filter(params: VaultListParams) -> Callable[[VaultRecord | CredentialRecord], bool] | None:
    is_filtered = params.status != "active" or bool(params.metadata)
    return (lambda record: params.accepts(record.metadata)) if is_filtered else None
