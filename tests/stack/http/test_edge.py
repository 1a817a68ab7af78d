"""Who comes in, by which name and path, and how much they may send."""

import asyncio
import itertools
import json
from typing import Any
from urllib.parse import urlsplit

import pytest

from stack.http.routes.table import API_ROUTES
from stack.serving.connection import HttpServerConnection
from tests.stack.http.raw import HELLO, Answer, ask, bearer, check_error, connection, parse, request, send
from tests.support.servers.serving import Served

pytestmark = pytest.mark.asyncio(loop_scope="module")

# --- keys ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["Bearer sk-one", "bearer sk-one", "BEARER  sk-one ", "Bearer sk-two"])
@pytest.mark.parametrize("prefix", ["/v1", ""])
async def test_a_known_key_lets_in(locked: Served, value: str, prefix: str) -> None:
    answer = await ask(locked.url, HELLO, path=f"{prefix}/responses", headers=[("Authorization", value)])
    assert answer.status == 200


WRONG: dict[str, list[tuple[str, str]]] = {
    "none": [],
    "empty": [("authorization", "")],
    "only the scheme": [("authorization", "Bearer")],
    "no key": [("authorization", "Bearer ")],
    "a wrong key": bearer("sk-three"),
    "the beginning of a key": bearer("sk-on"),
    "more than a key": bearer("sk-onee"),
    "a key in other letters": bearer("SK-ONE"),
    "no scheme": [("authorization", "sk-one")],
    "another scheme": [("authorization", "Basic sk-one")],
    "a tab for a space": [("authorization", "Bearer\tsk-one")],
    "another header": [("api-key", "sk-one"), ("x-api-key", "sk-one")],
    "the header twice": bearer("sk-one") * 2,
    "the header twice, once wrong": bearer("sk-three") + bearer("sk-one"),
    "two keys in one": bearer("sk-one, sk-two"),
    "bytes that are no ASCII": bearer("sk-one\xff"),
    "a key with NBSP": bearer("sk-one\xa0"),
    "a hash": bearer("5b6d9b4e" * 8),
    "a very long key": bearer("x" * 30_000),
    "SQL": bearer("' OR 1=1 --"),
}


@pytest.mark.parametrize("headers", WRONG.values(), ids=WRONG)
async def test_a_request_without_a_known_key_is_refused(locked: Served, headers: list[tuple[str, str]]) -> None:
    answer = await ask(locked.url, HELLO, headers=headers)
    error = check_error(answer, 401)
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "invalid_api_key")
    assert "sk-" not in error["message"]


METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")
ODD_PATHS = (
    *("/", "/v1", "/v1/", "//v1/responses", "/v1//responses", "/v1/../v1/responses", "/./v1/responses"),
    *("/v1%2fresponses", "/%76%31/responses", "/v1/responses/", "/v1/responses.", "/V1/responses", "/v1/responses%00"),
    *("/healthz/", "/healthz/../v1/responses", "/readyz%2f..%2fv1/responses", "//healthz", "/healthz;/v1/responses"),
    *("/docs", "/redoc", "/openapi.json", "/metrics", "/v1/models/../responses", "/v1/models/a/b", "/nothing"),
)
PATHS = (
    *(prefix + route.path.replace("{", "").replace("}", "") for prefix in ("", "/v1") for route in API_ROUTES),
    *ODD_PATHS,
)


async def test_every_path_and_method_wants_a_key(locked: Served) -> None:
    for path, method in itertools.product(PATHS, METHODS):
        answer = await ask(locked.url, b"{}", method=method, path=path)
        assert answer.status in ((400, 401) if method in ("TRACE", "PROPFIND") else (401,)), (method, path, answer)


async def test_with_a_key_unknown_paths_and_methods_have_different_errors(locked: Served) -> None:
    for path in (
        "/v1/nothing",
        "//v1/responses",
        "/v1/../v1/responses",
        "/v1%2f%2fresponses",
        "/docs",
        "/v1/responses/",
    ):
        error = check_error(await ask(locked.url, method="GET", path=path, headers=bearer("sk-one")), 404)
        assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", None, None)
    for method, path in (
        ("GET", "/v1/embeddings"),
        ("PUT", "/responses"),
        ("OPTIONS", "/v1/models"),
        ("DELETE", "/v1/chat/completions"),
    ):
        answer = await ask(locked.url, method=method, path=path, headers=bearer("sk-one"))
        assert method in check_error(answer, 405)["message"]
        assert answer.headers["allow"]


