"""Targets: the one reading of a URL that came from outside. What can be read in two ways is refused."""

import re
import unicodedata
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import Final
from urllib.parse import quote, urljoin

import idna

from apis.errors import FetchFailed

MAX_URL_CHARS: Final = 8192
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
# Characters that parsers drop, cut at, or take for others: the same text is then one URL here and another there.
_FORBIDDEN_CHARS: Final = re.compile(r"[\x00-\x20\x7f-\xa0\\\ud800-\udfff\u2028\u2029]")
_URL: Final = re.compile(
    r"(?P<scheme>https?)://(?P<host>\[[0-9a-f:.]+\]|[^:/?#\[\]@%]+)(?::(?P<port>[1-9][0-9]{0,4}))?"
    r"(?P<path>/[^?#]*)?(?P<query>\?[^#]*)?(?:#.*)?",
    re.IGNORECASE,
)
_NAME: Final = re.compile(r"(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")
_OTHER_DOTS: Final = re.compile(r"[\u3002\uff0e\uff61]")
_LOOKALIKE_SCRIPTS: Final = frozenset({"LATIN", "GREEK", "CYRILLIC", "ARMENIAN", "COPTIC", "CHEROKEE"})
_ASCII: Final = "".join(map(chr, range(0x21, 0x7F)))


@dataclass(frozen=True, slots=True)
class Target:
    """Where a request goes. `host` is an ASCII name in lower case, or an address; `path` has the query with it."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def origin(self) -> tuple[str, str, int]:
        return self.scheme, self.host, self.port

    @property
    def is_address(self) -> bool:
        return ":" in self.host or _is_number(self.host)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == _DEFAULT_PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self.path}"


def url_to_target(url: str) -> Target:
    """Reads a URL. Raises FetchFailed for one that is not http or https, or that others may read differently."""
    if len(url) > MAX_URL_CHARS:
        raise FetchFailed(f"The URL is longer than {MAX_URL_CHARS} characters.")
    if _FORBIDDEN_CHARS.search(url):
        raise FetchFailed("The URL holds a blank, a backslash or a control character. Write such characters as %XX.")
    if not re.match(r"https?://", url, re.IGNORECASE):
        raise FetchFailed("The URL does not begin with http:// or https://.")
    found = _URL.fullmatch(url)
    if found is None:
        raise FetchFailed("The URL's host or port is not a plain one. User names in URLs are refused too.")
    scheme = found["scheme"].lower()
    port = int(found["port"] or _DEFAULT_PORTS[scheme])
    if port > 65535:
        raise FetchFailed("The URL's port is not a port.")
    path = quote((found["path"] or "/") + (found["query"] or ""), safe=_ASCII)
    return Target(scheme, text_to_host(found["host"]), port, path)


def resolve_redirect(target: Target, location: str) -> Target:
    """Where a `Location` header leads from `target`. Raises FetchFailed."""
    if len(location) > MAX_URL_CHARS or _FORBIDDEN_CHARS.search(location):
        raise FetchFailed("The page redirects to a URL that cannot be read.")
    try:
        there = url_to_target(urljoin(target.url, location))
    except ValueError:
        raise FetchFailed("The page redirects to a URL that cannot be read.") from None
    if target.scheme == "https" and there.scheme == "http":
        raise FetchFailed("The page redirects from https to http, which is refused.")
    return there


def text_to_host(text: str) -> str:
    """The form in which hosts compare. Raises FetchFailed for what is no host, or another spelling of an address."""
    host = text.lower()
    try:
        if host.startswith("["):
            address = IPv6Address(host[1:-1])
            if address.ipv4_mapped is not None:
                raise ValueError(host)
            return address.compressed
        if not host.isascii():
            host = _name_to_ascii(host)
        if len(host) > 253 or not _NAME.fullmatch(host):
            raise ValueError(host)
        # Resolvers take 127.1, 2130706433 and 0x7f.1 for addresses; this takes four numbers in decimal only.
        return str(IPv4Address(host)) if _is_number(host) else host
    except ValueError:
        raise FetchFailed("The URL's host is not a name, nor an address in its usual spelling.") from None


def _is_number(host: str) -> bool:
    return _NUMBER.fullmatch(host.rpartition(".")[2]) is not None


def _name_to_ascii(name: str) -> str:
    """Strictly as IDNA 2008 has it, without the mapping of look-alikes that makes 127.0.0.1 of circled digits."""
    if len(name) > 253 or _OTHER_DOTS.search(name):
        raise ValueError(name)
    for label in name.split("."):
        scripts = {unicodedata.name(char, "").partition(" ")[0] for char in label if char.isalpha()}
        if len(scripts & _LOOKALIKE_SCRIPTS) > 1:
            raise ValueError(name)
    return idna.encode(name).decode("ascii")
