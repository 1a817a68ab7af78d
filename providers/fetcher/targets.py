"""The one parser of URLs from outside. A URL that two parsers could read differently is refused."""

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, urljoin

from apis.errors import FetchFailed
from providers.common.net import host_names

MAX_URL_CHARS: Final = 8192
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
# Parsers drop these characters, cut at them or map them to others, so that URLs with them are ambiguous.
_FORBIDDEN_CHARS: Final = re.compile(r"[\x00-\x20\x7f-\xa0\\\ud800-\udfff\u2028\u2029]")
_URL: Final = re.compile(
    r"(?P<scheme>https?)://(?P<host>\[[0-9a-f:.]+\]|[^:/?#\[\]@%]+)(?::(?P<port>[1-9][0-9]{0,4}))?"
    r"(?P<path>/[^?#]*)?(?P<query>\?[^#]*)?(?:#.*)?",
    re.IGNORECASE,
)
_ASCII: Final = "".join(map(chr, range(0x21, 0x7F)))


@dataclass(frozen=True, slots=True)
class Target:
    """Destination of a request. `host` is an ASCII name in lower case or an address; `path` includes the query."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def origin(self) -> tuple[str, str, int]:
        return self.scheme, self.host, self.port

    @property
    def authority(self) -> str:
        """The value of the `Host` header: the host, and the port where it is not the scheme's default."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"


def url_to_target(url: str) -> Target:
    """Parse a URL. Raises FetchFailed for one that is not http or https, or that parsers could read differently."""
    if len(url) > MAX_URL_CHARS:
        raise FetchFailed(f"The URL is longer than {MAX_URL_CHARS} characters.")
    if _FORBIDDEN_CHARS.search(url):
        raise FetchFailed("The URL holds a blank, a backslash or a control character. Write such characters as %XX.")
    if not re.match(r"https?://", url, re.IGNORECASE):
        raise FetchFailed("The URL does not begin with http:// or https://.")
    parts = _URL.fullmatch(url)
    if parts is None:
        raise FetchFailed("The URL's host or port is not a plain one. User names in URLs are refused too.")
    scheme = parts["scheme"].lower()
    port = int(parts["port"] or _DEFAULT_PORTS[scheme])
    if port > 65535:
        raise FetchFailed("The URL's port is not a port.")
    path = quote((parts["path"] or "/") + (parts["query"] or ""), safe=_ASCII)
    return Target(scheme, text_to_host(parts["host"]), port, path)


def resolve_redirect(target: Target, location: str) -> Target:
    """Resolve a `Location` header against `target`. Raises FetchFailed, also for a redirect from https to http."""
    if len(location) > MAX_URL_CHARS or _FORBIDDEN_CHARS.search(location):
        raise FetchFailed("The page redirects to a URL that cannot be read.")
    try:
        destination = url_to_target(urljoin(target.url, location))
    except ValueError:
        raise FetchFailed("The page redirects to a URL that cannot be read.") from None
    if target.scheme == "https" and destination.scheme == "http":
        raise FetchFailed("The page redirects from https to http, which is refused.")
    return destination


def text_to_host(text: str) -> str:
    """Return the canonical form of a host. Raises FetchFailed for text that is no host, and for an address in another
    than its usual spelling."""
    try:
        return host_names.text_to_host(text)
    except ValueError:
        raise FetchFailed("The URL's host is not a name, nor an address in its usual spelling.") from None