async def test_a_target_with_a_host_of_its_own_wants_a_key(locked: Served) -> None:
    check_error(await ask(locked.url, HELLO, path=f"{locked.url}/v1/responses"), 401)
    upgrade = [
        ("upgrade", "websocket"),
        ("connection", "upgrade"),
        ("sec-websocket-key", "x"),
        ("sec-websocket-version", "13"),
    ]
    check_error(await ask(locked.url, method="GET", headers=upgrade, kind=None), 401)


async def test_a_key_is_of_its_tenant_alone(locked: Served) -> None:
    mine = (await ask(locked.url, HELLO, headers=bearer("sk-one"))).json
    path = f"/v1/responses/{mine['id']}"
    answer = await ask(locked.url, method="GET", path=path, headers=bearer("sk-one"))
    assert answer.json == mine

    async def as_other(method: str, path: str, body: Any = None) -> Answer:
        return await ask(locked.url, body, method=method, path=path, headers=bearer("sk-two"))

    for method, end in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        theirs = await as_other(method, path + end)
        unknown = await as_other(method, f"/v1/responses/resp_{'0' * 32}{end}")
        assert theirs.status == unknown.status == 404
        assert theirs.body.replace(mine["id"].encode(), b"") == unknown.body.replace(b"resp_" + b"0" * 32, b"")
    check_error(await as_other("POST", "/v1/responses", {**HELLO, "previous_response_id": mine["id"]}), 400)
    item = {"type": "item_reference", "id": mine["output"][0]["id"]}
    check_error(await as_other("POST", "/v1/responses", {**HELLO, "input": [item]}), 404)
    assert (await ask(locked.url, method="GET", path=path, headers=bearer("sk-one"))).status == 200


# --- bodies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        *(
            None,
            "",
            "text/plain",
            "application/x-www-form-urlencoded",
            "multipart/form-data; boundary=x",
            "application/jsonx",
        ),
        *(
            "application/json; charset=utf-16",
            "application/json; charset=latin-1",
            "text/json",
            "application/xml, application/json",
        ),
    ],
)
@pytest.mark.parametrize("path", ["/v1/responses", "/chat/completions", "/v1/responses/input_tokens"])
async def test_only_json_is_taken(local: Served, kind: str | None, path: str) -> None:
    error = check_error(await ask(local.url, HELLO, path=path, kind=kind), 415)
    assert error["code"] == "unsupported_media_type"


@pytest.mark.parametrize("length", [[("content-length", "0")], []])
async def test_what_has_no_body_needs_no_type(local: Served, length: list[tuple[str, str]]) -> None:
    """OpenAI's SDK for JavaScript cancels in this form."""
    path = f"/v1/responses/resp_{'0' * 32}/cancel"
    head = request(local.url, path=path, kind=None, headers=[("content-length", "0")])
    if not length:
        head = head.replace(b"content-length: 0\r\n", b"")
    check_error(await send(local.url, head), 404)
    foreign = request(local.url, path=path, kind=None, headers=[("origin", "https://evil.example")])
    check_error(await send(local.url, foreign), 403)


@pytest.mark.parametrize(
    "kind", ["application/json", "Application/JSON; charset=UTF-8", 'application/json;charset="utf-8"']
)
async def test_json_has_several_spellings(local: Served, kind: str) -> None:
    assert (await ask(local.url, HELLO, kind=kind)).status == 200


async def test_a_body_that_is_announced_too_large_is_not_waited_for(local: Served) -> None:
    """The message names the setting."""
    for size in (65537, 10**12):
        head = request(local.url, headers=[("content-length", str(size))])
        error = check_error(await send(local.url, head), 413)
        assert error["code"] == "request_too_large"
        assert "server.max_body_bytes" in error["message"]


