"""The settings of the provider `oidc`: the issuer, what its tokens need, and which claims stand for which rights."""

import re
from collections.abc import Mapping
from typing import Annotated, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from apis.accounts.limits import LIMIT_FIELDS, NO_LIMIT, RateLimit
from apis.accounts.scopes import parse_project_scopes
from apis.errors import InvalidRequest
from providers.accounts.organization import StoredProjectsConfig

Algorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
]  # fmt: skip
"""Algorithms whose keys are pairs. Those with a shared secret (HS256) are none of them, and neither is `none`."""
TENANT_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}")
"""Names of tenants that a token may have: those of projects, so never ADMIN_TENANT, which begins with a dot."""
_ADMIN: Final = "admin"
_SCOPE_TOKEN: Final = re.compile(r"[!#-\[\]-~]{1,256}")
"""A scope of RFC 6749, section 3.3."""
_LOOPBACK_HOSTS: Final = frozenset({"localhost", "127.0.0.1", "::1"})


def _to_tuple(value: object) -> object:
    return (value,) if isinstance(value, str) else value


def _check_tenant(name: str) -> str:
    if not TENANT_NAME.fullmatch(name):
        raise ValueError("must have 1 to 64 letters, digits, underscores, hyphens and dots, and begin with no dot.")
    return name


def _check_scopes(texts: tuple[str, ...]) -> tuple[str, ...]:
    try:
        parse_project_scopes(text for text in texts if text != _ADMIN)
    except InvalidRequest as exc:
        raise ValueError(exc.message) from exc
    return texts


def _check_limits(limits: Mapping[str, int]) -> Mapping[str, int]:
    if unknown := limits.keys() - LIMIT_FIELDS.keys():
        raise ValueError(f"has the unknown name {min(unknown)}. The names are {', '.join(LIMIT_FIELDS)}.")
    return limits


def _check_scope_tokens(scopes: tuple[str, ...]) -> tuple[str, ...]:
    if not all(_SCOPE_TOKEN.fullmatch(scope) for scope in scopes):
        raise ValueError("must be a list of scopes, each without spaces, quotes and backslashes.")
    return scopes


