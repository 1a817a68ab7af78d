"""Safe along redirects and over TLS: which headers and bodies go to which origin."""

import ssl
from pathlib import Path

import pytest

from providers.fetcher.safe import GuardedFetcher
from tests.support.servers.fetcher_hosts import SITE, Site, answers, certificate, failure_of, fetch, fetching


async def test_redirects_are_followed_and_the_last_url_is_returned(site: Site, safe: GuardedFetcher) -> None:
    start = site.redirect("/a", "b?x=1#part")
    site.redirect("/b", f"{site.url}/ü/c")
    site.page("/ü/c", "here")
    fetched = await fetch(safe, f"{start}#other")
    assert (fetched.url, fetched.body) == (f"{site.url}/%C3%BC/c", b"here")


async def test_a_redirect_that_shall_not_be_followed_is_returned(site: Site, safe: GuardedFetcher) -> None:
    fetched = await fetch(safe, site.redirect("/a", "/b"), follow_redirects=False)
    assert (fetched.status, fetched.headers["location"]) == (302, "/b")


async def test_loops_and_long_ways_of_redirects_end(site: Site, safe: GuardedFetcher) -> None:
    assert "more than 5 times" in await failure_of(safe, site.redirect("/loop", "/loop"))
    assert len(site.requests) == 6


@pytest.mark.parametrize(
    "location", ["http://[::1", "a b", "\\\\evil.test\\x", "https://", "file:///etc/passwd", "x" * 8193]
)
async def test_redirects_to_text_that_is_no_url_are_refused(site: Site, safe: GuardedFetcher, location: str) -> None:
    await failure_of(safe, site.redirect("/a", location))


async def test_credentials_stay_with_their_origin(site: Site) -> None:
    headers = {"Authorization": "Bearer s", "Cookie": "a=b", "X-Api-Key": "k", "Accept": "text/html", "X-Any": "y"}
    resolve, _ = answers([SITE])
    async with Site() as other, fetching([site.port, other.port], resolve) as safe:
        other.page("/there", "x")
        site.redirect("/near", "/away")
        site.redirect("/away", f"http://{SITE}:{other.port}/there")
        await fetch(safe, f"{site.url}/near", headers=headers)
        assert [{name: request[2].get(name) for name in headers} for request in site.requests] == [
            headers,
            headers,
        ]
        sent_headers = other.requests[0][2]
        assert {name for name in headers if name in sent_headers} == {"Accept"}
        other.redirect("/back", f"{site.url}/near", 307)
        site.requests.clear()
        await fetch(safe, f"{other.url}/back", headers=headers)
        assert all("Authorization" not in request[2] and "X-Api-Key" not in request[2] for request in site.requests)


async def test_the_same_address_under_another_name_is_another_origin(site: Site) -> None:
    site.page("/there", "x")
    site.redirect("/away", f"http://b.test:{site.port}/there")
    resolve, _ = answers([SITE])
    async with fetching([site.port], resolve) as safe:
        await fetch(safe, f"http://a.test:{site.port}/away", headers={"Authorization": "s"})
    assert [("Authorization" in request[2], request[2]["Host"]) for request in site.requests] == [
        (True, f"a.test:{site.port}"),
        (False, f"b.test:{site.port}"),
    ]


@pytest.mark.parametrize(
    ("status", "method", "then"),
    [
        (301, "POST", "GET"),
        (302, "POST", "GET"),
        (303, "PUT", "GET"),
        (303, "HEAD", "HEAD"),
        (301, "PUT", "PUT"),
        (307, "POST", "POST"),
        (308, "POST", "POST"),
    ],
)
async def test_methods_and_bodies_go_along_as_browsers_do_it(
    site: Site, safe: GuardedFetcher, status: int, method: str, then: str
) -> None:
    site.page("/b", "x")
    body = None if method == "HEAD" else b"body"
    await fetch(safe, site.redirect("/a", "/b", status), method=method, body=body, headers={"Content-Type": "a/b"})
    assert [(request[0], request[3]) for request in site.requests] == [
        (method, body or b""),
        (then, b"body" if then == method and body else b""),
    ]


async def test_a_body_is_not_sent_on_to_another_origin(site: Site) -> None:
    async with Site() as other, fetching([site.port, other.port]) as safe:
        url = site.redirect("/a", f"{other.url}/", 307)
        assert "redirects what was sent" in await failure_of(safe, url, method="POST", body=b"secret")
        assert not other.requests


async def test_headers_that_frame_a_message_are_not_the_callers(site: Site, safe: GuardedFetcher) -> None:
    headers = {
        "Host": "evil.test",
        "Connection": "upgrade",
        "Transfer-Encoding": "chunked",
        "Content-Length": "9",
        "Proxy-Authorization": "s",
        "Accept-Encoding": "br",
    }
    await fetch(safe, site.page("/", "x"), headers=headers)
    sent_headers = site.requests[0][2]
    assert sent_headers["Host"] == f"{SITE}:{site.port}"
    assert sent_headers["Accept-Encoding"] == "gzip, deflate"
    assert not [
        name
        for name in ("Transfer-Encoding", "Content-Length", "Proxy-Authorization", "Cookie")
        if name in sent_headers
    ]


@pytest.mark.parametrize(
    "headers", [{"A": "x\r\nB: y"}, {"A\nB": "x"}, {"": "x"}, {"A": "\0"}, {"A b": "x"}, {"A": "\udc00"}]
)
async def test_headers_that_would_break_a_request_are_refused(
    site: Site, safe: GuardedFetcher, headers: dict[str, str]
) -> None:
    await failure_of(safe, site.page("/", "x"), headers=headers)
    assert not site.requests


@pytest.mark.parametrize("method", ["CONNECT", "TRACE", "get", "GET / HTTP/1.1\r\n", ""])
async def test_other_methods_are_refused(site: Site, safe: GuardedFetcher, method: str) -> None:
    await failure_of(safe, site.page("/", "x"), method=method)
    assert not site.requests


async def test_cookies_are_neither_stored_nor_returned(site: Site, safe: GuardedFetcher) -> None:
    url = site.page("/", "x", Set_Cookie="a=b", X_Shown="ü")
    fetched = await fetch(safe, url)
    await fetch(safe, url)
    assert "set-cookie" not in fetched.headers
    assert fetched.headers["x-shown"] == "ü"
    assert "Cookie" not in site.requests[1][2]


async def test_a_certificate_is_verified_against_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cert, key = await certificate(tmp_path, "secure.test")
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    names: list[str | None] = []
    context.sni_callback = lambda connection, name, _: names.append(name)
    resolve, _ = answers([SITE])
    async with Site(context) as site, Site() as plain, fetching([site.port, plain.port], resolve) as safe:
        site.page("/", "safe")
        assert (await fetch(safe, f"https://secure.test:{site.port}/")).body == b"safe"
        assert names == ["secure.test"]
        assert site.requests[0][2]["Host"] == f"secure.test:{site.port}"
        for host in ("other.test", SITE):
            assert "certificate" in await failure_of(safe, f"https://{host}:{site.port}/")
        site.redirect("/down", f"http://secure.test:{plain.port}/")
        assert "from https to http" in await failure_of(safe, f"https://secure.test:{site.port}/down")
        plain.redirect("/up", f"https://secure.test:{site.port}/")
        assert (await fetch(safe, f"http://secure.test:{plain.port}/up")).body == b"safe"
        assert len(plain.requests) == 1
