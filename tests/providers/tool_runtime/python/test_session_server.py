"""The machine's Python session server, used by two runtimes over one store: shared state, its life and its end."""

import asyncio
import os
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from apis.containers import ContainerListParams, CreateContainer
from apis.errors import ConfigError, InvalidRequest, NotFound, Overloaded, ToolFailed
from apis.storage.kv_store import KVStore
from providers.tool_runtime.python import session_client
from providers.tool_runtime.python.messages import OperationRequest, encode_message
from providers.tool_runtime.python.provider import Python
from providers.tool_runtime.python.socket_folder import prepare_folder, socket_path
from tests.providers.tool_runtime.python.test_python import (
    ENDLESS,
    SessionLog,
    build,
    memory,
    names,
    program,
    sandboxes,
    server_processes,
    server_socket,
    session_log,
    started,
    text_of,
)
from tests.support.servers.ended_processes import assert_ended
from tests.support.servers.forked_process import ForkedProcess, forked_process

__all__ = ["session_log"]
pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")

ANY, TENANT = ContainerListParams(), "tenant"
NEW = CreateContainer(name="c")
Two = tuple[Python, Python]


@pytest.fixture
def store() -> KVStore:
    return memory()


@pytest.fixture
async def two(store: KVStore, session_log: SessionLog) -> AsyncGenerator[Two]:
    async with started(store, timeout_s=5) as one, started(store, timeout_s=5) as other:
        yield one, other


async def kill_server() -> None:
    """Kill the session server that was started last, and wait for its end."""
    server = server_processes()[-1]
    server.kill()
    await assert_ended([server])


async def records(store: KVStore, tenant: str = TENANT) -> list[str]:
    return [key for key, _ in await store.scan(f"{tenant}/container/")]


async def test_variables_set_through_one_are_seen_through_the_other(two: Two, store: KVStore) -> None:
    for number, python in enumerate((*two, *two)):
        assert await text_of(python, "n = globals().get('n', -1) + 1\nn") == str(number)
    assert len(await records(store)) == 1
    assert len(server_processes()) == 1


async def test_a_session_may_have_any_name(two: Two) -> None:
    for number, session in enumerate(("a/b", "\ud800", "", "x" * 5000, "\0")):
        await text_of(two[0], f"x = {number}", session)
        assert await text_of(two[1], "x", session) == str(number)
        assert await text_of(two[0], "x", session) == str(number)


async def test_what_a_call_made_comes_whole(two: Two) -> None:
    await text_of(two[0], "data = bytes(range(256)) * 40_000")
    code = "open('a.bin', 'wb').write(data); open('b.png', 'w').write('b'); print('é\\x1b[1m'); 1 / 0"
    here, there = [await python.call(program(code)) for python in two]
    assert there.data["exit"] == "exception"
    assert there.data["files"].keys() == {"/mnt/data/a.bin", "/mnt/data/b.png"}
    assert [*there.files] == [*here.files]
    assert (there.text.replace("cell 3", "cell 2"), there.data["files"]) == (here.text, here.data["files"])


async def test_files_put_through_one_are_listed_read_and_deleted_through_the_other(two: Two) -> None:
    one, other = (python.containers() for python in two)
    identity = (await one.create(NEW, tenant=TENANT)).id
    data = os.urandom(16 << 20)
    input_file = await other.add_file(identity, "in/data.bin", data, tenant=TENANT)
    assert await other.list_files(identity, ANY, tenant=TENANT) == await one.list_files(identity, ANY, tenant=TENANT)
    assert await other.get_file(identity, input_file.id, tenant=TENANT) == input_file
    assert await other.content(identity, input_file.id, tenant=TENANT) == data
    await other.delete_file(identity, input_file.id, tenant=TENANT)
    for each in (one, other):
        assert (await each.list_files(identity, ANY, tenant=TENANT)).data == []
        with pytest.raises(NotFound, match="no such file"):
            await each.content(identity, input_file.id, tenant=TENANT)


