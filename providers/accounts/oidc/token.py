"""parse_token: the parts of a JSON Web Token before its signature is checked, read strictly and within bounds."""

import base64
import binascii
import json
import re
from dataclasses import dataclass
from typing import Any, Final, cast

MAX_TOKEN_BYTES: Final = 16 * 1024
"""Longest token; a longer one is refused unread."""
_COMPACT_FORM: Final = re.compile(rb"([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)\.[A-Za-z0-9_-]+")
_MAX_KEY_ID_CHARS: Final = 256
_MAX_TIME: Final = 2**40
"""Largest time in a token, in seconds of Unix time."""
_TIME_CLAIMS: Final = ("exp", "nbf", "iat")
_TOKEN_TYPES: Final = frozenset({"jwt", "at+jwt"})
"""Types of tokens that say who sends them. An issuer signs others with the same keys, such as logout tokens."""


class TokenRefused(Exception):
    """A token is refused. The text is for the log, one of a fixed number, and holds nothing of the token."""


@dataclass(frozen=True, slots=True)
class UnverifiedToken:
    """A token whose signature nothing has checked. `claims` are those of its body."""

    text: bytes
    algorithm: str
    key_id: str | None
    claims: dict[str, Any]


def parse_token(key: bytes) -> UnverifiedToken | None:
    """Return the parts of a token, None for a text that is none. Raises TokenRefused.

    Parameters of the head that name other keys (`jwk`, `jku`, `x5u`, `x5c`) are not read.
    """
    parts = _COMPACT_FORM.fullmatch(key)
    if parts is None:
        return None
    if len(key) > MAX_TOKEN_BYTES:
        raise TokenRefused("it is too long")
    head, claims = _parse_object(parts[1]), _parse_object(parts[2])
    algorithm, key_id, token_type = head.get("alg"), head.get("kid"), head.get("typ", "JWT")
    if not isinstance(algorithm, str):
        raise TokenRefused("its head has no algorithm")
    if not isinstance(key_id, str | None) or len(key_id or "") > _MAX_KEY_ID_CHARS:
        raise TokenRefused("the kid of its head is no text of 256 characters at most")
    if not isinstance(token_type, str) or token_type.lower().removeprefix("application/") not in _TOKEN_TYPES:
        raise TokenRefused("its type is neither JWT nor at+jwt")
    if not head.keys().isdisjoint(("crit", "b64", "zip")):
        raise TokenRefused("its head has parameters that change its meaning")
    if "cnf" in claims:
        raise TokenRefused("it is bound to a key of its sender, which is not checked here")
    for name in _TIME_CLAIMS:
        time_s = claims.get(name, 0)
        if type(time_s) not in (int, float) or not 0 <= time_s <= _MAX_TIME:
            raise TokenRefused(f"its {name} is no time")
    return UnverifiedToken(key, algorithm, key_id, claims)


def _parse_object(segment: bytes) -> dict[str, Any]:
    try:
        text = base64.urlsafe_b64decode(segment + b"=" * (-len(segment) % 4)).decode()
        value = json.loads(text, object_pairs_hook=_build_object, parse_constant=_refuse_constant)
    except (binascii.Error, ValueError, RecursionError):
        raise TokenRefused("it is not made of JSON") from None
    if not isinstance(value, dict):
        raise TokenRefused("it is not made of JSON objects")
    return cast("dict[str, Any]", value)


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object. Two readers of a name that is there twice may read two values, so it is refused."""
    value = dict(pairs)
    if len(value) < len(pairs):
        raise TokenRefused("a name is there twice")
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(name)
