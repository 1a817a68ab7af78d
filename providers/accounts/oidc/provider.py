"""OpenIDAccounts: callers by the tokens of an identity provider (OpenID Connect Discovery, RFC 7519, RFC 8725)."""

import logging
import time
from dataclasses import dataclass, replace
from typing import Any, Final

import jwt

from apis.accounts.accounts import ADMIN_TENANT, Caller, digest_key
from apis.accounts.limits import KEY_SUBJECT_PREFIX
from apis.accounts.sign_in import SignIn
from apis.documents.fetcher import Fetcher
from apis.storage.kv_store import KVStore
from providers.accounts.key_cache import KeyCache
from providers.accounts.oidc.claims import Identity, identify, tightest_limit
from providers.accounts.oidc.issuer_keys import IssuerKeys
from providers.accounts.oidc.settings import OpenIDConfig
from providers.accounts.oidc.signing_keys import SigningKey
from providers.accounts.oidc.token import TokenRefused, UnverifiedToken, parse_token
from providers.accounts.project_state import ProjectState, project_record_keys, read_project
from providers.accounts.projects import StoredProjects
from providers.common.recent import RecentEntries

_log = logging.getLogger(__name__)
_MAX_TOKENS: Final = 10_000
"""Verified tokens in memory; the oldest are verified again."""
_LOG_INTERVAL_S: Final = 60.0
"""Seconds between two lines of the log about tokens that are refused for one reason."""
_REQUIRED_CLAIMS: Final = ("iss", "aud", "exp", "sub")


@dataclass(frozen=True, slots=True)
class _VerifiedToken:
    signing_key: SigningKey
    identity: Identity


class OpenIDAccounts(StoredProjects):
    """Tokens of an identity provider instead of keys. A token is verified once, then found in memory by its digest
    until it expires or the issuer withdraws its key.

    A token cannot be revoked by itself: it ends by its own expiry, with its key, and within a second with its project.
    The limits of the project and of the person (`key:KEY_ID`) that the store has hold together with those of the roles.
    A text that is no token of this issuer is none of its keys. Every reason for a refusal is for the log only.
    """

    Config = OpenIDConfig

    def __init__(self, config: OpenIDConfig, kv_store: KVStore, fetcher: Fetcher) -> None:
        super().__init__(config, kv_store)
        self._config = config
        self._issuer_keys = IssuerKeys(config, fetcher)
        self._projects = KeyCache(self._read_project)
        self._tokens = RecentEntries[bytes, _VerifiedToken](_MAX_TOKENS)
        self._logged_at: dict[str, float] = {}

    async def start(self) -> None:
        """Begin to fetch the keys, so that the log says at once what is wrong with the issuer."""
        await super().start()
        self._issuer_keys.start_fetch()

    async def close(self) -> None:
        await self._issuer_keys.close()
        await self._projects.close()
        await super().close()

    async def authenticate(self, key: bytes) -> Caller | None:
        digest = digest_key(key)
        verified = self._tokens.get(digest)
        if verified is None:
            try:
                verified = await self._verify(key)
            except TokenRefused as exc:
                self._log_refusal(str(exc))
                return None
            if verified is None:
                return None
            self._tokens[digest] = verified
        else:
            await self._issuer_keys.require_fresh()
        if time.time() >= verified.identity.expires_at or not self._issuer_keys.holds(verified.signing_key):
            self._tokens.pop(digest, None)
            return None
        return await self._find_caller(verified.identity)

    async def find_caller(self, project_id: str, key_id: str) -> Caller | None:
        """Return None: the rights of a person are in the token of each request, and end with it."""
        return None

    async def load_sign_in(self) -> SignIn | None:
        return await self._issuer_keys.load_sign_in()

    async def _verify(self, key: bytes) -> _VerifiedToken | None:
        """Return the token whose signature and claims are right, None if it is none of this issuer. Raises
        TokenRefused and StoreUnavailable."""
        config = self._config
        token = parse_token(key)
        if token is None or token.claims.get("iss") != config.issuer:
            return None
        if token.algorithm not in config.algorithms:
            raise TokenRefused("its algorithm is none of those of the run config")
        signing_key = await self._issuer_keys.find(token.algorithm, token.key_id)
        if signing_key is None:
            raise TokenRefused("the issuer has no key, or several keys, of its algorithm and kid")
        claims = self._check_signature(token, signing_key)
        if float(claims["exp"]) - time.time() > config.max_life_s + config.leeway_s:
            raise TokenRefused("it expires later than max_life_s from now")
        return _VerifiedToken(signing_key, identify(claims, config))

    def _check_signature(self, token: UnverifiedToken, signing_key: SigningKey) -> dict[str, Any]:
        config = self._config
        try:
            return jwt.decode(
                token.text,
                signing_key.public_key,
                algorithms=[token.algorithm],
                audience=config.audience,
                issuer=config.issuer,
                leeway=config.leeway_s,
                options={"require": [*_REQUIRED_CLAIMS]},
            )
        except jwt.InvalidSignatureError:
            raise TokenRefused("its signature is wrong") from None
        except jwt.PyJWTError as exc:
            raise TokenRefused(f"its claims are refused ({type(exc).__name__})") from None

    async def _find_caller(self, identity: Identity) -> Caller | None:
        if identity.tenant == ADMIN_TENANT:
            return Caller(ADMIN_TENANT, identity.key_id, identity.grant, identity.expires_at)
        project = await self._projects.load(identity.tenant.encode())
        if project is None:
            return None
        caller = project.build_caller(identity.key_id, identity.grant, identity.expires_at)
        if not identity.limits:
            return caller
        subject = f"{KEY_SUBJECT_PREFIX}{identity.key_id}"
        stored = (caller.limits[subject],) if subject in caller.limits else ()
        return replace(caller, limits={**caller.limits, subject: tightest_limit((*identity.limits, *stored))})

    async def _read_project(self, project_id: bytes) -> ProjectState | None:
        name = project_id.decode()
        project = read_project(self._kv, name, await self._kv.get_many(project_record_keys(name)))
        self._bound_stored_bytes(project)
        is_absent = project.project is None and not self._config.require_project
        return project if is_absent or project.is_active else None

    def _log_refusal(self, reason: str) -> None:
        now = time.monotonic()
        if now - self._logged_at.get(reason, -_LOG_INTERVAL_S) >= _LOG_INTERVAL_S:
            self._logged_at[reason] = now
            _log.warning("a token of the issuer %s is refused: %s", self._config.issuer, reason)
