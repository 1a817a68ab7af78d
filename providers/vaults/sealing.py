"""SecretSealer: encrypts the secrets of credentials, so that a copy of the store is of no use without the run config.

AES-256-GCM under a key of its own for each write. The secrets are bound to their tenant, vault and credential, to the
key, and to the part of the credential that is visible: what was moved to another record, or given another server,
cannot be decrypted.
"""

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import orjson

from apis.imports import import_from_string
from providers.vaults.records import CredentialRef, Json, SealedSecrets

if TYPE_CHECKING:
    from providers.common.token_cipher import TokenCipher

Secrets = dict[str, str]
_SALT_BYTES: Final = 16
_NONCE_BYTES: Final = 12
_INFO: Final = b"responses-stack vault 1"


class UnsealFailed(Exception):
    """The secrets cannot be decrypted. The text says why, for the operator."""


class SecretSealer:
    """Encrypts under the first key and decrypts under any: a new key goes first, and old ones stay while records use
    them."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys: Mapping[str, bytes] = {_key_id(key): key.encode() for key in reversed(keys)}
        self.key_ids: Sequence[str] = [_key_id(key) for key in keys]

    @property
    def primary_key_id(self) -> str:
        return self.key_ids[0]

    def seal(self, values: Secrets, ref: CredentialRef, auth: Json) -> SealedSecrets:
        """Return the encrypted secrets of a credential whose visible part is `auth`."""
        return self.seal_bytes(orjson.dumps(values), [ref.tenant, ref.vault_id, ref.id, auth])

    def unseal(self, sealed: SealedSecrets, ref: CredentialRef, auth: Json) -> Secrets:
        """Return the secrets. Raises UnsealFailed."""
        data = self.unseal_bytes(sealed, [ref.tenant, ref.vault_id, ref.id, auth])
        return msgspec.json.decode(data, type=Secrets)

    def seal_bytes(self, data: bytes, binding: Sequence[Any]) -> SealedSecrets:
        """Return the data encrypted: it can be decrypted with the same binding alone."""
        key_id, salt, nonce = self.primary_key_id, secrets.token_bytes(_SALT_BYTES), secrets.token_bytes(_NONCE_BYTES)
        encrypted = self._cipher(key_id, salt).encrypt(nonce, data, _associated_data(key_id, binding))
        return SealedSecrets(key_id, salt, nonce, encrypted)

    def unseal_bytes(self, sealed: SealedSecrets, binding: Sequence[Any]) -> bytes:
        """Return the data. Raises UnsealFailed."""
        if sealed.key_id not in self._keys:
            raise UnsealFailed(f"its key {sealed.key_id[:16]!r} is not in `vaults.keys` of the run config")
        try:
            associated_data = _associated_data(sealed.key_id, binding)
            data = self._cipher(sealed.key_id, sealed.salt).decrypt(sealed.nonce, sealed.data, associated_data)
        except ValueError:  # a nonce of another length
            data = None
        if data is None:
            raise UnsealFailed("the record is not as it was written")
        return data

    def _cipher(self, key_id: str, salt: bytes) -> "TokenCipher":
        # imported for the first secret: the library takes 6 MB
        cipher: type[TokenCipher] = import_from_string("providers.common.token_cipher:TokenCipher")
        return cipher(self._keys[key_id], salt, _INFO)


def _key_id(key: str) -> str:
    return hashlib.sha256(b"responses-stack vault key id" + key.encode()).hexdigest()[:8]


def _associated_data(key_id: str, binding: Sequence[Any]) -> bytes:
    return orjson.dumps([key_id, *binding], option=orjson.OPT_SORT_KEYS)
