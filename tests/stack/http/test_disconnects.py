"""Clients that leave or do not read: generation stops or waits, what there is is kept, and the log stays calm."""

import asyncio
import logging
import socket
from typing import Any
from urllib.parse import urlsplit

import orjson
import pytest

from providers.inference.scripted import Scripted
from stack.serving.connection import HttpServerConnection
from tests.stack.http.raw import connection, parse, request
from tests.support.servers.serving import Served, scripted, serving
from tests.support.waiting import until

ENDLESS: list[dict[str, Any]] = [{"text": "once "}, {"wait_s": 30}, {"text": "more"}]


def ask_for(stream: bool, **fields: Any) -> dict[str, Any]:
    return {"model": "scripted", "input": "hi", "stream": stream, **fields}


def model(served: Served) -> Scripted:
    assert isinstance(served.stack.inference, Scripted)
    return served.stack.inference


async def statuses(served: Served) -> list[str]:
    rows = await served.stack.kv_store.scan("default/response/")
    return [orjson.loads(entry.value)["response"]["status"] for _, entry in rows]


async def stored(served: Served, *expected: str) -> None:
    """Wait until just these are stored."""
    async with asyncio.timeout(1):
        while await statuses(served) != [*expected]:  # noqa: ASYNC110  # a store sets no event
            await asyncio.sleep(0)


def assert_calm(caplog: pytest.LogCaptureFixture) -> None:
    loud = [record.getMessage() for record in caplog.records if record.levelno > logging.INFO or record.exc_info]
    assert not loud


@pytest.mark.parametrize("reset", [False, True], ids=["closes", "resets"])
@pytest.mark.parametrize("received", [b"response.in_progress", b"output_text.delta"])
async def test_a_client_that_leaves_its_stream_stops_it(
    reset: bool, received: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "stack")
    async with serving(scripted(ENDLESS)) as served:
        async with connection(served.url) as (reader, writer):
            writer.write(request(served.url, ask_for(stream=True)))
            await reader.readuntil(received)
            if reset:
                writer.transport.abort()
        await until(lambda: model(served).abandoned_chats == 1, within_s=1)
        await stored(served, "cancelled")
        assert_calm(caplog)
        log_records = [record.getMessage() for record in caplog.records if record.name != "stack.access"]
        assert log_records == ["a client left its stream early"]


async def test_what_had_been_made_is_kept_and_can_be_built_on() -> None:
    async with serving(scripted(ENDLESS, [{"text": "again"}])) as served:
        async with connection(served.url) as (reader, writer):
            writer.write(request(served.url, ask_for(stream=True)))
            await reader.readuntil(b"output_text.delta")
        await stored(served, "cancelled")
        [(key, _)] = await served.stack.kv_store.scan("default/response/")
        response = await served.client.responses.retrieve(key.rpartition("/")[2])
        assert response.output_text == "once "
        assert [item.status for item in response.output if item.type == "message"] == ["incomplete"]
        assert response.usage is not None
        after = await served.client.responses.create(model="scripted", input="go on", previous_response_id=response.id)
        assert after.output_text == "again"
        said = [(message.role, message.content) for message in model(served).requests[-1].messages]
        assert said == [("user", "hi"), ("assistant", "once "), ("user", "go on")]