TextList = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_to_tuple), Field(min_length=1)]
"""One text, or a list of them."""
ClaimPath = TextList
"""The name of a claim; for one within others their names, the outermost first: `[realm_access, roles]`."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TenantRule(_Section):
    """The tenant of a token: always `name`, or by a claim. With `values`, the first of them that the claim has decides;
    without, the claim has one text, which is the tenant's name."""

    name: Annotated[str, AfterValidator(_check_tenant)] | None = None
    claim: ClaimPath | None = None
    values: Annotated[dict[str, Annotated[str, AfterValidator(_check_tenant)]], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _require_one(self) -> Self:
        if (self.name is None) == (self.claim is None) or (self.values is not None and self.claim is None):
            raise ValueError("takes either `name`, or `claim` with or without `values`.")
        return self


class RoleRights(_Section):
    """The rights of one role: `scopes` as those of a stored key, or `admin`; `limits` of each person who has it."""

    scopes: Annotated[TextList, AfterValidator(_check_scopes)]
    limits: Annotated[
        dict[str, Annotated[int, Field(ge=0, le=NO_LIMIT)]], AfterValidator(_check_limits)
    ] | None = None  # fmt: skip

    @property
    def rate_limit(self) -> RateLimit | None:
        """The limits as those of a stored project are written."""
        if not self.limits:
            return None
        return RateLimit(**{LIMIT_FIELDS[name]: number for name, number in self.limits.items()})


class RoleRule(_Section):
    """The roles of a token, by the texts of a claim. A token without any of `values` is refused."""

    claim: ClaimPath
    values: dict[str, RoleRights] = Field(min_length=1)


class SignInRule(_Section):
    """Sign-in to the built-in page by the public client `client_id` of the issuer, which asks for `scopes`. `token` is
    the one of its two tokens that the page sends as its key."""

    client_id: str = Field(pattern=r"^[!-~]{1,256}$")
    scopes: Annotated[TextList, AfterValidator(_check_scope_tokens)] = ("openid",)
    token: Literal["id_token", "access_token"] = "id_token"  # noqa: S105 - the name of a token, not one

    @property
    def sends_id_token(self) -> bool:
        """True if the key is the ID token."""
        return self.token == "id_token"  # noqa: S105 - the name of a token, not one

    @model_validator(mode="after")
    def _require_openid(self) -> Self:
        if self.sends_id_token and "openid" not in self.scopes:
            raise ValueError("scopes must have openid: without it an issuer sends no ID token.")
        return self


class OpenIDConfig(StoredProjectsConfig):
    """Tokens of `issuer` for `audience`, signed with one of `algorithms` by a key of its JWKS, which is at `jwks_url`,
    or where the issuer's `/.well-known/openid-configuration` says. `leeway_s` is how far clocks may differ; a token
    whose end is more than `max_life_s` away is refused, because it cannot be revoked.

    `tenant` and `roles` turn claims into rights; without `roles` a token has all rights of its project. `user_claim`
    names the person in usage and limits, after `key_prefix`. With `require_project` tenants have to be projects.

    The keys are fetched again after `keys_max_age_s`, and for a token whose key is unknown, but not more often than
    every `min_fetch_interval_s`. While they cannot be fetched, those in memory are used until they are
    `keys_max_stale_s` old. One fetch takes `fetch_timeout_s` at most.

    With `sign_in` the built-in page signs people in.
    """

    issuer: str = Field(pattern=r"^https?://[!-~]+$", max_length=2048)
    audience: TextList
    jwks_url: str | None = Field(default=None, pattern=r"^https?://[!-~]+$", max_length=2048)
    algorithms: tuple[Algorithm, ...] = Field(default=("RS256", "PS256", "ES256", "EdDSA"), min_length=1)
    leeway_s: float = Field(default=30, ge=0, le=300)
    max_life_s: float = Field(default=86_400, gt=0)
    tenant: TenantRule
    roles: RoleRule | None = None
    user_claim: ClaimPath = ("sub",)
    key_prefix: str = Field(default="oidc", pattern=r"^[a-z0-9-]{1,32}$")
    require_project: bool = False
    keys_max_age_s: float = Field(default=300, gt=0)
    keys_max_stale_s: float = Field(default=3600, gt=0)
    min_fetch_interval_s: float = Field(default=10, gt=0)
    fetch_timeout_s: float = Field(default=5, gt=0, le=60)
    sign_in: SignInRule | None = None
    dangerously_allow_http: bool = False

    @model_validator(mode="after")
    def _check_urls(self) -> Self:
        for name, url in (("issuer", self.issuer), ("jwks_url", self.jwks_url)):
            if url is not None and not self.is_safe(url):
                raise ValueError(
                    f"{name} must begin with https://, because who can change the keys on their way can be anyone. "
                    "Where the network is safe, set dangerously_allow_http: true."
                )
        return self

    def is_safe(self, url: str) -> bool:
        """Return true if who is between this server, or a browser, and the URL's host can change nothing, or if the
        operator vouches for the network."""
        parts = urlsplit(url)
        return self.dangerously_allow_http or parts.scheme == "https" or parts.hostname in _LOOPBACK_HOSTS

    @model_validator(mode="after")
    def _check_client(self) -> Self:
        rule = self.sign_in
        if rule is not None and rule.sends_id_token and rule.client_id not in self.audience:
            raise ValueError(
                "audience has not the client id of sign_in, which is the audience of every ID token: add it, or set "
                "sign_in.token: access_token."
            )
        return self

    @model_validator(mode="after")
    def _check_staleness(self) -> Self:
        if self.keys_max_stale_s < self.keys_max_age_s:
            raise ValueError("keys_max_stale_s is less than keys_max_age_s: keys would be unusable before their age.")
        return self
