"""Python sessions that one process keeps and others use: here two runtimes over one store, each with its own socket."""

import asyncio
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from apis.containers import ContainerListParams, CreateContainer
from apis.errors import ConfigError, InvalidRequest, NotFound, Overloaded, ToolFailed, Unsupported
from apis.storage.kv_store import KVStore
from providers.tool_runtime.python import session_registry as python_directory
from providers.tool_runtime.python import session_server as python_keeper
from providers.tool_runtime.python.messages import OperationRequest, encode_message
from providers.tool_runtime.python.provider import Python
from providers.tool_runtime.python.session_registry import SessionRegistry
from tests.providers.tool_runtime.python.test_python import (
    ENDLESS,
    Told,
    memory,
    names,
    program,
    started,
    text_of,
    told,
)

__all__ = ["told"]
pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")

ANY = ContainerListParams()
TENANT = "tenant"
NEW = CreateContainer(name="c")
Two = tuple[Python, Python]


@pytest.fixture
def store() -> KVStore:
    return memory()


@pytest.fixture
async def two(store: KVStore) -> AsyncGenerator[Two]:
    async with started(store, timeout_s=5) as one, started(store, timeout_s=5) as other:
        yield one, other


def address(python: Python) -> Path:
    return Path(python._server.address)  # pyright: ignore[reportPrivateUsage] - told to nobody else


async def records(store: KVStore, tenant: str = TENANT) -> list[str]:
    return [key for key, _ in await store.scan(f"{tenant}/container/")]


async def test_variables_set_through_one_are_seen_through_the_other(two: Two, store: KVStore) -> None:
    for number, python in enumerate((*two, *two)):
        assert await text_of(python, "n = globals().get('n', -1) + 1\nn") == str(number)
    assert len(await records(store)) == 1
    assert [len(python._sessions.list_entries(TENANT)) for python in two] == [1, 0]  # pyright: ignore[reportPrivateUsage] - who keeps it


@pytest.mark.parametrize("session", ["a/b", "\ud800", "", "x" * 5000, "\0"])
async def test_a_session_may_have_any_name(session: str, two: Two) -> None:
    await text_of(two[0], "x = 1", session)
    with suppress(ToolFailed):  # what is no text cannot be sent
        assert await text_of(two[1], "x", session) == "1"
    assert await text_of(two[0], "x", session) == "1"


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
    given = await other.add_file(identity, "in/data.bin", data, tenant=TENANT)
    assert await other.list_files(identity, ANY, tenant=TENANT) == await one.list_files(identity, ANY, tenant=TENANT)
    assert await other.get_file(identity, given.id, tenant=TENANT) == given
    assert await other.content(identity, given.id, tenant=TENANT) == data
    await other.delete_file(identity, given.id, tenant=TENANT)
    for each in (one, other):
        assert (await each.list_files(identity, ANY, tenant=TENANT)).data == []
        with pytest.raises(NotFound, match="no such file"):
            await each.content(identity, given.id, tenant=TENANT)


async def test_a_container_is_the_same_for_all_and_ends_for_all(two: Two, store: KVStore) -> None:
    one, other = two
    identity = (await one.containers().create(NEW, tenant=TENANT)).id
    before = set(psutil.Process().children())
    await text_of(other, "1", identity)
    (process,) = set(psutil.Process().children()) - before
    here, there = [await python.containers().get(identity, tenant=TENANT) for python in two]
    assert here == there
    assert (await other.containers().create(NEW, tenant=TENANT, container_id=identity)).created_at == here.created_at
    await other.containers().delete(identity, tenant=TENANT)
    assert await asyncio.to_thread(psutil.wait_procs, [process], 10) == ([process], [])
    for python in two:
        with pytest.raises(NotFound, match=identity):
            await python.containers().get(identity, tenant=TENANT)
        assert await names(python) == []
    await one._registry.close()  # pyright: ignore[reportPrivateUsage] - until it is out of the store
    assert await records(store) == []


