"""The HTTP client of a service that the run config names, such as a search or an image service. Its requests go to that
host alone, and what it answers is bounded."""

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Final

import httpx2
from pydantic import SecretStr

from apis.certificates import trusted_certificates
from apis.errors import ConfigError
from providers.common.net.http.inflater import inflate_chunks

_KEEPALIVE_S: Final = 15.0


def open_service_client(
    base_url: str, headers: Mapping[str, str], proxy: SecretStr | None, section: str, connect_timeout_s: float
) -> httpx2.AsyncClient:
    """Return a client for the service at `base_url`. Without `proxy`, a URL, an https service is reached through the
    proxies of the environment. Raises ConfigError, which names the section of the run config, for a proxy that is no
    URL and for certificates that cannot be loaded."""
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs each URL at level INFO: what users search for
    try:
        return httpx2.AsyncClient(
            # a small compressed body can become a large one: none is requested, and one that comes has a bound
            headers={"accept-encoding": "identity", "user-agent": "responses-stack", **headers},
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            timeout=httpx2.Timeout(None, connect=connect_timeout_s),
            limits=httpx2.Limits(keepalive_expiry=_KEEPALIVE_S),
            verify=trusted_certificates(),
            proxy=(proxy.get_secret_value().strip() if proxy is not None else "") or None,
            trust_env=base_url.startswith("https:"),
        )
    # `from None`: the causes quote the URL of the proxy, which may hold a password
    except (ImportError, ValueError, httpx2.InvalidURL):
        raise ConfigError(
            f"the proxy ({section}.proxy, or HTTPS_PROXY and ALL_PROXY of the environment) is not of the form "
            "http://host:port; socks5:// takes the package socksio"
        ) from None
    except OSError as exc:
        raise ConfigError(f"the certificates to trust cannot be loaded: {exc}") from exc


def read_chunks(response: httpx2.Response) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
    """Open the body of an answer, decompressed. Raises EncodingError."""
    return aclosing(inflate_chunks(response.aiter_raw(), response.headers.get("content-encoding", "")))


async def read_body(response: httpx2.Response, max_bytes: int) -> bytes | None:
    """Return the body of an answer, decompressed; None if it has more than `max_bytes`. Raises EncodingError."""
    body = bytearray()
    async with read_chunks(response) as chunks:
        async for chunk in chunks:
            body += chunk
            if len(body) > max_bytes:
                return None
    return bytes(body)
