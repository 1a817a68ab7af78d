"""WebSockets by hand: bad messages and bad clients, who may come in, and how much a client may hold up."""

import asyncio
import json
import logging
import os
import socket
import struct
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from providers.inference.scripted import Scripted
from stack.serving.connection import HttpServerConnection
from stack.serving.socket_connection import WebSocketServerConnection
from tests.stack.http.raw import BOUND_S, Answer, ask, check_error, connection, parse
from tests.support.servers.forked_process import STACK_PROGRAM, forked_process
from tests.support.servers.serving import Served, scripted, serving
from tests.support.waiting import until

ENDLESS: list[dict[str, Any]] = [{"text": "once "}, {"wait_s": 30}, {"text": "more"}]
CREATE: dict[str, Any] = {"type": "response.create", "model": "scripted", "input": "hi"}
UPGRADE = [
    ("connection", "Upgrade"),
    ("upgrade", "websocket"),
    ("sec-websocket-version", "13"),
    ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
]


@asynccontextmanager
async def opened(served: Served, path: str = "/v1/responses", **options: Any) -> AsyncGenerator[ClientConnection]:
    url = served.url.replace("http", "ws", 1) + path
    async with asyncio.timeout(BOUND_S), connect(url, max_size=None, proxy=None, **options) as websocket:
        yield websocket


async def read_event(websocket: ClientConnection) -> Any:
    return json.loads(await websocket.recv())


async def to_the_end(websocket: ClientConnection) -> list[Any]:
    """The events of a response."""
    events = [await read_event(websocket)]
    while events[-1]["type"] not in ("response.completed", "response.failed", "error"):
        events.append(await read_event(websocket))
    return events


async def handshake(served: Served, *more: tuple[str, str], path: str = "/v1/responses", method: str = "GET") -> Answer:
    """Send a handshake that is to be refused, and return the answer."""
    names = {name for name, _ in more}
    fields = [("host", urlsplit(served.url).netloc), *UPGRADE]
    head = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields if name not in names)]
    head += [f"{name}: {value}" for name, value in more]
    async with connection(served.url) as (reader, writer):
        writer.write("\r\n".join([*head, "", ""]).encode("latin-1"))
        return parse(await reader.read())


def model(served: Served) -> Scripted:
    assert isinstance(served.stack.inference, Scripted)
    return served.stack.inference


async def left_early(served: Served, count: int = 1) -> None:
    await until(lambda: model(served).abandoned_chats >= count, within_s=1)


# --- bad messages ----------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[str | bytes, str | None, str | None]] = {
    "nothing": ("", None, None),
    "no JSON": ("{", None, None),
    "an array": ("[]", None, "invalid_type"),
    "a key twice": ('{"type":"a","type":"b"}', None, None),
    "NaN": ('{"type":"response.create","temperature":NaN}', None, None),
    "too deep": ('{"a":' + "[" * 100 + "]" * 100 + "}", None, "invalid_value"),
    "binary": (json.dumps(CREATE).encode(), None, "invalid_type"),
    "no type": ('{"model":"scripted"}', "type", "missing_required_parameter"),
    "an unknown type": ('{"type":"session.update"}', "type", "invalid_value"),
    "a type that is no text": ('{"type":["response.create"]}', "type", "invalid_value"),
    "injecting": ('{"type":"response.inject","input":[]}', "type", "unsupported_parameter"),
    "no model": ('{"type":"response.create"}', "model", "missing_required_parameter"),
    "a wrong type": (json.dumps({**CREATE, "temperature": "hot"}), "temperature", "invalid_type"),
    "stream that is no boolean": (json.dumps({**CREATE, "stream": "yes"}), "stream", "invalid_type"),
    "background": (json.dumps({**CREATE, "background": True}), "background", "unsupported_parameter"),
    "an item of no known type": (json.dumps({**CREATE, "input": [{"type": "x"}]}), "input[0].type", "invalid_value"),
}


