"""The one reader of host names from outside: names in ASCII and lower case, and addresses in their usual spelling."""

import re
import unicodedata
from ipaddress import IPv4Address, IPv6Address
from typing import Final

import idna

_NAME: Final = re.compile(r"(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")
_OTHER_DOTS: Final = re.compile(r"[\u3002\uff0e\uff61]")
_LOOKALIKE_SCRIPTS: Final = frozenset({"LATIN", "GREEK", "CYRILLIC", "ARMENIAN", "COPTIC", "CHEROKEE"})


def text_to_host(text: str) -> str:
    """Return the canonical form of a host. Raises ValueError for text that is no host, and for an address in another
    than its usual spelling."""
    host = text.lower()
    if host.startswith("["):
        address = IPv6Address(host[1:-1])
        if address.ipv4_mapped is not None or not host.endswith("]"):
            raise ValueError(host)
        return address.compressed
    if not host.isascii():
        host = _name_to_ascii(host)
    if len(host) > 253 or not _NAME.fullmatch(host):
        raise ValueError(host)
    # Resolvers read 127.1, 2130706433 and 0x7f.1 as addresses; only four decimal numbers are accepted here.
    return str(IPv4Address(host)) if _is_number(host) else host


def is_address(host: str) -> bool:
    """Return True for a host in canonical form that is an address, not a name."""
    return ":" in host or _is_number(host)


def _is_number(host: str) -> bool:
    return _NUMBER.fullmatch(host.rpartition(".")[2]) is not None


def _name_to_ascii(name: str) -> str:
    """Encode a name by strict IDNA 2008. The look-alike mapping of UTS 46 would turn circled digits into 127.0.0.1."""
    if len(name) > 253 or _OTHER_DOTS.search(name):
        raise ValueError(name)
    for label in name.split("."):
        scripts = {unicodedata.name(char, "").partition(" ")[0] for char in label if char.isalpha()}
        if len(scripts & _LOOKALIKE_SCRIPTS) > 1:
            raise ValueError(name)
    return idna.encode(name).decode("ascii")
