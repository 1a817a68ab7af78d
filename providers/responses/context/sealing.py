"""Sealer: encrypts text that clients store for this server, so that only this deployment can read it.

AES-256-GCM under a key of the server, bound to a tenant and a model: a token that was changed or truncated, or that
belongs to another tenant or model, cannot be unsealed.
"""

import base64
import binascii
import hashlib
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal

from apis.imports import import_from_string

if TYPE_CHECKING:
    from providers.common.token_cipher import TokenCipher

TOKEN_PREFIX: Final = "rs3."  # noqa: S105 - a prefix, not a password
MIN_KEY_BYTES: Final = 32
KEY_ID_BYTES: Final = 4
MODEL_ID_BYTES: Final = 8
SALT_BYTES: Final = 16
NONCE_BYTES: Final = 12
HEADER_BYTES: Final = KEY_ID_BYTES + MODEL_ID_BYTES + SALT_BYTES + NONCE_BYTES

Purpose = Literal["reasoning", "compaction", "tool result"]
RemovalReason = Literal["organization_mismatch", "model_mismatch"]


class UnsealError(Exception):
    """Raised for a token that cannot be unsealed; `reason` is the API's value for it."""

    def __init__(self, reason: RemovalReason) -> None:
        super().__init__(reason)
        self.reason: RemovalReason = reason


def generate_key() -> bytes:
    """Return a new random key, for a deployment without one in its config."""
    return secrets.token_bytes(MIN_KEY_BYTES)


class Sealer:
    """Seals with the first key and unseals with any: a new key goes first, and old ones stay while tokens use them.

    Each purpose has keys of its own, derived from the same secret: a token of one purpose cannot be used as another's.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        """Raises ValueError without a key, and for a key of less than 32 bytes."""
        if not keys or any(len(key) < MIN_KEY_BYTES for key in keys):
            raise ValueError(f"a key has at least {MIN_KEY_BYTES} bytes")
        self._keys = {_key_id(key): key for key in reversed(keys)}
        self._primary_key_id = _key_id(keys[0])

    def seal(self, text: str, *, tenant: str, model: str, purpose: Purpose) -> str:
        """Return a token of printable characters; equal texts get different tokens."""
        salt, nonce = secrets.token_bytes(SALT_BYTES), secrets.token_bytes(NONCE_BYTES)
        cipher = self._derive_cipher(self._primary_key_id, salt, purpose)
        sealed = cipher.encrypt(nonce, _encode_text(text), _associated_data(tenant, model))
        return (
            TOKEN_PREFIX
            + base64.urlsafe_b64encode(self._primary_key_id + _model_id(model) + salt + nonce + sealed).decode()
        )

    def unseal(self, token: str, *, tenant: str, model: str, purpose: Purpose) -> str:
        """Return the sealed text. Raises UnsealError for a token that is damaged, or of an unknown key, another tenant,
        model or purpose."""
        prefix, encoded = token[: len(TOKEN_PREFIX)], token[len(TOKEN_PREFIX) :]
        try:
            data = base64.b64decode(encoded, altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            data = b""
        key_id, rest = data[:KEY_ID_BYTES], data[KEY_ID_BYTES:]
        if prefix != TOKEN_PREFIX or len(data) < HEADER_BYTES or key_id not in self._keys:
            raise UnsealError("organization_mismatch")
        model_id, rest = rest[:MODEL_ID_BYTES], rest[MODEL_ID_BYTES:]
        if model_id != _model_id(model):
            raise UnsealError("model_mismatch")
        salt, nonce, sealed = rest[:SALT_BYTES], rest[SALT_BYTES:][:NONCE_BYTES], rest[SALT_BYTES + NONCE_BYTES :]
        cipher = self._derive_cipher(key_id, salt, purpose)
        text = cipher.decrypt(nonce, sealed, _associated_data(tenant, model))
        if text is None:
            raise UnsealError("organization_mismatch")
        return text.decode("utf-8", "surrogatepass")

    def _derive_cipher(self, key_id: bytes, salt: bytes, purpose: Purpose) -> "TokenCipher":
        # imported for the first token: the library takes 6 MB
        cipher: type[TokenCipher] = import_from_string("providers.common.token_cipher:TokenCipher")
        return cipher(self._keys[key_id], salt, f"responses-stack {purpose} 2".encode())


def _key_id(key: bytes) -> bytes:
    return hashlib.sha256(b"responses-stack key id" + key).digest()[:KEY_ID_BYTES]


def _model_id(model: str) -> bytes:
    return hashlib.sha256(_encode_text(model)).digest()[:MODEL_ID_BYTES]


def _associated_data(tenant: str, model: str) -> bytes:
    return _encode_text(f"{len(tenant)}:{tenant}{model}")


def _encode_text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
