"""IssuerKeys: the keys and endpoints of an issuer, fetched again as they age, in memory for a bounded time."""

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any, Final

from apis.accounts.sign_in import SignIn
from apis.documents.fetcher import Fetcher
from apis.errors import FetchFailed, StoreUnavailable
from providers.accounts.oidc.discovery import IssuerDocuments, find_jwks_url, find_sign_in
from providers.accounts.oidc.settings import OpenIDConfig
from providers.accounts.oidc.signing_keys import KeyMembers, SigningKey, read_key_set

_log = logging.getLogger(__name__)
_FETCH_ERRORS: Final = (TimeoutError, FetchFailed, ValueError, RecursionError)


class IssuerKeys:
    """The keys of one issuer. All requests of this process share one fetch at a time, and a fetch begins at most once
    in `min_fetch_interval_s`: tokens with made-up key ids cause no more than that. A set that cannot be fetched, is
    too long or too slow, or is no JWKS replaces nothing.

    URLs of the run config may lead to a private network. A `jwks_uri` at another origin than the issuer's may not.
    """

    def __init__(self, config: OpenIDConfig, fetcher: Fetcher) -> None:
        self._config = config
        self._documents = IssuerDocuments(config, fetcher)
        self._sign_in: SignIn | None = None
        self._keys: Mapping[KeyMembers, SigningKey] = {}
        self._usable: frozenset[SigningKey] = frozenset()
        self._fetched_at: float | None = None
        self._next_fetch_at = 0.0
        self._fetch_task: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Cancel a fetch that runs."""
        if self._fetch_task is not None:
            self._fetch_task.cancel()
            await asyncio.wait({self._fetch_task})

    def start_fetch(self) -> "asyncio.Task[None] | None":
        """Return the fetch that runs; begin one if none does. None where the last one began too short a time ago."""
        if self._fetch_task is None or self._fetch_task.done():
            now = time.monotonic()
            if now < self._next_fetch_at:
                return None
            self._next_fetch_at = now + self._config.min_fetch_interval_s
            self._fetch_task = asyncio.create_task(self._fetch())
        return self._fetch_task

    async def find(self, algorithm: str, key_id: str | None) -> SigningKey | None:
        """Return the one key that may have signed a token with this head, None if there is none or several. Raises
        StoreUnavailable."""
        await self.require_fresh()
        fitting = [key for key in self._usable if key.fits(algorithm, key_id)]
        if not fitting and (fetch := self.start_fetch()) is not None:
            await asyncio.shield(fetch)
            fitting = [key for key in self._usable if key.fits(algorithm, key_id)]
        return fitting[0] if len(fitting) == 1 else None

    async def load_sign_in(self) -> SignIn | None:
        """Return how the issuer signs people in, None where the run config has no `sign_in` or the issuer has no
        endpoints that a page can use. Raises StoreUnavailable."""
        if self._config.sign_in is None:
            return None
        await self.require_fresh()
        return self._sign_in

    def holds(self, key: SigningKey) -> bool:
        """Return true if the issuer still has the key."""
        return key in self._usable

    async def require_fresh(self) -> None:
        """Begin a fetch if the keys are old, and wait for it if they are too old. Raises StoreUnavailable if they are
        too old afterwards."""
        if self._age_s() <= self._config.keys_max_age_s:
            return
        fetch = self.start_fetch()
        if self._age_s() <= self._config.keys_max_stale_s:
            return
        if fetch is not None:
            await asyncio.shield(fetch)
        if self._age_s() > self._config.keys_max_stale_s:
            raise StoreUnavailable(
                "The keys of the identity provider cannot be read. Try again later.",
                retry_after_s=self._config.min_fetch_interval_s,
            )

    def _age_s(self) -> float:
        return float("inf") if self._fetched_at is None else time.monotonic() - self._fetched_at

    async def _fetch(self) -> None:
        begun_at, metadata = time.monotonic(), None
        try:
            async with asyncio.timeout(self._config.fetch_timeout_s):
                url, is_own = self._config.jwks_url, True
                if url is None:
                    metadata = await self._documents.fetch_metadata()
                    url, is_own = find_jwks_url(metadata, self._config.issuer)
                keys = read_key_set(await self._documents.fetch_json(url, allow_private=is_own), self._keys)
        except _FETCH_ERRORS as exc:
            self._log_failure("the keys", exc)
        else:
            if keys.keys() != self._keys.keys():
                _log.info("the issuer %s has %d usable keys", self._config.issuer, len(keys))
            await self._fetch_sign_in(metadata)
            self._keys, self._usable, self._fetched_at = keys, frozenset(keys.values()), begun_at

    async def _fetch_sign_in(self, metadata: Mapping[str, Any] | None) -> None:
        """Replace the endpoints of the sign-in. Keys without them admit tokens still."""
        rule = self._config.sign_in
        if rule is None:
            return
        try:
            if metadata is None:
                async with asyncio.timeout(self._config.fetch_timeout_s):
                    metadata = await self._documents.fetch_metadata()
            self._sign_in = find_sign_in(metadata, self._config, rule)
        except _FETCH_ERRORS as exc:
            self._log_failure("the endpoints of sign_in", exc)

    def _log_failure(self, what: str, error: Exception) -> None:
        if isinstance(error, TimeoutError):
            reason = f"no answer within {self._config.fetch_timeout_s:g} s"
        elif isinstance(error, FetchFailed):
            reason = error.message
        else:
            reason = str(error) or "its JSON is too deep"
        _log.warning("%s of the issuer %s cannot be fetched: %s", what, self._config.issuer, reason[:500])
