"""Which addresses are refused, and how URLs are read: tables of both."""

import socket
from ipaddress import ip_network
from types import SimpleNamespace

import psutil
import pytest

from apis.errors import FetchFailed
from providers.common.net.addresses import DENIED_NETWORKS, AddressPolicy
from providers.fetcher.targets import resolve_redirect, url_to_target


@pytest.mark.parametrize("network", DENIED_NETWORKS, ids=str)
def test_both_ends_of_every_denied_network_are_refused(network: object) -> None:
    denied = ip_network(str(network))
    addresses = AddressPolicy([], [])
    assert addresses.is_refused(str(denied[0]))
    assert addresses.is_refused(str(denied[-1]))


@pytest.mark.parametrize(
    ("address", "refused"),
    [
        ("8.8.8.8", False),
        ("9.255.255.255", False),
        ("11.0.0.0", False),
        ("172.15.255.255", False),
        ("172.32.0.0", False),
        ("223.255.255.255", False),
        ("2606:4700::1111", False),
        ("2001:200::1", False),
        ("::ffff:8.8.8.8", False),
        ("64:ff9b::8.8.8.8", False),
        ("::ffff:127.0.0.1", True),
        ("::ffff:0:127.0.0.1", True),
        ("64:ff9b::127.0.0.1", True),
        ("64:ff9b::a00:1", True),
        ("64:ff9b:1::808:808", True),
        ("2002:808:808::", True),
        ("::8.8.8.8", True),
        ("fe80::1%eth0", True),
        ("2606:4700::1111%1", True),
        ("fec0::1", True),
        ("192.0.0.8", True),
        ("127.1", True),
        ("localhost", True),
        ("", True),
    ],
)
def test_only_the_public_internet_is_let_through(address: str, refused: bool) -> None:
    assert AddressPolicy([], []).is_refused(address) is refused


def test_this_machines_own_addresses_are_refused_public_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = [
        SimpleNamespace(family=socket.AF_INET, address="8.8.8.8"),
        SimpleNamespace(family=socket.AF_INET6, address="2606:4700::1111%eth0"),
        SimpleNamespace(family=psutil.AF_LINK, address="00:00:00:00:00:00"),
    ]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": bound})
    addresses = AddressPolicy([], [])
    refused = [
        address
        for address in ("8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "8.8.4.4")
        if addresses.is_refused(address)
    ]
    assert refused == ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8"]


def test_allowed_networks_are_let_through_except_denied_ones() -> None:
    addresses = AddressPolicy([ip_network("10.0.0.0/8"), ip_network("fd00::/8")], [ip_network("10.1.0.0/16")])
    assert not addresses.is_refused("10.2.0.1")
    assert not addresses.is_refused("::ffff:10.2.0.1")
    assert not addresses.is_refused("fd00::1")
    assert addresses.is_refused("10.1.0.1")
    assert addresses.is_refused("64:ff9b::10.1.0.1")
    assert addresses.is_refused("192.168.0.1")


@pytest.mark.parametrize(
    ("url", "read"),
    [
        ("http://Example.COM", "http://example.com/"),
        ("HTTPS://example.com:443/a?b=c#d", "https://example.com/a?b=c"),
        ("http://example.com:8080?x", "http://example.com:8080/?x"),
        ("https://bücher.example/ü?ö=%C3%A4", "https://xn--bcher-kva.example/%C3%BC?%C3%B6=%C3%A4"),
        ("https://my_bucket.example/a//b/../c", "https://my_bucket.example/a//b/../c"),
        ("https://8.8.8.8/", "https://8.8.8.8/"),
        ("https://[2606:4700:0:0::1111]/", "https://[2606:4700::1111]/"),
        ("https://日本語.example/", "https://xn--wgv71a119e.example/"),
        ("https://a.example/?q=a|b[c]{d}^`<>\"'", "https://a.example/?q=a|b[c]{d}^`<>\"'"),
    ],
)
def test_urls_are_read_in_one_way(url: str, read: str) -> None:
    assert url_to_target(url).url == read
    assert url_to_target(read).url == read


@pytest.mark.parametrize(
    ("location", "leads_to"),
    [
        ("/x", "https://a.example/x"),
        ("x?y", "https://a.example/dir/x?y"),
        ("//b.example", "https://b.example/"),
        ("https://b.example:444/#z", "https://b.example:444/"),
        ("", "https://a.example/dir/page"),
    ],
)
def test_redirects_are_read_from_where_they_are(location: str, leads_to: str) -> None:
    assert resolve_redirect(url_to_target("https://a.example/dir/page"), location).url == leads_to


@pytest.mark.parametrize(
    "location", ["http://a.example/", "ftp://a.example/", "https://127.1/", "https://u@a.example/"]
)
def test_redirects_to_urls_that_are_refused_by_themselves_are_refused(location: str) -> None:
    with pytest.raises(FetchFailed):
        resolve_redirect(url_to_target("https://a.example/dir/page"), location)