async def test_a_container_is_the_same_for_all_and_ends_for_all(two: Two, store: KVStore) -> None:
    one, other = two
    identity = (await one.containers().create(NEW, tenant=TENANT)).id
    before = sandboxes()
    await text_of(other, "1", identity)
    (process,) = sandboxes() - before
    here, there = [await python.containers().get(identity, tenant=TENANT) for python in two]
    assert here == there
    assert (await other.containers().create(NEW, tenant=TENANT, container_id=identity)).created_at == here.created_at
    await other.containers().delete(identity, tenant=TENANT)
    assert await asyncio.to_thread(psutil.wait_procs, [process], 10) == ([process], [])
    for python in two:
        with pytest.raises(NotFound, match=identity):
            await python.containers().get(identity, tenant=TENANT)
        assert await names(python) == []
    assert await records(store) == []


async def test_lists_show_all_in_order_page_by_page(two: Two) -> None:
    created_names = [
        (await two[number % 2].containers().create(CreateContainer(name="ab"[number // 2 % 2]), tenant=TENANT)).id
        for number in range(7)
    ]
    for python in two:
        assert await names(python) == created_names
        containers = python.containers()
        first = await containers.list(ContainerListParams(limit=3), tenant=TENANT)
        assert ([each.id for each in first.data], first.has_more) == (created_names[:3:-1], True)
        rest = await containers.list(ContainerListParams(limit=4, after=created_names[4]), tenant=TENANT)
        assert ([each.id for each in rest.data], rest.has_more) == (created_names[3::-1], False)
        assert len((await containers.list(ContainerListParams(name="a"), tenant=TENANT)).data) == 4
        with pytest.raises(InvalidRequest):
            await containers.list(ContainerListParams(after="gone"), tenant=TENANT)


async def test_a_tenants_container_is_unknown_to_another_everywhere(two: Two) -> None:
    identity = (await two[0].containers().create(NEW, tenant=TENANT)).id
    file = await two[0].containers().add_file(identity, "f", b"1", tenant=TENANT)
    for python in two:
        containers = python.containers()
        for asking in (
            containers.get(identity, tenant="other"),
            containers.delete(identity, tenant="other"),
            containers.list_files(identity, ANY, tenant="other"),
            containers.content(identity, file.id, tenant="other"),
            containers.add_file(identity, "f", b"2", tenant="other"),
        ):
            with pytest.raises(NotFound, match=f"Container with id '{identity}' not found"):
                await asking
        assert await names(python, "other") == []
    assert await two[1].containers().content(identity, file.id, tenant=TENANT) == b"1"


async def test_a_busy_session_is_waited_for_a_limited_time(store: KVStore) -> None:
    async with started(store, timeout_s=1) as one, started(store, timeout_s=1) as other:
        await text_of(one, "1")
        calls = [python.call(program(ENDLESS)) for python in (one, other, one, other)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        refusals = [result for result in results if isinstance(result, ToolFailed)]
        assert refusals
        assert all("keep this Python session busy" in refusal.message for refusal in refusals)


async def test_a_cancelled_call_ends_its_session(store: KVStore, session_log: SessionLog) -> None:
    patient: dict[str, Any] = {"timeout_s": 60, "cpu_s": 60}
    async with started(store, **patient) as one, started(store, **patient) as other:
        await text_of(one, "x = 1")
        session_log.begun.clear()
        call = asyncio.ensure_future(other.call(program(ENDLESS)))
        async with asyncio.timeout(10):
            await session_log.begun.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await session_log.ended.wait()
        assert "NameError" in await text_of(other, "x")


async def test_sessions_outlive_the_runtime_that_created_them_and_end_with_the_last(store: KVStore) -> None:
    async with started(store, timeout_s=5) as one:
        async with started(store, timeout_s=5) as other:
            await text_of(other, "x = 1")
        assert await text_of(one, "x") == "1"
        processes = [*server_processes(), *server_processes()[0].children(recursive=True)]
    assert len(processes) == 4
    await assert_ended(processes)
    async with started(store, timeout_s=5) as one:
        assert "the server process that kept it has ended" in await text_of(one, "1")


async def test_sessions_outlive_a_worker_that_is_killed(tmp_path: Path) -> None:
    kv_store = f"SQLite(SQLite.Config(path={str(tmp_path / 'store.db')!r}))"
    worker = f"""
import asyncio, sys
from providers.kv_store.sqlite import SQLite
from tests.providers.tool_runtime.python.test_python import started, text_of
async def serve():
    store = {kv_store}
    await store.start()
    async with started(store, timeout_s=5) as python:
        print(await text_of(python, "n = globals().get('n', 0) + 1; n"), flush=True)
        await asyncio.sleep(1000)
asyncio.run(serve())
"""
    workers: list[ForkedProcess] = []
    servers: list[psutil.Process] = []
    async with AsyncExitStack() as running:
        for number in range(3):
            workers.append(process := await running.enter_async_context(forked_process(worker, stderr=2)))
            async with asyncio.timeout(30):
                assert await process.stdout.readline() == f"{number + 1}\n".encode()
            servers += psutil.Process(process.pid).children()
            if number:
                workers[-2].kill()  # the first of them has started the server
                await workers[-2].wait()
        assert len(servers) == 1
        assert servers[0].is_running()
    await assert_ended(servers)


async def test_where_the_server_was_killed_the_next_call_says_so_and_starts_another(two: Two, store: KVStore) -> None:
    one, other = two
    identity = (await one.containers().create(NEW, tenant=TENANT)).id
    await text_of(one, "x = 1", identity)
    await kill_server()
    with pytest.raises(NotFound, match=identity):
        await other.containers().get(identity, tenant=TENANT)
    text = await text_of(other, "globals().get('x')\n1", identity)
    assert (
        text == "[this is a new Python session, the earlier one is gone: the server process that kept it has ended]\n1"
    )
    assert await text_of(one, "globals().get('x')\n1", identity) == "1"
    assert len(await records(store)) == 1
    assert len(server_processes()) == 1


async def test_of_many_that_start_a_server_at_once_one_does(store: KVStore) -> None:
    pythons = [build(store, timeout_s=5) for _ in range(5)]
    await asyncio.gather(*(python.start() for python in pythons))
    assert len(server_processes()) == 1
    for is_killed in (False, True):
        if is_killed:
            await kill_server()
        texts = await asyncio.gather(*(text_of(python, "n = globals().get('n', -1) + 1\nn") for python in pythons))
        assert sorted(text[-1] for text in texts) == [*"01234"]
        assert len(server_processes()) == 1
    await asyncio.gather(*(python.close() for python in pythons))
    await assert_ended(server_processes())


async def test_a_call_whose_server_ends_meanwhile_says_so(two: Two, session_log: SessionLog) -> None:
    one, other = two
    await text_of(one, "x = 1")
    session_log.begun.clear()
    call = asyncio.ensure_future(other.call(program(ENDLESS)))
    async with asyncio.timeout(10):
        await session_log.begun.wait()
        await kill_server()
        with pytest.raises(ToolFailed, match="ended before it answered"):
            await call
    assert "NameError" in await text_of(other, "x")


async def test_a_server_that_is_stopped_is_not_waited_for(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_client, "_ACKNOWLEDGEMENT_TIMEOUT_S", 0.2)
    identity = (await two[0].containers().create(NEW, tenant=TENANT)).id
    (server,) = server_processes()
    server.suspend()
    containers = two[1].containers()
    for asking in (containers.get(identity, tenant=TENANT), containers.list(ANY, tenant=TENANT)):
        with pytest.raises(Overloaded, match="does not answer"):
            await asking
    server.resume()


async def test_signals_to_the_whole_service_do_not_end_the_sessions_of_workers_that_still_drain(two: Two) -> None:
    await text_of(two[0], "x = 1")
    (server,) = server_processes()
    for number in (signal.SIGTERM, signal.SIGINT):
        server.send_signal(number)
    assert await text_of(two[1], "x") == "1"


async def test_a_server_has_no_secret_of_the_deployment(store: KVStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_SECRET", "sk-1")
    async with started(store):
        (server,) = server_processes()
        names = {"PATH", "TMPDIR", "LANG", "LC_ALL", "LC_CTYPE", "PYTHONPATH", "SSL_CERT_FILE", "SSL_CERT_DIR"}
        assert server.environ().keys() <= names


async def test_of_two_that_make_a_session_at_once_one_keeps_it(two: Two, store: KVStore) -> None:
    calls = [python.call(program("n = globals().get('n', 0) + 1\nn")) for python in two]
    assert sorted([result.text for result in await asyncio.gather(*calls)]) == ["1", "2"]
    assert len(await records(store)) == 1


async def test_the_socket_is_its_users_alone_and_goes_with_it(store: KVStore) -> None:
    async with started(store) as python:
        path = server_socket(python)
        mode = path.parent.stat()
        assert (stat.S_IMODE(mode.st_mode), mode.st_uid) == (0o700, os.geteuid())
        assert stat.S_ISSOCK(path.stat().st_mode)
    assert not path.exists()


def test_a_folder_that_another_user_has_taken_stops_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name cannot be known before, and one that others may use is not used."""
    with tempfile.TemporaryDirectory() as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        first = socket_path("deployment", b"settings")
        assert socket_path("deployment", b"other").parent == first.parent
        assert socket_path("another", b"settings").parent != first.parent
        first.parent.mkdir()
        first.parent.chmod(0o777)
        with pytest.raises(OSError, match="others may use it"):
            prepare_folder(first)
        second = socket_path("deployment", b"settings")
        assert second.parent != first.parent
        prepare_folder(second)
        assert socket_path("deployment", b"settings") == second, "the next worker finds the same one"
        second.parent.rmdir()
        second.parent.symlink_to(short)
        assert socket_path("deployment", b"settings").parent not in (first.parent, second.parent)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
async def test_another_user_is_left_unanswered(two: Two) -> None:
    path = server_socket(two[0])
    arguments = msgspec.Raw(msgspec.msgpack.encode((TENANT,)))
    request = encode_message(OperationRequest("list_sessions", arguments))
    client = (
        f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({str(path)!r}); s.sendall({request!r})\n"
        "print(s.recv(1))"
    )
    path.parent.chmod(0o755)
    path.chmod(0o777)
    try:
        assert await ask_as(os.geteuid(), client) == b"b'.'\n"
        assert await ask_as(65534, client) in (b"b''\n", b"reset\n")
    finally:
        path.parent.chmod(0o700)


async def ask_as(user: int, client: str) -> bytes:
    caught = f"try:\n    exec({client!r})\nexcept (BrokenPipeError, ConnectionResetError):\n    print('reset')"
    process = await asyncio.create_subprocess_exec(
        "/usr/bin/setpriv",
        f"--reuid={user}",
        "--clear-groups",
        "/usr/bin/python3",
        "-c",
        caught,
        stdout=subprocess.PIPE,
    )
    async with asyncio.timeout(20):
        output, _ = await process.communicate()
    return output


async def test_what_is_no_request_does_no_harm(two: Two) -> None:
    for sent in (b"", b"\0\0\0\1", b"\xff\xff\xff\xff", b"\0\0\0\3abc", b"\0\0\0\1\x80", b"GET / HTTP/1.1"):
        reader, writer = await asyncio.open_unix_connection(str(server_socket(two[0])))
        writer.write(sent)
        writer.write_eof()
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        writer.close()
        assert await text_of(two[0], "1") == "1", sent


async def test_the_socket_of_a_killed_server_is_removed(store: KVStore) -> None:
    async with started(store) as python:
        path = server_socket(python)
        await kill_server()
        assert path.exists()
        async with started(store, max_sessions=7):  # a server of its own
            assert not path.exists()
            assert await text_of(python, "1") == "1"
            assert path.exists()


async def test_where_there_can_be_no_socket_the_start_says_so(
    tmp_path: Path, store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (long := tmp_path / ("x" * 100)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(ConfigError, match="TMPDIR"):
        await build(store).start()
    assert [*long.iterdir()] == []
