"""The event loop of a server, with sockets as asyncio uses them."""

import asyncio
import os
import selectors
import socket
import sys
import time
from collections.abc import Generator

import pytest

from stack.serving import event_loop

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the loop is the platform's own")


@pytest.fixture
def selector() -> Generator[selectors.BaseSelector]:
    with event_loop.QuickEpollSelector() as selector:
        yield selector


@pytest.fixture
def pair() -> Generator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    with left, right:
        left.setblocking(False)
        yield left, right


def events_of(selector: selectors.BaseSelector, timeout: float = 0) -> list[tuple[object, int]]:
    return [(key.data, events) for key, events in selector.select(timeout)]


def test_events_are_those_that_the_standard_selector_reports(
    selector: selectors.BaseSelector, pair: tuple[socket.socket, socket.socket]
) -> None:
    left, right = pair
    both = selectors.EVENT_READ | selectors.EVENT_WRITE
    with selectors.EpollSelector() as standard:
        for each in (selector, standard):
            each.register(left, selectors.EVENT_READ, "read")
            assert events_of(each) == []
            each.modify(left, both, "both")
            assert events_of(each) == [("both", selectors.EVENT_WRITE)]
        right.send(b"x")
        for each in (selector, standard):
            assert events_of(each) == [("both", both)]
            each.modify(left, selectors.EVENT_READ, "read")
            assert events_of(each) == [("read", selectors.EVENT_READ)]
        right.close()  # the end of a connection
        for each in (selector, standard):
            each.modify(left, selectors.EVENT_WRITE, "write")
            assert events_of(each) == [("write", selectors.EVENT_WRITE)]
            each.unregister(left)
            assert events_of(each) == []
            assert dict(each.get_map()) == {}


def test_a_file_descriptor_that_was_closed_and_opened_again_reports_what_it_is_now(
    selector: selectors.BaseSelector,
) -> None:
    first, second = os.pipe()
    selector.register(first, selectors.EVENT_READ, "old")
    kept = os.dup(first)  # the closed descriptor's events still arrive
    os.close(first)
    selector.unregister(first)
    os.write(second, b"x")
    assert events_of(selector) == []
    assert os.dup(kept) == first
    selector.register(kept, selectors.EVENT_READ, "new")
    assert ("new", selectors.EVENT_READ) in events_of(selector)
    for each in (first, second, kept):
        os.close(each)


def test_a_wait_lasts_at_least_its_time(selector: selectors.BaseSelector) -> None:
    began = time.monotonic()
    assert selector.select(0.0101) == []
    assert time.monotonic() - began >= 0.0101
    assert selector.select(-1.0) == []  # a time that is over


def test_more_connections_than_one_turn_takes_are_all_served() -> None:
    async def talk() -> int:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(await reader.readexactly(4))
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=512)
        port = server.sockets[0].getsockname()[1]

        async def ask() -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"ping")
            answer = await reader.read()
            writer.close()
            return answer

        async with server:
            answers = await asyncio.gather(*(ask() for _ in range(300)))
        return sum(answer == b"ping" for answer in answers)

    with asyncio.Runner(loop_factory=event_loop.create_event_loop) as runner:
        assert runner.run(talk()) == 300


def test_the_loop_runs_processes_and_threads() -> None:
    async def work() -> str:
        process = await asyncio.create_subprocess_exec("echo", "from a process", stdout=asyncio.subprocess.PIPE)
        output, _ = await process.communicate()
        return await asyncio.to_thread(output.decode)

    with asyncio.Runner(loop_factory=event_loop.create_event_loop) as runner:
        assert runner.run(work()) == "from a process\n"
