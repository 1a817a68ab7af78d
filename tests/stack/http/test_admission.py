"""Heads of requests that are refused before routing: HTTP itself, Host, Origin and CORS, methods, encodings."""

import pytest

from tests.stack.http.raw import HELLO, KEYS, ask, bearer, check_error, send
from tests.support.servers.serving import Served, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("method", ["PUT", "PATCH"])
async def test_a_405_names_the_methods_that_there_are(local: Served, method: str) -> None:
    """A 405 has `Allow`."""
    answer = await ask(local.url, HELLO, method=method, path="/v1/responses/resp_1")
    check_error(answer, 405)
    assert answer.headers["allow"] == "DELETE, GET, HEAD"


async def test_a_websocket_that_a_proxy_did_not_pass_on_is_explained(local: Served) -> None:
    """The 405 for a WebSocket's path names the headers that a proxy drops."""
    handshake = [("sec-websocket-key", "x"), ("sec-websocket-version", "13")]
    error = check_error(await ask(local.url, method="GET", kind=None, headers=handshake), 405)
    assert "`Upgrade: websocket`" in error["message"]
    assert "proxy" in error["message"]


@pytest.mark.parametrize("encoding", ["gzip", "br", "nonsense"])
async def test_an_encoded_body_is_refused_by_the_name_of_its_encoding(local: Served, encoding: str) -> None:
    """`Content-Encoding` is a 415 that names it."""
    error = check_error(await ask(local.url, b"\x1f\x8b", headers=[("content-encoding", encoding)]), 415)
    assert encoding in error["message"]
    assert (await ask(local.url, HELLO, headers=[("content-encoding", "identity")])).status == 200