async def test_lists_show_all_in_order_page_by_page(two: Two) -> None:
    made = [
        (await two[number % 2].containers().create(CreateContainer(name="ab"[number // 2 % 2]), tenant=TENANT)).id
        for number in range(7)
    ]
    for python in two:
        assert await names(python) == made
        containers = python.containers()
        first = await containers.list(ContainerListParams(limit=3), tenant=TENANT)
        assert ([each.id for each in first.data], first.has_more) == (made[:3:-1], True)
        rest = await containers.list(ContainerListParams(limit=4, after=made[4]), tenant=TENANT)
        assert ([each.id for each in rest.data], rest.has_more) == (made[3::-1], False)
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


async def test_errors_are_the_same_from_afar(two: Two) -> None:
    identity = (await two[0].containers().create(NEW, tenant=TENANT)).id
    await text_of(two[0], "import os; os.mkdir('folder')", identity)
    told: list[Any] = []
    for python in two:
        with pytest.raises(InvalidRequest) as caught:
            await python.containers().add_file(identity, "folder", b"1", tenant=TENANT)
        told.append((type(caught.value), caught.value.message, caught.value.param, caught.value.code))
    assert told[0] == told[1]


async def test_a_busy_session_is_waited_for_as_long_as_at_home(store: KVStore, told: Told) -> None:
    async with started(store, timeout_s=0.3) as one, started(store, timeout_s=0.3) as other:
        await text_of(one, "1")
        async with one._sessions.use_session((TENANT, "session", 0)):  # pyright: ignore[reportPrivateUsage] - a user that stays
            with pytest.raises(ToolFailed, match="keep this Python session busy"):
                await other.call(program("1"))


async def test_a_cancelled_call_ends_its_session_where_that_is_kept(store: KVStore, told: Told) -> None:
    patient: dict[str, Any] = {"timeout_s": 60, "cpu_s": 60}
    async with started(store, **patient) as one, started(store, **patient) as other:
        await text_of(one, "x = 1")
        told.begun.clear()
        call = asyncio.ensure_future(other.call(program(ENDLESS)))
        async with asyncio.timeout(10):
            await told.begun.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await told.ended.wait()
        assert "NameError" in await text_of(other, "x")


async def test_where_the_keeper_is_gone_the_next_call_says_so_and_begins_anew(two: Two, store: KVStore) -> None:
    one, other = two
    identity = (await one.containers().create(NEW, tenant=TENANT)).id
    await text_of(one, "x = 1", identity)
    await one._server.close()  # pyright: ignore[reportPrivateUsage] - as if killed: its records stay
    with pytest.raises(NotFound, match=identity):
        await other.containers().get(identity, tenant=TENANT)
    assert await records(store) == []
    text = await text_of(other, "globals().get('x')\n1", identity)
    assert (
        text == "[this is a new Python session, the earlier one is gone: the server process that kept it has ended]\n1"
    )


async def test_where_the_keeper_keeps_it_no_more_it_is_gone(two: Two, store: KVStore) -> None:
    one, other = two
    await text_of(one, "x = 1")
    one._registry._own_records.clear()  # pyright: ignore[reportPrivateUsage] - as if its record could not be taken away
    one._sessions.end_session((TENANT, "session", 0))  # pyright: ignore[reportPrivateUsage] - as expiry does
    with pytest.raises(NotFound, match="'session' not found"):
        await other.containers().delete("session", tenant=TENANT)
    assert await records(store) == []
    assert "NameError" in await text_of(other, "x")


async def test_a_record_that_has_changed_is_not_taken_away(store: KVStore) -> None:
    one, other = SessionRegistry(store, 60), SessionRegistry(store, 60)
    assert await one.claim_session(TENANT, "session", 60)
    found = await other.find_session(TENANT, "session")
    assert found is not None
    one.release_session(TENANT, "session")
    await one.close()
    assert await other.claim_session(TENANT, "session", 60)
    await one.delete_entries([found])
    assert len(await records(store)) == 1


async def test_records_of_processes_that_are_gone_are_taken_away_by_a_list(two: Two, store: KVStore) -> None:
    one, other = two
    left = (await other.containers().create(NEW, tenant=TENANT)).id
    for _ in range(3):
        await one.containers().create(NEW, tenant=TENANT)
    await one._server.close()  # pyright: ignore[reportPrivateUsage] - as if killed: its records stay
    assert await names(other) == [left]
    assert len(await records(store)) == 1


async def test_a_call_whose_keeper_ends_meanwhile_is_told(two: Two, told: Told) -> None:
    one, other = two
    await text_of(one, "x = 1")
    told.begun.clear()
    call = asyncio.ensure_future(other.call(program(ENDLESS)))
    async with asyncio.timeout(10):
        await told.begun.wait()
        await one.close()
        with pytest.raises(ToolFailed, match="ended before it answered"):
            await call
    assert "NameError" in await text_of(other, "x")


async def test_a_keeper_that_is_stopped_is_not_waited_for(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_keeper, "_MESSAGE_TIMEOUT_S", 0.2)
    identity = (await two[0].containers().create(NEW, tenant=TENANT)).id
    path = address(two[0])
    path.unlink()
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        containers = two[1].containers()
        for asking in (containers.get(identity, tenant=TENANT), containers.list(ANY, tenant=TENANT)):
            with pytest.raises(Overloaded, match="does not answer"):
                await asking


async def test_what_another_machine_keeps_is_neither_used_nor_forgotten(
    two: Two, store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(python_directory, "_host_scope", lambda: "another machine")
        far = SessionRegistry(store, 60)
        far.publish_at("/tmp/of-another-machine/s")
    await far.claim_session(TENANT, "far", 60)
    containers = two[0].containers()
    for asking in (containers.get("far", tenant=TENANT), containers.delete("far", tenant=TENANT)):
        with pytest.raises(Unsupported, match="another machine") as caught:
            await asking
        assert caught.value.code == "container_elsewhere"
    with pytest.raises(ToolFailed, match="another machine"):
        await two[0].call(program("1", "far"))
    assert await names(two[0]) == []
    assert len(await records(store)) == 1


async def test_of_two_that_make_a_session_at_once_one_keeps_it(two: Two, store: KVStore) -> None:
    calls = [python.call(program("n = globals().get('n', 0) + 1\nn")) for python in two]
    assert sorted([result.text for result in await asyncio.gather(*calls)]) == ["1", "2"]
    assert len(await records(store)) == 1


async def test_the_socket_is_its_users_alone_and_goes_with_it(store: KVStore) -> None:
    async with started(store) as python:
        path = address(python)
        mode = path.parent.stat()
        assert (stat.S_IMODE(mode.st_mode), mode.st_uid) == (0o700, os.geteuid())
        assert stat.S_ISSOCK(path.stat().st_mode)
    assert not path.parent.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
async def test_another_user_is_left_unanswered(two: Two) -> None:
    path = address(two[0])
    path.parent.chmod(0o755)
    path.chmod(0o777)
    request = encode_message(OperationRequest("all", TENANT, None, {"tenant": TENANT}))
    client = (
        f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({str(path)!r}); s.sendall({request!r})\n"
        "print(s.recv(1))"
    )
    assert await ask_as(os.geteuid(), client) == b"b'.'\n"
    assert await ask_as(65534, client) in (b"b''\n", b"reset\n")


async def ask_as(user: int, client: str) -> bytes:
    caught = f"try:\n    exec({client!r})\nexcept (BrokenPipeError, ConnectionResetError):\n    print('reset')"
    process = await asyncio.create_subprocess_exec(
        *("/usr/bin/setpriv", f"--reuid={user}", "--clear-groups", "/usr/bin/python3", "-c", caught),
        stdout=subprocess.PIPE,
    )
    async with asyncio.timeout(20):
        told, _ = await process.communicate()
    return told


@pytest.mark.parametrize(
    "sent", [b"", b"\0\0\0\1", b"\xff\xff\xff\xff", b"\0\0\0\3abc", b"\0\0\0\1\x80", b"GET / HTTP/1.1"]
)
async def test_what_is_no_request_does_no_harm(sent: bytes, two: Two) -> None:
    reader, writer = await asyncio.open_unix_connection(str(address(two[0])))
    writer.write(sent)
    writer.write_eof()
    async with asyncio.timeout(10):
        assert await reader.read() == b""
    writer.close()
    assert await text_of(two[0], "1") == "1"


async def test_the_folder_of_a_killed_server_is_taken_away(store: KVStore) -> None:
    server = (
        "import asyncio, os\nfrom tests.providers.tool_runtime.python.test_session_router import address, started\n"
        "async def serve():\n    async with started() as python:\n        print(address(python), flush=True)\n"
        "        os.kill(os.getpid(), 9)\nasyncio.run(serve())"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", server, stdout=subprocess.PIPE)
    async with asyncio.timeout(30):
        told, _ = await process.communicate()
    path = Path(told.decode().strip())
    async with started(store) as one:
        assert not path.parent.exists()
        async with started(store):
            assert address(one).exists()


async def test_where_there_can_be_no_socket_the_start_says_so(
    tmp_path: Path, store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(ConfigError, match="TMPDIR"):
        await Python(Python.Config.model_validate({}), None, store).start()
    assert [*long.iterdir()] == []