async def test_bad_messages_are_answered_and_the_connection_goes_on() -> None:
    async with serving() as served, opened(served) as websocket:
        for name, (message, param, code) in WRONG.items():
            await websocket.send(message)
            event = await read_event(websocket)
            assert event.keys() == {"type", "status", "error"}, name
            assert (event["type"], event["status"]) == ("error", 400), name
            assert event["error"].keys() == {"message", "type", "param", "code"}, name
            assert (event["error"]["param"], event["error"]["code"]) == (param, code), name
        await websocket.send(json.dumps(CREATE))
        assert (await to_the_end(websocket))[-1]["type"] == "response.completed"


async def test_a_message_in_fragments_is_one_message() -> None:
    async with serving() as served, opened(served) as websocket:
        text = json.dumps(CREATE)
        await websocket.send([text[:9], "", text[9:]])
        assert (await to_the_end(websocket))[-1]["type"] == "response.completed"


async def closed_with(websocket: ClientConnection) -> int | None:
    with pytest.raises(ConnectionClosed) as closed:
        await websocket.recv()
    return closed.value.rcvd and closed.value.rcvd.code


async def test_a_message_that_is_too_large_closes_the_connection() -> None:
    async with serving(server={"max_body_bytes": 65536}) as served:
        async with opened(served) as websocket:
            await websocket.send("x" * 65537)
            assert await closed_with(websocket) == 1009
        async with opened(served) as websocket:
            await websocket.send("x" * 40000 for _ in range(2))
            assert await closed_with(websocket) == 1009


async def test_fragments_without_end_close_the_connection() -> None:
    async with serving() as served, opened(served) as websocket:
        await websocket.send("" for _ in range(2000))
        assert await closed_with(websocket) == 1009


async def test_text_that_is_no_utf8_closes_the_connection() -> None:
    async with serving() as served, opened(served) as websocket:
        await websocket.send(b"\xff\xfe", text=True)
        assert await closed_with(websocket) == 1007


async def test_what_breaks_the_protocol_ends_what_runs() -> None:
    async with serving(scripted(ENDLESS)) as served, connection(served.url) as (reader, writer):
        fields = [("host", urlsplit(served.url).netloc), *UPGRADE]
        head = ["GET /v1/responses HTTP/1.1", *(f"{name}: {value}" for name, value in fields), "", ""]
        writer.write("\r\n".join(head).encode())
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
        text = json.dumps(CREATE).encode()
        writer.write(struct.pack("!BB4x", 0x81, 0x80 | len(text)) + text)
        await reader.readuntil(b"output_text.delta")
        writer.write(b"\x81\x05hello")
        assert struct.pack("!BBH", 0x88, 2 + len("incorrect masking"), 1002) in await reader.read()
        await left_early(served)


async def test_pings_are_answered_and_sent_and_pongs_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("head_s", "body_s"):
        monkeypatch.setattr(HttpServerConnection, limit, 0.2)  # these are of HTTP, and end with it
    async with serving(server={"keep_alive_s": 0.05}) as served, opened(served, ping_interval=None) as websocket:
        await (await websocket.ping(b"are you there"))
        await websocket.send(json.dumps(CREATE))
        await to_the_end(websocket)
    async with serving(server={"keep_alive_s": 0.05}) as served, connection(served.url) as (reader, writer):
        fields = [("host", urlsplit(served.url).netloc), *UPGRADE]
        head = ["GET /v1/responses HTTP/1.1", *(f"{name}: {value}" for name, value in fields), "", ""]
        writer.write("\r\n".join(head).encode())
        await reader.readuntil(b"\r\n\r\n")
        for _ in range(10):
            assert (await reader.readexactly(6))[:2] == b"\x89\x04"


async def test_no_more_than_64_wait() -> None:
    async with serving(scripted(ENDLESS)) as served, opened(served) as websocket:
        for _ in range(66):
            await websocket.send(json.dumps(CREATE))
        events = await to_the_end(websocket)
        assert (events[-1]["status"], events[-1]["error"]["code"]) == (429, "rate_limit_exceeded")


