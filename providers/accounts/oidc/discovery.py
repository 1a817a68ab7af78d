"""Discovery: the document in which an issuer names its endpoints (OpenID Connect Discovery 1.0), read within bounds."""

import json
import re
from collections.abc import Mapping
from typing import Any, Final, cast
from urllib.parse import urlsplit

from apis.accounts.sign_in import SignIn
from apis.documents.fetcher import Fetcher, FetchRequest
from providers.accounts.oidc.settings import OpenIDConfig, SignInRule

_MAX_DOCUMENT_BYTES: Final = 256 * 1024
_DISCOVERY_PATH: Final = "/.well-known/openid-configuration"
_MAX_URL_CHARS: Final = 2048
_ENDPOINT: Final = re.compile(r"https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?([/?][!\"$-~]*)?")
"""A URL without user and fragment, whose origin may be written into a Content-Security-Policy: that has no IPv6."""


class IssuerDocuments:
    """The JSON documents of one issuer. Its own may lead to a private network, because the run config names it."""

    def __init__(self, config: OpenIDConfig, fetcher: Fetcher) -> None:
        self._config = config
        self._fetcher = fetcher

    async def fetch_metadata(self) -> Mapping[str, Any]:
        """Return the fields of the issuer's discovery document. Raises ValueError and FetchFailed."""
        issuer = self._config.issuer
        document = await self.fetch_json(f"{issuer.rstrip('/')}{_DISCOVERY_PATH}", allow_private=True)
        fields = cast("dict[str, Any]", document) if isinstance(document, dict) else {}
        if fields.get("issuer") != issuer:
            raise ValueError(
                f"its {_DISCOVERY_PATH} names the issuer {str(fields.get('issuer'))[:256]!r}, not the one of the run "
                "config"
            )
        return fields

    async def fetch_json(self, url: str, *, allow_private: bool) -> object:
        """Return the document at the URL. Raises ValueError and FetchFailed."""
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


def find_jwks_url(metadata: Mapping[str, Any], issuer: str) -> tuple[str, bool]:
    """Return the URL of the issuer's keys, and true if it is at the issuer's own origin. Raises ValueError."""
    url = metadata.get("jwks_uri")
    if not isinstance(url, str):
        raise ValueError(f"its {_DISCOVERY_PATH} has no jwks_uri")
    is_own = _origin(url) == _origin(issuer)
    if not is_own and not url.startswith("https://"):
        raise ValueError("its jwks_uri is at another origin and does not begin with https://")
    return url, is_own


def find_sign_in(metadata: Mapping[str, Any], config: OpenIDConfig, rule: SignInRule) -> SignIn:
    """Return the flow of the rule at the issuer's endpoints. Raises ValueError where a browser must not be sent there:
    it would send the code, and people their passwords."""
    endpoints = {name: _find_endpoint(metadata, name, config) for name in ("authorization_endpoint", "token_endpoint")}
    end_session = None
    if metadata.get("end_session_endpoint") is not None:
        end_session = _find_endpoint(metadata, "end_session_endpoint", config)
    return SignIn(
        config.issuer,
        endpoints["authorization_endpoint"],
        endpoints["token_endpoint"],
        end_session,
        rule.client_id,
        rule.scopes,
        rule.token,
    )


def _find_endpoint(metadata: Mapping[str, Any], name: str, config: OpenIDConfig) -> str:
    url = metadata.get(name)
    if not isinstance(url, str) or len(url) > _MAX_URL_CHARS or not _ENDPOINT.fullmatch(url):
        raise ValueError(f"its {_DISCOVERY_PATH} has no {name} that a page can use")
    if not config.is_safe(url):
        raise ValueError(f"its {name} does not begin with https://")
    return url


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port