async def test_a_chunked_body_is_cut_off_where_it_gets_too_large(local: Served) -> None:
    async with connection(local.url) as (reader, writer):
        writer.write(request(local.url, headers=[("transfer-encoding", "chunked")]))
        for _ in range(17):
            writer.write(b"1000\r\n" + b" " * 4096 + b"\r\n")
        check_error(parse(await reader.read()), 413)


async def test_a_chunked_body_within_the_limit_is_read(local: Served) -> None:
    data = json.dumps(HELLO).encode()
    head = request(local.url, headers=[("transfer-encoding", "chunked")])
    answer = await send(local.url, head + b"".join(b"1\r\n%c\r\n" % byte for byte in data) + b"0\r\n\r\n")
    assert answer.status == 200


FRAMING: dict[str, bytes] = {
    "a negative length": b"content-length: -1\r\n",
    "a length in words": b"content-length: ten\r\n",
    "two lengths": b"content-length: 2\r\ncontent-length: 3\r\n",
    "a length of 2**64": b"content-length: 18446744073709551616\r\n",
    "a length and chunks": b"content-length: 2\r\ntransfer-encoding: chunked\r\n",
    "a header without a colon": b"nonsense\r\n",
    "a space before the colon": b"content-length : 2\r\n",
    "NUL in a header": b"x: a\0b\r\n",
}


@pytest.mark.parametrize("line", FRAMING.values(), ids=FRAMING)
async def test_what_cannot_be_framed_is_refused_and_closed(local: Served, line: bytes) -> None:
    head = b"POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    answer = await send(local.url, head + line + b"\r\n{}")
    assert answer.status == 400
    assert b"Traceback" not in answer.body


@pytest.mark.parametrize(
    "sent", [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"nonsense\r\n\r\n"]
)
async def test_other_protocols_are_closed(local: Served, sent: bytes) -> None:
    async with connection(local.url) as (reader, writer):
        writer.write(sent)
        writer.write_eof()
        assert b" 200 " not in await reader.read()


async def test_a_body_longer_than_announced_does_not_reach_the_next_request(local: Served) -> None:
    body = json.dumps(HELLO).encode()
    head = request(local.url, headers=[("content-length", str(len(body)))])
    answer = await send(local.url, head + body + b"GET /v1/models HTTP/1.1\r\nhost: evil.example\r\n\r\n")
    assert answer.status == 200
    assert b"HTTP/1.1" not in answer.body


async def test_a_client_that_expects_100_continue_gets_it(local: Served) -> None:
    body = json.dumps(HELLO).encode()
    async with connection(local.url) as (reader, writer):
        writer.write(request(local.url, headers=[("content-length", str(len(body))), ("expect", "100-continue")]))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert parse(await reader.read()).status == 200


async def test_one_that_then_sends_nothing_is_closed(local: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HttpServerConnection, "body_s", 0.2)
    async with connection(local.url) as (reader, writer):
        writer.write(request(local.url, headers=[("content-length", "10"), ("expect", "100-continue")]))
        assert b" 200 " not in await reader.read()


# --- ids and order ---------------------------------------------------------------------------------------------------


async def test_every_answer_has_a_request_id_of_its_own(local: Served) -> None:
    requests = [
        *(ask(local.url, HELLO) for _ in range(20)),
        *(ask(local.url, b"{", headers=[("x-request-id", "mine")]) for _ in range(5)),
        *(ask(local.url, method="GET", path=path) for path in ("/healthz", "/readyz", "/v1/models", "/nothing")),
        ask(local.url, {**HELLO, "stream": True}),
    ]
    ids = [answer.headers["x-request-id"] for answer in await asyncio.gather(*requests)]
    assert len(set(ids)) == len(ids) == 30
    assert all(each.startswith("req_") and len(each) == 36 for each in ids)


async def test_pipelined_requests_are_answered_in_order(local: Served) -> None:
    host = urlsplit(local.url).netloc.encode()
    paths = [b"/v1/models", b"/nothing", b"/healthz"] * 10
    async with connection(local.url) as (reader, writer):
        writer.write(b"".join(b"GET %b HTTP/1.1\r\nhost: %b\r\n\r\n" % (path, host) for path in paths))
        statuses: list[int] = []
        for _ in paths:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            statuses.append(int(head.split()[1]))
    assert statuses == [200, 404, 200] * 10
