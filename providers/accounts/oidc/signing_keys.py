"""SigningKey: a public key of a JWKS (RFC 7517) that may have signed a token, and the reading of a set of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

MAX_KEYS: Final = 100
"""Most keys of one set; issuers have two or three."""
_MIN_RSA_BITS: Final = 2048
_MAX_RSA_BITS: Final = 8192
"""Longest RSA key: the time of a check grows with its square."""
_MEMBERS: Final[Mapping[str, tuple[str, ...]]] = {"RSA": ("n", "e"), "EC": ("crv", "x", "y"), "OKP": ("crv", "x")}
"""The public members of a key by its type. Private ones, which some sets reveal, are not read."""
_ALGORITHMS: Final[Mapping[tuple[str, str], tuple[str, ...]]] = {
    ("RSA", ""): ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    ("EC", "P-256"): ("ES256",),
    ("EC", "P-384"): ("ES384",),
    ("EC", "P-521"): ("ES512",),
    ("OKP", "Ed25519"): ("EdDSA",),
}
"""Algorithms by the type and curve of a key: each key serves its own, and a token cannot choose another."""
KeyMembers = tuple[str, ...]
"""All that a set says of a key: its type, id, algorithms and public numbers."""


@dataclass(frozen=True, eq=False)
class SigningKey:
    """One key. `algorithms` are those that it may check."""

    members: KeyMembers
    key_id: str | None
    algorithms: tuple[str, ...]
    public_key: Any

    def fits(self, algorithm: str, key_id: str | None) -> bool:
        """Return true if the key may have signed a token with this head."""
        return algorithm in self.algorithms and key_id in (None, self.key_id)


def read_key_set(
    document: object, known_keys: Mapping[tuple[str, ...], SigningKey]
) -> dict[tuple[str, ...], SigningKey]:
    """Return the usable keys of a JWKS by their members; those of `known_keys` stay the same objects. Keys of other
    types and uses are skipped. Raises ValueError if it is no JWKS."""
    entries: object = cast("dict[str, Any]", document).get("keys") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise ValueError("it is no JWKS: it has no list `keys`")
    if len(cast("list[object]", entries)) > MAX_KEYS:
        raise ValueError(f"it has more than {MAX_KEYS} keys")
    keys: dict[KeyMembers, SigningKey] = {}
    for entry in cast("list[object]", entries):
        if isinstance(entry, dict) and (key := _read_key(cast("dict[str, Any]", entry))) is not None:
            keys[key.members] = known_keys.get(key.members, key)
    return keys


def _read_key(entry: dict[str, Any]) -> SigningKey | None:
    key_type, key_id, own_algorithm = entry.get("kty"), entry.get("kid"), entry.get("alg")
    if not isinstance(key_type, str) or key_type not in _MEMBERS or not isinstance(key_id, str | None):
        return None
    uses: object = entry.get("key_ops", ["verify"])
    if entry.get("use", "sig") != "sig" or not isinstance(uses, list) or "verify" not in uses:
        return None
    values = {name: entry.get(name) for name in _MEMBERS[key_type]}
    if not all(isinstance(value, str) for value in values.values()):
        return None
    algorithms = _ALGORITHMS.get((key_type, cast("str", values.get("crv", ""))), ())
    if own_algorithm is not None:
        algorithms = tuple(name for name in algorithms if name == own_algorithm)
    if not algorithms:
        return None
    try:
        public_key: Any = jwt.PyJWK({"kty": key_type, **values}, algorithms[0]).key
    except (jwt.PyJWTError, ValueError, TypeError, UnsupportedAlgorithm):
        return None
    if isinstance(public_key, RSAPublicKey) and not _MIN_RSA_BITS <= public_key.key_size <= _MAX_RSA_BITS:
        return None
    members = (key_type, key_id or "", *algorithms, *cast("dict[str, str]", values).values())
    return SigningKey(members, key_id, algorithms, public_key)
