"""Safe against real servers: where it never goes, and what it never shows."""

import asyncio
import logging
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from apis.documents.fetcher import FetchRequest
from apis.errors import FetchFailed
from providers.common.net.addresses import AddressPolicy
from providers.fetcher.safe import GuardedFetcher
from tests.support.servers.fetcher_hosts import SITE, Canary, Site, answers, failure_of, fetch, fetching, raw_server
from tests.support.servers.forbidden_urls import forbidden

REDIRECTS = (301, 302, 303, 307, 308)


async def test_no_forbidden_url_is_ever_connected_to(canary: Canary, site: Site) -> None:
    urls = forbidden(canary.port)
    async with fetching([canary.port, site.port, 80, 443]) as safe:
        for url in urls:
            await failure_of(safe, url)
    assert len(urls) > 110
    assert canary.connections == 0


async def test_no_redirect_leads_to_a_forbidden_url(canary: Canary, site: Site) -> None:
    async with fetching([canary.port, site.port, 80, 443]) as safe:
        for number, url in enumerate(forbidden(canary.port)):
            if not url.isprintable() or not url.isascii() or len(url) > 4096 or not url:
                continue  # no header can carry it
            start = site.redirect("/away", f"//{url}" if url.startswith("127.") else url, REDIRECTS[number % 5])
            with suppress(FetchFailed):
                # Some have no host of their own as a Location, and lead to the site itself.
                assert (await fetch(safe, start)).url.startswith(f"{site.url}/")
    assert canary.connections == 0


@pytest.mark.parametrize("status", REDIRECTS)
async def test_every_kind_of_redirect_is_checked_again(canary: Canary, site: Site, status: int) -> None:
    async with fetching([canary.port, site.port]) as safe:
        first = site.redirect("/first", "/second", status)
        site.redirect("/second", f"http://127.0.0.1:{canary.port}/", status)
        assert "not of the public internet" in await failure_of(safe, first)
    assert canary.connections == 0


async def test_refresh_headers_and_meta_refresh_are_not_followed(canary: Canary, site: Site) -> None:
    there = f"http://127.0.0.1:{canary.port}/"
    url = site.page("/", f'<meta http-equiv=refresh content="0;url={there}">', Refresh=f"0; url={there}")
    async with fetching([canary.port, site.port]) as safe:
        assert (await fetch(safe, url)).status == 200
    assert canary.connections == 0


async def test_a_name_with_one_address_that_is_not_public_is_refused_whole(canary: Canary, site: Site) -> None:
    for bad in ("127.0.0.1", "::1", "10.0.0.1", "fe80::1%2", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "no address"):
        resolve, _ = answers([SITE, bad, SITE])
        async with fetching([canary.port, site.port], resolve) as safe:
            assert "not of the public internet" in await failure_of(safe, f"http://mixed.example:{site.port}/")
    assert canary.connections == 0
    assert not site.requests


async def test_a_name_that_moves_after_it_was_checked_is_not_followed_there(canary: Canary, site: Site) -> None:
    site.page("/", "the page")
    site.redirect("/again", f"http://moving.example:{canary.port}/")
    resolve, resolved_hosts = answers([SITE], ["127.0.0.1"])
    async with fetching([canary.port, site.port], resolve) as safe:
        assert (await fetch(safe, f"http://moving.example:{site.port}/")).body == b"the page"
        assert resolved_hosts == ["moving.example"]
        await failure_of(safe, f"http://moving.example:{site.port}/")
    resolve, resolved_hosts = answers([SITE], ["127.0.0.1"])
    async with fetching([canary.port, site.port], resolve) as safe:
        await failure_of(safe, f"http://moving.example:{site.port}/again")
        assert resolved_hosts == ["moving.example", "moving.example"]
    assert canary.connections == 0


async def test_the_socket_itself_refuses_an_address_that_passed_every_other_check(canary: Canary) -> None:
    class Careless(GuardedFetcher):
        async def _resolve_host(self, policy: AddressPolicy, host: str, port: int) -> list[str]:
            return ["127.0.0.1"]

    safe = Careless(GuardedFetcher.Config(allowed_ports=[canary.port]))
    await safe.start()
    try:
        await failure_of(safe, f"http://careless.example:{canary.port}/")
    finally:
        await safe.close()
    assert canary.connections == 0


