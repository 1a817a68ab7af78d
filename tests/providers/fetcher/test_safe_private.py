"""Safe, where the run config itself says that a URL is of a private network: that opens this URL, and nothing else."""

from dataclasses import replace

from apis.documents.fetcher import FetchRequest
from providers.fetcher.safe import GuardedFetcher
from tests.support.servers.fetcher_hosts import Canary, Site, answers, failure_of


async def test_a_private_url_is_reached_at_its_port_and_only_by_who_says_so(site: Site) -> None:
    resolve, _ = answers(["127.0.0.2"])
    safe = GuardedFetcher(GuardedFetcher.Config(allowed_hosts=["elsewhere.example"]), resolve)
    await safe.start()
    try:
        url = site.page("/hook", "ok")
        outgoing = FetchRequest(url, "POST", body=b"{}", allow_private=True)
        assert (await safe.fetch(outgoing)).body == b"ok"
        named = replace(outgoing, url=f"http://receiver.internal:{site.port}/hook")
        assert (await safe.fetch(named)).status == 200
        await failure_of(safe, url)
    finally:
        await safe.close()


async def test_denied_networks_stay_denied_for_private_urls(site: Site) -> None:
    safe = GuardedFetcher(GuardedFetcher.Config.model_validate({"denied_networks": ["127.0.0.2/32"]}))
    await safe.start()
    try:
        await failure_of(safe, site.page("/hook", "ok"), allow_private=True)
    finally:
        await safe.close()
    assert site.requests == []


async def test_a_redirect_ends_the_access_to_private_networks(site: Site, canary: Canary) -> None:
    safe = GuardedFetcher(GuardedFetcher.Config())
    await safe.start()
    try:
        await failure_of(safe, site.redirect("/hook", f"http://127.0.0.1:{canary.port}/", 307), allow_private=True)
    finally:
        await safe.close()
    assert canary.connections == 0