async def test_a_client_that_leaves_before_a_whole_answer_stops_it(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(scripted(ENDLESS)) as served:
        async with connection(served.url) as (_, writer):
            writer.write(request(served.url, ask_for(stream=False)))
            await until(lambda: model(served).requests, within_s=1)
        await until(lambda: model(served).abandoned_chats == 1, within_s=1)
        await stored(served, "cancelled")
        assert_calm(caplog)


async def test_nothing_is_kept_of_what_was_not_to_be_stored(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(scripted(ENDLESS)) as served:
        async with connection(served.url) as (reader, writer):
            writer.write(request(served.url, ask_for(stream=True, store=False)))
            await reader.readuntil(b"output_text.delta")
        await until(lambda: model(served).abandoned_chats == 1, within_s=1)
        assert not await served.stack.kv_store.scan("default/")
        assert_calm(caplog)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions"])
async def test_a_client_that_leaves_before_its_body_is_whole_starts_nothing(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as served:
        async with connection(served.url) as (_, writer):
            head = request(served.url, path=path, headers=[("content-length", "1000")])
            writer.write(head + b'{"model":')
            await writer.drain()
        assert (await served.client.responses.create(model="scripted", input="next")).output_text == "next"
        assert len(model(served).requests) == 1
        assert_calm(caplog)


async def test_a_chat_stream_that_is_left_stops_too(caplog: pytest.LogCaptureFixture) -> None:
    chat: dict[str, Any] = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}
    async with serving(scripted(ENDLESS)) as served:
        for number, stream in enumerate((True, False), 1):
            async with connection(served.url) as (reader, writer):
                writer.write(request(served.url, {**chat, "stream": stream}, path="/v1/chat/completions"))
                if stream:
                    await reader.readuntil(b"once")
                await until(lambda number=number: len(model(served).requests) == number, within_s=1)
            await until(lambda number=number: model(served).abandoned_chats == number, within_s=1)
        assert_calm(caplog)


async def test_a_client_that_leaves_after_the_end_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as served:
        async with connection(served.url) as (reader, writer):
            writer.write(request(served.url, ask_for(stream=True)))
            await reader.readuntil(b"[DONE]")
        await stored(served, "completed")
        assert model(served).abandoned_chats == 0
        assert_calm(caplog)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("early", [True, False])
async def test_a_client_that_closes_only_its_half_is_served(
    stream: bool, early: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A half-close after the request is no disconnect; closing both halves still is one (the tests above)."""
    turn = [{"text": "once "}, {"wait_s": 0.2}, {"text": "more"}]
    async with serving(scripted(turn)) as served, connection(served.url) as (reader, writer):
        writer.write(request(served.url, ask_for(stream=stream)))
        before = await reader.readuntil(b"output_text.delta") if stream and not early else b""
        writer.write_eof()
        raw = before + await reader.read()
        answer = parse(raw.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n"))
        assert (b"[DONE]" in answer.body) if stream else (answer.json["status"] == "completed")
        assert b"more" in answer.body
        assert await statuses(served) == ["completed"]
        assert_calm(caplog)


@pytest.mark.parametrize("requests", [1, 3])
async def test_a_client_that_leaves_while_requests_wait_in_its_pipeline_stops_them(
    requests: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A pipelining client that leaves is noticed, and is no bug in the log."""
    async with serving(scripted(ENDLESS)) as served:
        async with connection(served.url) as (reader, writer):
            head = request(served.url, ask_for(stream=True)).replace(b"connection: close\r\n", b"")
            writer.write(head * (1 + requests))
            await reader.readuntil(b"response.in_progress")
        await until(lambda: model(served).abandoned_chats == 1, within_s=1)
        await stored(served, "cancelled")
        assert len(model(served).requests) == 1
        assert_calm(caplog)


async def test_a_client_that_reads_nothing_is_cut_off_with_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stalled reader that is cut off leaves one info line and no traceback."""
    caplog.set_level(logging.INFO, "stack")
    monkeypatch.setattr(HttpServerConnection, "stall_s", 0.2)
    async with serving(scripted([{"text": ["x" * 65536] * 1000}])) as served:
        async with connection(served.url) as (reader, writer):
            transport: Any = writer.transport
            transport.pause_reading()
            writer.write(request(served.url, ask_for(stream=True)))
            await until(lambda: "a client left its stream early" in caplog.messages, within_s=5)
            del reader
        await stored(served, "cancelled")
        assert_calm(caplog)
        lines = [record.getMessage() for record in caplog.records if record.name != "stack.access"]
        assert lines == ["a client left its stream early"]


async def test_many_clients_that_leave_together_leave_no_task(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(scripted(ENDLESS)) as served:
        before = len(asyncio.all_tasks())

        async def leave() -> None:
            async with connection(served.url) as (reader, writer):
                writer.write(request(served.url, ask_for(stream=True)))
                await reader.readuntil(b"response.in_progress")

        await asyncio.gather(*(leave() for _ in range(50)))
        await until(lambda: model(served).abandoned_chats == 50, within_s=5)
        await until(lambda: len(asyncio.all_tasks()) <= before, within_s=5)
        assert await statuses(served) == ["cancelled"] * 50
        assert_calm(caplog)


async def test_a_model_waits_for_a_client_that_does_not_read() -> None:
    piece, pieces = "x" * 16384, 2000
    async with serving(scripted([{"text": [piece] * pieces}])) as served:
        at = urlsplit(served.url)
        loop = asyncio.get_running_loop()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            client.setblocking(False)
            await loop.sock_connect(client, (at.hostname, at.port))
            await loop.sock_sendall(client, request(served.url, ask_for(stream=True)))
            await until(lambda: served.streams.bodies, within_s=5)
            body = served.streams.bodies[0][0]
            size = -1
            while size != len(body):  # while it still fills what lies between us
                size = len(body)
                await served.client.responses.input_tokens.count(model="scripted", input="others are served")
            print(
                f"{size / 2**20:.1f} of {len(piece) * pieces / 2**20:.1f} MiB were made for a client that read nothing"
            )
            assert size < len(piece) * pieces / 3
            await loop.sock_recv(client, 65536)
        await until(lambda: model(served).abandoned_chats == 1, within_s=1)
        await stored(served, "cancelled")


async def test_the_others_are_served_while_one_does_not_read() -> None:
    script = scripted([{"text": ["x" * 16384] * 1000}], [{"text": ["quick"] * 10}])
    async with serving(script) as served, connection(served.url) as (_, writer):
        writer.write(request(served.url, ask_for(stream=True)))
        await until(lambda: served.streams.bodies, within_s=5)
        answer = await served.client.responses.create(model="scripted", input="hi")
        assert answer.output_text == "quick" * 10