async def test_what_waits_may_be_as_large_as_one_message() -> None:
    async with serving(scripted(ENDLESS), server={"max_body_bytes": 65536}) as served, opened(served) as websocket:
        await websocket.send(json.dumps(CREATE))
        for _ in range(2):
            await websocket.send(json.dumps({**CREATE, "input": "x" * 40_000}))
        assert (await to_the_end(websocket))[-1]["status"] == 429


# --- clients that leave or do not read -------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["close", "reset"])
async def test_a_client_that_leaves_stops_its_responses(way: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "stack")
    async with serving(scripted(ENDLESS)) as served, opened(served) as websocket:
        await websocket.send(json.dumps(CREATE))
        while (await read_event(websocket))["type"] != "response.output_text.delta":
            pass
        if way == "reset":
            websocket.transport.abort()
        else:
            await websocket.close()
        await left_early(served)
    assert not [record.getMessage() for record in caplog.records if record.levelno > logging.INFO or record.exc_info]


async def test_a_client_that_reads_nothing_is_waited_for_and_then_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WebSocketServerConnection, "stall_s", 0.3)
    lots = [{"text": ["x" * 10_000] * 5000}]
    async with serving(scripted(lots)) as served:
        at = urlsplit(served.url)
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((at.hostname, at.port))
        client.setblocking(False)
        async with asyncio.timeout(BOUND_S):
            reader, writer = await asyncio.open_connection(sock=client, limit=1024)
            fields = [("host", at.netloc), *UPGRADE]
            head = ["GET /v1/responses HTTP/1.1", *(f"{name}: {value}" for name, value in fields), "", ""]
            writer.write("\r\n".join(head).encode())
            await reader.readuntil(b"\r\n\r\n")
            text = json.dumps(CREATE).encode()
            writer.write(struct.pack("!BB4x", 0x81, 0x80 | len(text)) + text)
            await until(lambda: model(served).abandoned_chats)
            writer.close()


# --- who may come in -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/responses", "/responses"])
async def test_both_paths_lead_in(path: str) -> None:
    async with serving() as served, opened(served, path) as websocket:
        assert websocket.response is not None
        assert websocket.response.headers["x-request-id"].startswith("req_")
        assert "permessage-deflate" not in websocket.response.headers.get("sec-websocket-extensions", "")


@pytest.mark.parametrize("path", ["/v1/models", "/v1/responses/resp_1", "/", "/v1/Responses"])
async def test_no_other_path_does(path: str) -> None:
    async with serving() as served:
        check_error(await handshake(served, path=path), 404)


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "https://localhost.evil.example", "http://localhost:3000"]
)
async def test_a_foreign_page_does_not_come_in(origin: str, caplog: pytest.LogCaptureFixture) -> None:
    """Pages of other ports are foreign, too; a refused handshake is no error in the log."""
    async with serving() as served:
        check_error(await handshake(served, ("origin", origin)), 403)
        check_error(await handshake(served, ("host", "evil.example")), 403)
        with pytest.raises(InvalidStatus):
            async with opened(served, origin=origin):
                pass
        async with opened(served, origin=served.url):
            pass
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


async def test_an_unknown_dialect_is_refused() -> None:
    async with serving() as served:
        error = check_error(await handshake(served, ("x-responses-dialect", "klingon")), 400)
        assert error["code"] == "invalid_value"


