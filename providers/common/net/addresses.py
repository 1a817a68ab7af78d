"""Address policy: the IP addresses that a URL, or a program in a sandbox, may lead to."""

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final

import psutil

IPNetwork = IPv4Network | IPv6Network
IPAddress = IPv4Address | IPv6Address

# `ipaddress.is_global` calls several of these global, and differs between versions of Python.
DENIED_NETWORKS: Final[tuple[IPNetwork, ...]] = tuple(
    ip_network(network)
    for network in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "168.63.129.16/32",  # a public address, but within Azure it gives a machine its settings
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
        # The public internet of IPv6 is 2000::/3: all else is denied, and special networks within it.
        "::/3",
        "4000::/2",
        "8000::/1",
        "2001::/23",
        "2001:db8::/32",
        "2002::/16",
        "3fff::/20",
    )
)
_NAT64: Final = IPv6Network("64:ff9b::/96")


class AddressPolicy:
    """The addresses that may be connected to: those of the public internet except this machine's own, plus
    `allowed_networks`, minus `denied_networks`."""

    def __init__(self, allowed_networks: Sequence[IPNetwork], denied_networks: Sequence[IPNetwork]) -> None:
        self._allowed_networks = allowed_networks
        self._denied_networks = denied_networks

    def is_refused(self, text: str) -> bool:
        """Return True when no connection to this address may be opened. Text that is no address is refused."""
        try:
            address = _parse_address(text)
        except ValueError:
            return True
        if any(address in network for network in self._denied_networks):
            return True
        if any(address in network for network in self._allowed_networks):
            return False
        return any(address in network for network in DENIED_NETWORKS) or address in _local_addresses()


def _parse_address(text: str) -> IPAddress:
    """Parse an address; one of IPv4 within IPv6 becomes IPv4. Raises ValueError, also for an address with a zone."""
    if "%" in text:
        raise ValueError(text)
    address = ip_address(text)
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in _NAT64:
            return IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def _local_addresses() -> set[IPAddress]:
    """Return this machine's own addresses. Read at each check, because they change while a server runs."""
    addresses: set[IPAddress] = set()
    for interface in psutil.net_if_addrs().values():
        for entry in interface:
            try:
                addresses.add(ip_address(entry.address.partition("%")[0]))
            except ValueError:
                continue  # the hardware address of a network card
    return addresses
