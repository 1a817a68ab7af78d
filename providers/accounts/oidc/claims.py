"""Identity: the tenant, rights and limits of a person, from the claims of a token by the rules of the run config."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, cast

from apis.accounts.accounts import ADMIN_TENANT
from apis.accounts.limits import RateLimit
from apis.accounts.scopes import ADMIN_SCOPE, Grant, parse_project_scopes
from providers.accounts.oidc.settings import TENANT_NAME, OpenIDConfig, RoleRights, RoleRule, TenantRule
from providers.accounts.oidc.token import TokenRefused

_WORD_LISTS: Final = frozenset({"scope", "scp"})
"""Claims whose text is a list of words (RFC 8693)."""
_MAX_TEXTS: Final = 1000
_MAX_USER_CHARS: Final = 255
_MAX_SHOWN_CHARS: Final = 64
_SHOWN_PUNCTUATION: Final = frozenset("._@+-")


@dataclass(frozen=True, slots=True)
class Identity:
    """One person, or program, that an issuer vouches for until `expires_at` (seconds of Unix time). `limits` are those
    of this person in all of its requests."""

    tenant: str
    key_id: str
    grant: Grant
    expires_at: float
    limits: tuple[RateLimit, ...] = field(default_factory=tuple[RateLimit, ...])


def identify(claims: Mapping[str, Any], config: OpenIDConfig) -> Identity:
    """Return whom the claims of a verified token name, and that one's rights. Raises TokenRefused."""
    if config.roles is None:
        grant, limits = Grant(), ()
    else:
        roles = _find_roles(claims, config.roles)
        grant = _build_grant(text for role in roles for text in role.scopes)
        limits = tuple(limit for role in roles if (limit := role.rate_limit) is not None)
    tenant = ADMIN_TENANT if grant.scopes == ADMIN_SCOPE else _find_tenant(claims, config.tenant)
    user = _read_texts(claims, config.user_claim)
    if len(user) != 1 or not 1 <= len(user[0]) <= _MAX_USER_CHARS:
        raise TokenRefused("its claim of the person is no text of 1 to 255 characters")
    key_id = f"{config.key_prefix}{_shorten(user[0])}"
    return Identity(tenant, key_id, grant, int(claims["exp"]) + config.leeway_s, limits)


def tightest_limit(limits: Iterable[RateLimit]) -> RateLimit:
    """Return the limit that holds where all of these hold: the smallest number of each field."""
    bounds: dict[str, Any] = {}
    for limit in limits:
        for each in fields(limit):
            number = getattr(limit, each.name)
            if number is not None:
                bounds[each.name] = min(number, bounds.get(each.name, number))
    return RateLimit(**bounds)


def _find_roles(claims: Mapping[str, Any], rule: RoleRule) -> Sequence[RoleRights]:
    texts = _read_texts(claims, rule.claim)
    roles = [rights for value, rights in rule.values.items() if value in texts]
    if not roles:
        raise TokenRefused("its claims have none of the roles")
    return roles


def _build_grant(scope_texts: Iterable[str]) -> Grant:
    """Return the rights of all the roles together, whose scopes count as those of one key."""
    texts = set(scope_texts)
    if "admin" not in texts:
        return parse_project_scopes(texts)
    texts.discard("admin")
    if not texts:
        return Grant(ADMIN_SCOPE)
    project_grant = parse_project_scopes(texts)
    return Grant(project_grant.scopes | ADMIN_SCOPE, project_grant.models, project_grant.tools)


def _find_tenant(claims: Mapping[str, Any], rule: TenantRule) -> str:
    if rule.claim is None:
        assert rule.name is not None, "TenantRule has either"
        return rule.name
    texts = _read_texts(claims, rule.claim)
    if rule.values is not None:
        tenant = next((tenant for value, tenant in rule.values.items() if value in texts), None)
        if tenant is None:
            raise TokenRefused("its claim of the tenant has none of the values")
        return tenant
    if len(texts) != 1 or not TENANT_NAME.fullmatch(texts[0]):
        raise TokenRefused("its claim of the tenant is not one name of a tenant")
    return texts[0]


def _read_texts(claims: Mapping[str, Any], path: Sequence[str]) -> Sequence[str]:
    """Return the texts of a claim, none if it is absent. Raises TokenRefused for values of other types."""
    value: object = claims
    for name in path:
        value = cast("dict[str, object]", value).get(name) if isinstance(value, dict) else None
    if value is None:
        return ()
    texts = cast("list[object]", value) if isinstance(value, list) else [value]
    if len(texts) > _MAX_TEXTS or not all(isinstance(text, str) for text in texts):
        raise TokenRefused("a claim that stands for rights is neither a text nor a list of texts")
    words = cast("list[str]", texts)
    return words[0].split(" ") if isinstance(value, str) and path[-1] in _WORD_LISTS else words


def _shorten(user: str) -> str:
    """Return the name of a person as a part of a key id: itself where that is safe, else a hash. The separators differ,
    so that no name is another one's hash."""
    if len(user) <= _MAX_SHOWN_CHARS and all(
        char.isascii() and (char.isalnum() or char in _SHOWN_PUNCTUATION) for char in user
    ):
        return f":{user}"
    return f"-{hashlib.sha256(user.encode(errors='surrogatepass')).hexdigest()[:32]}"