HEADS = {
    "two hosts": (b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nhost: localhost\r\n", 400),
    "no host": (b"GET /v1/models HTTP/1.1\r\n", 400),
    "HTTP/2.0": (b"GET /v1/models HTTP/2.0\r\nhost: localhost\r\n", 400),
    "no HTTP": (b"GET /v1/models\x01 HTTP/1.1\r\n", 400),
    "70 KB": (b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nx: " + b"x" * 70_000 + b"\r\n", 431),
    "5,000 lines": (b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n" + b"a:\r\n" * 5000, 431),
}


@pytest.mark.parametrize(("head", "status"), HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("keys", [True, False])
async def test_a_head_that_cannot_be_right_is_refused(
    locked: Served, local: Served, head: bytes, status: int, keys: bool
) -> None:
    """With and without keys, and in OpenAI's form."""
    answer = await send(
        locked.url if keys else local.url, head + b"authorization: Bearer sk-one\r\nconnection: close\r\n\r\n"
    )
    assert answer.status == status
    assert answer.json["error"]["type"] == "invalid_request_error"


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["evil@127.0.0.1", "127.0.0.1, evil", "127.0.0.1:80:80", "127.0.0.1/", "[::1", "localhost:x"]
)
async def test_a_host_header_is_one_name_and_one_port(local: Served, host: str) -> None:
    """A name that only a lenient parser takes for a loopback name is none."""
    check_error(await ask(local.url, HELLO, headers=[("host", host)]), 403)


@pytest.mark.parametrize("path", ["/v1/responses?search=secret", "/v1/models", "/healthz"])
async def test_a_page_of_another_site_cannot_measure_a_server_without_keys(local: Served, path: str) -> None:
    """A browser says where a GET comes from, also without Origin; other clients do not send the header."""
    for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200), ("", 200)):
        headers = [("sec-fetch-site", site)] if site else []
        answer = await ask(local.url, method="GET", path=path, headers=headers, kind=None)
        assert answer.status == status, site
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"


async def test_a_page_that_may_call_sends_its_origin() -> None:
    """The page of an origin in `cors_origins`, and any page where all are allowed."""
    site = ("sec-fetch-site", "cross-site")
    for origins, headers, status in (
        ([PAGE], [site, ("origin", PAGE)], 200),
        ([PAGE], [site], 403),
        (["*"], [site], 200),
    ):
        async with serving(server={"cors_origins": origins}) as served:
            answer = await ask(served.url, method="GET", path="/v1/models", headers=headers, kind=None)
            assert answer.status == status
    async with serving(server={"api_keys": ["sk-one"]}) as served:  # the key decides
        headers = [site, ("authorization", "Bearer sk-one")]
        assert (await ask(served.url, method="GET", path="/v1/models", headers=headers, kind=None)).status == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:1234", "localhost", "LOCALHOST:80", "[::1]", "[::1]:8321"])
async def test_loopback_names_are_let_in(local: Served, host: str) -> None:
    assert (await ask(local.url, HELLO, headers=[("host", host)])).status == 200


@pytest.mark.parametrize(
    "host",
    [
        *(
            "evil.example",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            "evil.example:8321",
            "localhost@evil.example",
        ),
        *(
            "",
            "[::1",
            "[",
            "a]b",
            "127.0.0.2",
            "2130706433",
            "0.0.0.0",
            "\xff",
            "loc\xaalhost",
            "%6cocalhost",
        ),
    ],
)
@pytest.mark.parametrize("path", ["/v1/responses", "/healthz", "/nothing"])
async def test_a_foreign_host_is_refused_everywhere(local: Served, host: str, path: str) -> None:
    answer = await ask(local.url, HELLO, path=path, headers=[("host", host)])
    error = check_error(answer, 403)
    assert (error["type"], error["code"]) == ("permission_error", None)


async def test_pages_of_the_server_itself_may_call(local: Served) -> None:
    assert (await ask(local.url, HELLO, headers=[("origin", local.url)])).status == 200
    proxied_headers = [("host", "localhost"), ("origin", "https://localhost")]
    assert (await ask(local.url, HELLO, headers=proxied_headers)).status == 200


@pytest.mark.parametrize(
    "origin",
    [
        *("https://evil.example", "null", "", "file://", "http://[", "http://localhost.evil.example"),
        *("chrome-extension://abc", "localhost", "http://localhost:3000", "https://127.0.0.1", "http://[::1]:5173"),
    ],
)
async def test_pages_from_elsewhere_may_not(local: Served, origin: str) -> None:
    """A page of another port of this machine is one from elsewhere, for WebSockets, too."""
    error = check_error(await ask(local.url, HELLO, headers=[("origin", origin)]), 403)
    assert "server.cors_origins" in error["message"]
    upgrade = [("upgrade", "websocket"), ("connection", "upgrade"), ("sec-websocket-version", "13")]
    key = ("sec-websocket-key", "x3JJHMbDL1EzLkh9GBhXDw==")
    check_error(await ask(local.url, method="GET", headers=[*upgrade, key, ("origin", origin)], kind=None), 403)


PAGE = "http://localhost:3000"
PREFLIGHT = [
    ("origin", PAGE),
    ("access-control-request-method", "POST"),
    ("access-control-request-headers", "authorization,content-type"),
]


@pytest.mark.parametrize("origins", [[PAGE], ["*"]])
async def test_pages_of_listed_origins_may_call_from_a_browser(origins: list[str]) -> None:
    """CORS is a setting; a preflight needs no key, and errors can be read by the page, too."""
    async with serving(server={"api_keys": KEYS, "cors_origins": origins}) as served:
        preflight = await ask(served.url, method="OPTIONS", headers=PREFLIGHT, kind=None)
        assert preflight.status == 204
        assert preflight.headers["access-control-allow-headers"] == "authorization,content-type"
        assert "POST" in preflight.headers["access-control-allow-methods"]
        for key, status in (("sk-one", 200), ("sk-three", 401)):
            answer = await ask(served.url, HELLO, headers=[("origin", PAGE), *bearer(key)])
            assert answer.status == status
            assert answer.headers["access-control-allow-origin"] == ("*" if "*" in origins else PAGE)
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
        if "*" not in origins:
            foreign = [("origin", "https://evil.example"), *PREFLIGHT[1:]]
            refused = await ask(served.url, method="OPTIONS", headers=foreign, kind=None)
            check_error(refused, 401)
            assert "access-control-allow-origin" not in refused.headers
            assert refused.headers["vary"] == "Origin"


async def test_listed_origins_may_call_a_server_without_keys() -> None:
    """S15, O-A 12."""
    async with serving(server={"cors_origins": [PAGE]}) as served:
        assert (await ask(served.url, HELLO, headers=[("origin", PAGE)])).status == 200
        check_error(await ask(served.url, HELLO, headers=[("origin", "http://localhost:3001")]), 403)


async def test_no_answer_invites_other_origins(local: Served) -> None:
    for method in ("OPTIONS", "POST"):
        headers = [("origin", local.url), ("access-control-request-method", "POST")]
        answer = await ask(local.url, HELLO, method=method, headers=headers)
        assert not [name for name in answer.headers if name.startswith("access-control-")]


@pytest.mark.parametrize(
    ("allowed", "host", "status"),
    [
        (["stack.example"], "stack.example", 200),
        (["Stack.Example"], "STACK.example:443", 200),
        (["stack.example"], "localhost", 200),
        (["stack.example"], "other.example", 403),
        (["*"], "other.example", 200),
    ],
)
async def test_more_hosts_can_be_allowed(allowed: list[str], host: str, status: int) -> None:
    async with serving(server={"allowed_hosts": allowed}) as served:
        assert (await ask(served.url, HELLO, headers=[("host", host)])).status == status


async def test_with_keys_hosts_are_checked_where_the_config_names_some(locked: Served) -> None:
    foreign = [("host", "other.example"), *bearer("sk-one")]
    assert (await ask(locked.url, HELLO, headers=foreign)).status == 200
    async with serving(server={"api_keys": KEYS, "allowed_hosts": ["stack.example"]}) as served:
        check_error(await ask(served.url, HELLO, headers=foreign), 403)