@pytest.mark.parametrize(
    "more",
    [[("sec-websocket-key", "short")], [("sec-websocket-version", "12")], [(f"x-{n}", "1") for n in range(200)]],
    ids=["key", "version", "headers"],
)
async def test_a_bad_handshake_is_refused_in_peace(more: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as served:
        assert (await handshake(served, *more)).status in (400, 426)
    assert not [record for record in caplog.records if record.exc_info]


async def test_only_a_get_is_upgraded() -> None:
    async with serving() as served:
        answer = await handshake(served, ("content-length", "0"), ("connection", "upgrade, close"), method="POST")
        check_error(answer, 400)


async def test_there_are_no_more_connections_than_the_config_allows() -> None:
    async with serving(server={"max_connections": 1}) as served, opened(served):
        assert (await handshake(served, ("connection", "upgrade, close"))).status == 503


async def test_large_requests_are_read_while_others_run() -> None:
    text = os.urandom(300_000).hex()
    async with serving() as served, opened(served) as websocket:
        await websocket.send(json.dumps({**CREATE, "input": text}))
        assert (await to_the_end(websocket))[-1]["response"]["output"][0]["content"][0]["text"] == text


async def test_each_response_on_a_websocket_is_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "stack.access")
    broken: list[dict[str, Any]] = [{"text": "one"}, {"fail": "boom"}]
    says: list[dict[str, Any]] = [{"text": "two"}, {"finish": "stop", "usage": {"output_tokens": 5}}]
    async with serving(scripted(says, broken, ENDLESS), server={"access_log": True}) as served:
        async with opened(served) as websocket:
            for _ in range(2):
                await websocket.send(json.dumps(CREATE))
                await to_the_end(websocket)
            await websocket.send(json.dumps({**CREATE, "model": "a-secret"}))
            await to_the_end(websocket)
            await websocket.send(json.dumps(CREATE))
            while (await read_event(websocket))["type"] != "response.output_text.delta":
                pass
        async with asyncio.timeout(BOUND_S):
            while len(caplog.records) < 5:
                figures = await ask(served.url, method="GET", path="/metrics", kind=None)
        figures = await ask(served.url, method="GET", path="/metrics", kind=None)
    lines = [json.loads(record.getMessage()) for record in caplog.records]
    assert [(line["status"], line.get("outcome")) for line in lines] == [
        (200, "completed"),
        (200, "failed"),
        (404, None),
        (200, "cancelled"),
        (101, None),
    ]
    assert lines[2]["error"] == "model_not_found"
    assert len({line["request"] for line in lines}) == 1
    assert "secret" not in caplog.text
    for expected in ('responses_total{status="completed"} 1', 'responses_total{status="failed"} 1'):
        assert expected in figures.body.decode()
    assert 'status="cancelled"} 1' in figures.body.decode()
    assert 'stack_tokens_total{kind="output",model="scripted"}' in figures.body.decode()


# --- the end of a real server ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("wait_s", [0.5, 30], ids=["what ends in time", "what does not"])
async def test_sigterm_lets_responses_end_in_the_grace_period(tmp_path: Path, wait_s: float) -> None:
    """A WebSocket whose response still runs when the grace period ends gets `response.failed` and 1012."""
    turn = [{"text": "one "}, {"wait_s": wait_s}, {"text": "two"}]
    sections: Any = {
        "server": {"port": 0, "grace_period_s": 1.5},
        "inference": scripted(turn),
        "kv_store": {"provider": "memory"},
    }
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(sections))
    async with asyncio.timeout(BOUND_S), forked_process(STACK_PROGRAM, "run", str(config)) as process:
        assert process.stderr is not None
        url = (await process.listening()).replace("http", "ws", 1) + "/v1/responses"
        async with connect(url, proxy=None) as busy, connect(url, proxy=None) as idle:
            await busy.send(json.dumps(CREATE))
            while (await read_event(busy))["type"] != "response.output_text.delta":
                pass
            process.terminate()
            assert await closed_with(idle) == 1012
            last = (await to_the_end(busy))[-1]["response"]
            if wait_s < 1:
                assert last["output"][0]["content"][0]["text"] == "one two"
            else:
                assert (last["status"], last["error"]["code"]) == ("failed", "server_error")
            assert await closed_with(busy) == 1012
        errors = await process.stderr.read()
        code = await process.wait()
    if wait_s < 1:
        assert code == 0
    assert b"ERROR" not in errors
    assert b"Traceback" not in errors