async def test_proxies_and_passwords_of_the_environment_are_ignored(
    canary: Canary, site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".netrc").write_text(f"machine {SITE} login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{canary.port}")
        monkeypatch.setenv(name.lower(), f"http://127.0.0.1:{canary.port}")
    async with fetching([site.port]) as safe:
        await fetch(safe, site.page("/", "x"))
    assert canary.connections == 0
    assert "Authorization" not in site.requests[0][2]


async def test_a_port_that_is_not_listed_is_refused(site: Site) -> None:
    async with fetching([80, 443]) as safe:
        assert "is not open to fetching" in await failure_of(safe, site.page("/", "x"))
    assert not site.requests


async def test_denied_networks_win_over_opened_ones(site: Site) -> None:
    async with fetching([site.port], denied_networks=["127.0.0.2/31"]) as safe:
        await failure_of(safe, site.page("/", "x"))
    assert not site.requests


async def test_only_listed_hosts_are_fetched_from_if_the_config_has_a_list(site: Site) -> None:
    site.page("/", "x")
    site.redirect("/away", f"http://evil.test:{site.port}/")
    resolve, _ = answers([SITE])
    async with fetching([site.port], resolve, allowed_hosts=["Good.Test", "bücher.test"]) as safe:
        for host in ("good.test", "www.good.test", "GOOD.test", "xn--bcher-kva.test"):
            assert (await fetch(safe, f"http://{host}:{site.port}/")).status == 200
        for host in ("evilgood.test", "good.test.evil.test", SITE):
            assert "not one of those" in await failure_of(safe, f"http://{host}:{site.port}/")
        assert "not one of those" in await failure_of(safe, f"http://good.test:{site.port}/away")


async def test_leaving_a_stream_closes_the_connection(site: Site, safe: GuardedFetcher) -> None:
    async with safe.open(FetchRequest(site.endless("/", b"x", 0.02, {}))) as incoming:
        assert (incoming.status, await anext(aiter(incoming.chunks))) == (200, b"x")
        assert not site.dropped.is_set()
    async with asyncio.timeout(5):
        await site.dropped.wait()


async def test_cancelling_a_fetch_closes_the_connection(site: Site, safe: GuardedFetcher) -> None:
    fetched = asyncio.ensure_future(fetch(safe, site.endless("/", b"x", 0.02, {})))
    async with asyncio.timeout(5):
        await site.reached.wait()
        fetched.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetched
        await site.dropped.wait()


async def test_an_error_of_the_code_that_reads_a_stream_is_not_reworded(site: Site, safe: GuardedFetcher) -> None:
    url = site.page("/", "x")
    for error in (TimeoutError("mine"), OSError("mine"), ValueError("mine")):
        with pytest.raises(type(error), match="mine"):
            async with safe.open(FetchRequest(url)):
                raise error


async def test_secrets_are_in_no_failure_and_in_no_log(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with raw_server(b"garbage\r\n\r\n") as (url, port), fetching([port]) as safe:
        with pytest.raises(FetchFailed) as failure:
            await fetch(safe, f"{url}/?q=HIDDEN", headers={"Authorization": "HIDDEN"}, method="POST", body=b"HIDDEN")
    # The lines of this very file are in a traceback, those of others are not to add to them.
    lines = "".join(traceback.format_exception(failure.value)).splitlines()
    assert [line for line in lines if "HIDDEN" in line and "await fetch(" not in line] == []
    assert "HIDDEN" not in caplog.text


async def test_safe_can_be_closed_twice_and_without_a_start() -> None:
    safe = GuardedFetcher(GuardedFetcher.Config())
    await safe.close()
    await safe.start()
    await safe.close()
    await safe.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_hosts": ["127.1"]},
        {"allowed_hosts": ["https://a.test"]},
        {"allowed_private_networks": ["10.0.0.1/8"]},
        {"denied_networks": ["example.com"]},
        {"allowed_ports": []},
        {"allowed_ports": [0]},
        {"max_redirects": -1},
        {"user_agent": "a\r\nb"},
    ],
    ids=str,
)
def test_configs_that_mean_nothing_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        GuardedFetcher.Config.model_validate(fields)
