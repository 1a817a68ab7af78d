"""The cipher of sealed tokens: AES-256-GCM, under a key of its own for each token."""

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF


class TokenCipher:
    """The cipher of one token. Its key is derived from `secret`: random nonces under one key would repeat one day."""

    def __init__(self, secret: bytes, salt: bytes, info: bytes) -> None:
        self._cipher = AESGCM(HKDF(algorithm=SHA256(), length=32, salt=salt, info=info).derive(secret))

    def encrypt(self, nonce: bytes, data: bytes, associated_data: bytes) -> bytes:
        """Return the encrypted data, bound to `associated_data`."""
        return self._cipher.encrypt(nonce, data, associated_data)

    def decrypt(self, nonce: bytes, data: bytes, associated_data: bytes) -> bytes | None:
        """Return what was encrypted; None if the data is damaged, or of another key or other associated data."""
        try:
            return self._cipher.decrypt(nonce, data, associated_data)
        except InvalidTag:
            return None
