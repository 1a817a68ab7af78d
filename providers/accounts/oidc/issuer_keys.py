"""IssuerKeys: the keys of an issuer, fetched from its JWKS, rotated as it does, in memory for a bounded time."""

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from typing import Any, Final, cast
from urllib.parse import urlsplit

from apis.documents.fetcher import Fetcher, FetchRequest
from apis.errors import FetchFailed, StoreUnavailable
from providers.accounts.oidc.settings import OpenIDConfig
from providers.accounts.oidc.signing_keys import KeyMembers, SigningKey, read_key_set

_log = logging.getLogger(__name__)
_MAX_DOCUMENT_BYTES: Final = 256 * 1024
_DISCOVERY_PATH: Final = "/.well-known/openid-configuration"


class IssuerKeys:
    """The keys of one issuer. All requests of this process share one fetch at a time, and a fetch begins at most once
    in `min_fetch_interval_s`: tokens with made-up key ids cause no more than that. A set that cannot be fetched, is
    too long or too slow, or is no JWKS replaces nothing.

    URLs of the run config may lead to a private network. A `jwks_uri` at another origin than the issuer's may not.
    """

    def __init__(self, config: OpenIDConfig, fetcher: Fetcher) -> None:
        self._config = config
        self._fetcher = fetcher
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
        begun_at = time.monotonic()
        try:
            async with asyncio.timeout(self._config.fetch_timeout_s):
                url, is_own = await self._find_url()
                keys = read_key_set(await self._fetch_json(url, allow_private=is_own), self._keys)
        except TimeoutError:
            self._log_failure(f"no answer within {self._config.fetch_timeout_s:g} s")
        except FetchFailed as exc:
            self._log_failure(exc.message)
        except (ValueError, RecursionError) as exc:
            self._log_failure(str(exc) or "its JSON is too deep")
        else:
            if keys.keys() != self._keys.keys():
                _log.info("the issuer %s has %d usable keys", self._config.issuer, len(keys))
            self._keys, self._usable, self._fetched_at = keys, frozenset(keys.values()), begun_at

    def _log_failure(self, reason: str) -> None:
        _log.warning("the keys of the issuer %s cannot be fetched: %s", self._config.issuer, reason[:500])

    async def _find_url(self) -> tuple[str, bool]:
        """Return the URL of the JWKS, and true if the run config vouches for its host. Raises ValueError."""
        issuer = self._config.issuer
        if self._config.jwks_url is not None:
            return self._config.jwks_url, True
        document = await self._fetch_json(f"{issuer.rstrip('/')}{_DISCOVERY_PATH}", allow_private=True)
        fields = cast("dict[str, Any]", document) if isinstance(document, dict) else {}
        url = fields.get("jwks_uri")
        if fields.get("issuer") != issuer or not isinstance(url, str):
            raise ValueError(
                f"its {_DISCOVERY_PATH} names the issuer {str(fields.get('issuer'))[:256]!r}, not the one of the run "
                "config, or no jwks_uri"
            )
        is_own = _origin(url) == _origin(issuer)
        if not is_own and not url.startswith("https://"):
            raise ValueError("its jwks_uri is at another origin and does not begin with https://")
        return url, is_own

    async def _fetch_json(self, url: str, *, allow_private: bool) -> object:
        response = await self._fetcher.fetch(
            FetchRequest(
                url,
                headers={"accept": "application/json"},
                follow_redirects=False,
                max_bytes=_MAX_DOCUMENT_BYTES,
                timeout_s=self._config.fetch_timeout_s,
                allow_private=allow_private,
            )
        )
        if response.status != 200:
            raise ValueError(f"{url} answered with HTTP status {response.status}")
        return json.loads(response.body.decode())


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port
