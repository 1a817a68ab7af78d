"""The route to an upstream: the origin that a URL names, and the HTTP proxy on the way to it."""

import functools
import ipaddress
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self
from urllib.parse import quote, unquote, urlsplit
from urllib.request import getproxies

from providers.common.net.http.connection import HttpError

ENVIRONMENT_SCHEMES: Final = ("http", "https", "all")
PROXY_FORM: Final = "a proxy looks like http://host:port or http://user:password@host:port"


class Origin(NamedTuple):
    """Scheme, host and port of a URL."""

    tls: bool
    host: str
    port: int


@functools.lru_cache(maxsize=256)
def parse_url(url: str) -> tuple[Origin, bytes, bytes]:
    """Return the origin, the Host header and the request target of a URL. Raises ValueError for an invalid one."""
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    host = parts.hostname or ""
    host = host if host.isascii() else host.encode("idna").decode()
    named = f"[{host}]" if ":" in host else host
    named = named if parts.port is None else f"{named}:{parts.port}"
    target = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
    target = f"{target}?{quote(parts.query, safe='/%:@!$&()*+,;=~-._?')}" if parts.query else target
    return Origin(tls, host, parts.port or (443 if tls else 80)), named.encode(), target.encode()


class ProxyError(HttpError):
    """The proxy is unreachable or refuses the connection. The message names its host and never its credentials."""

    def __init__(self, proxy: "Proxy", message: str, *, is_temporary: bool = True) -> None:
        super().__init__(f"the proxy {proxy.name} {message}")
        self.is_temporary = is_temporary

    @classmethod
    def for_status(cls, proxy: "Proxy", status: int) -> Self:
        """Return the error for a proxy's own HTTP status."""
        hint = ", its credentials may be missing or wrong" if status == 407 else ""
        return cls(proxy, f"refused the connection with HTTP status {status}{hint}", is_temporary=status >= 500)


@dataclass(frozen=True, slots=True)
class Proxy:
    """HTTP proxy. `authorization` is its header line with the credentials, or empty; it must not be logged."""

    origin: Origin
    authorization: bytes = field(default=b"", repr=False)

    @classmethod
    def parse(cls, url: str) -> Self:
        """Return the proxy at a URL such as `http://user:password@host:port`. Raises ValueError, without the URL."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            host, port = parts.hostname or "", parts.port or 80
            host = host if host.isascii() else host.encode("idna").decode()
        except ValueError:  # its text may contain the credentials
            raise ValueError(PROXY_FORM) from None
        if parts.scheme != "http" or not host or not host.isprintable() or " " in host:
            raise ValueError(PROXY_FORM)
        authorization = b""
        if parts.username is not None:
            credentials = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            authorization = b"Proxy-Authorization: Basic %b\r\n" % b64encode(credentials.encode())
        return cls(Origin(tls=False, host=host, port=port), authorization)

    @property
    def name(self) -> str:
        """Host and port, for error messages."""
        return authority(self.origin)


def authority(origin: Origin) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{origin.host}]:{origin.port}" if ":" in origin.host else f"{origin.host}:{origin.port}"


class ProxyRules:
    """Choice of a proxy for each origin; without arguments every connection is direct."""

    def __init__(self, urls: Mapping[str, str] | None = None, bypasses: Sequence[str] = ()) -> None:
        """Set a proxy URL for each scheme: `http`, `https`, or `all` for both. `bypasses` are entries of NO_PROXY."""
        self._urls = urls or {}
        self._bypasses = [entry for entry in map(str.strip, bypasses) if entry]

    @classmethod
    def from_environment(cls) -> Self:
        """Return the rules of HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY, in either case, or of the system's
        settings, as httpx reads them (https://www.python-httpx.org/environment_variables/)."""
        proxies = getproxies()
        urls = {scheme: proxies[scheme] for scheme in ENVIRONMENT_SCHEMES if proxies.get(scheme)}
        return cls(urls, proxies.get("no", "").split(","))

    def find_proxy(self, origin: Origin) -> Proxy | None:
        """Return the proxy for an origin; None for a direct connection. Raises ValueError for a proxy URL that is not
        valid, without the URL."""
        scheme = "https" if origin.tls else "http"
        scheme = scheme if scheme in self._urls else "all"
        url = self._urls.get(scheme)
        if url is None or any(_is_bypassed(origin, entry.lower()) for entry in self._bypasses):
            return None
        return Proxy.parse(url)


def _is_bypassed(origin: Origin, entry: str) -> bool:
    """Return true if an entry of NO_PROXY covers the origin: `*`, a host and its subdomains, `.suffix` for subdomains
    only, an address or network; each optionally with a scheme and a port."""
    if entry == "*":
        return True
    scheme, _, rule = entry.rpartition("://")
    if scheme not in ("", "all", "https" if origin.tls else "http"):
        return False
    host, port = _split_port(rule)
    if port not in ("", str(origin.port)):
        return False
    try:
        network = ipaddress.ip_network(host, strict=False)
    except ValueError:
        suffix = host.removeprefix("*")
        if suffix.startswith("."):
            return origin.host.endswith(suffix)
        return origin.host == suffix or origin.host.endswith(f".{suffix}")
    try:
        return ipaddress.ip_address(origin.host) in network
    except ValueError:
        return False


def _split_port(rule: str) -> tuple[str, str]:
    if rule.startswith("["):
        host, _, port = rule[1:].partition("]")
        return host, port.removeprefix(":")
    if rule.count(":") > 1:
        return rule, ""  # an IPv6 address without brackets
    host, _, port = rule.partition(":")
    return host, port
