"""Python's sessions as containers: terms, files in and out, and what is refused."""

import asyncio
import shutil
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import pytest_asyncio

from apis.confinement.commands import ShellCommand
from apis.containers import ContainerListParams, Containers, CreateContainer
from apis.errors import InvalidRequest, NotFound, Overloaded, Unsupported
from apis.tool_runtime import ToolRuntime
from providers.tool_runtime.python.provider import Python
from providers.tool_runtime.toolbox import Toolbox
from tests.providers.tool_runtime.python.test_python import (
    ENDLESS,
    SessionLog,
    names,
    program,
    sandboxes,
    session_log,
    started,
    text_of,
)

__all__ = ["session_log"]
pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")

ANY = ContainerListParams()
TENANT = "tenant"
PATIENCE: dict[str, Any] = {"timeout_s": 5}


async def make_container(containers: Containers, name: str = "c", **fields: Any) -> str:
    return (await containers.create(CreateContainer.model_validate({"name": name, **fields}), tenant=TENANT)).id


async def test_a_container_is_what_was_asked() -> None:
    async with started(**PATIENCE) as python:
        containers = python.containers()
        fields: dict[str, Any] = {"expires_after": {"anchor": "last_active_at", "minutes": 5}, "memory_limit": "1g"}
        container = await containers.get(await make_container(containers, **fields), tenant=TENANT)
        assert container.expires_after is not None
        assert container.network_policy is not None
        assert (container.name, container.status, container.object) == ("c", "running", "container")
        assert (container.expires_after.minutes, container.memory_limit) == (5, "1g")
        assert container.network_policy.type == "disabled"
        assert (await text_of(python, "len(bytearray(600 << 20))", container.id)) == "629145600"


async def test_an_id_chosen_by_the_caller_makes_one_container() -> None:
    async with started(**PATIENCE) as python:
        new = CreateContainer(name="auto")
        for _ in range(2):
            assert (await python.containers().create(new, tenant=TENANT, container_id="cntr_1")).id == "cntr_1"
        assert await names(python) == ["cntr_1"]


async def test_what_a_container_cannot_have_is_refused_by_name() -> None:
    wishes: dict[str, Any] = {
        "memory_limit": "4g",
        "network_policy": {"type": "allowlist", "allowed_domains": ["a.example"]},
        "file_ids": ["file-1"],
    }
    async with started(**PATIENCE) as python:
        for name, value in wishes.items():
            with pytest.raises(Unsupported) as caught:
                await make_container(python.containers(), **{name: value})
            assert caught.value.param == name
            assert await names(python) == []


async def test_a_plain_process_cannot_promise_to_have_no_network() -> None:
    async with started(backend="dangerously_unsandboxed") as python:
        with pytest.raises(Unsupported, match="network"):
            await make_container(python.containers(), network_policy={"type": "disabled"})
        container = await make_container(python.containers())
        assert (await python.containers().get(container, tenant=TENANT)).network_policy is None


async def test_files_go_in_and_out() -> None:
    async with started(**PATIENCE) as python:
        containers = python.containers()
        identity = await make_container(containers)
        assert (await containers.list_files(identity, ANY, tenant=TENANT)).data == []
        input_file = await containers.add_file(identity, "../in/data.csv", b"1,2", tenant=TENANT)
        assert (input_file.path, input_file.bytes, input_file.source) == ("/mnt/data/data.csv", 3, "user")
        assert await text_of(python, "open('/mnt/data/data.csv').read()", identity) == "'1,2'"
        await text_of(python, "import os; os.mkdir('d'); open('d/out', 'wb').write(bytes(range(256)))", identity)
        page = await containers.list_files(identity, ContainerListParams(order="asc"), tenant=TENANT)
        out = next(file for file in page.data if file.source == "assistant")
        assert (len(page.data), out.path, out.bytes) == (2, "/mnt/data/d/out", 256)
        assert await containers.content(identity, out.id, tenant=TENANT) == bytes(range(256))
        await containers.delete_file(identity, out.id, tenant=TENANT)
        for act in (containers.get_file, containers.content, containers.delete_file):
            with pytest.raises(NotFound):
                await act(identity, out.id, tenant=TENANT)
        assert await containers.get_file(identity, input_file.id, tenant=TENANT) == input_file


async def test_a_container_of_another_tenant_is_unknown() -> None:
    async with started(**PATIENCE) as python:
        containers = python.containers()
        identity = await make_container(containers)
        file = await containers.add_file(identity, "f", b"1", tenant=TENANT)
        for tenant, container in (("other", identity), (TENANT, "other"), ("", "")):
            for get in (containers.get, containers.delete):
                with pytest.raises(NotFound):
                    await get(container, tenant=tenant)
            with pytest.raises(NotFound):
                await containers.list_files(container, ANY, tenant=tenant)
            with pytest.raises(NotFound):
                await containers.content(container, file.id, tenant=tenant)
            with pytest.raises(NotFound):
                await containers.add_file(container, "f", b"2", tenant=tenant)
        assert (await containers.list(ANY, tenant="other")).data == []
        assert await containers.content(identity, file.id, tenant=TENANT) == b"1"


async def test_only_plain_files_are_given_out() -> None:
    async with started(**PATIENCE) as python:
        containers = python.containers()
        identity = await make_container(containers)
        code = "import os; os.symlink('/etc/ld.so.cache', 'link'); os.mkfifo('fifo'); os.mkdir('folder')"
        await text_of(python, code, identity)
        assert (await containers.list_files(identity, ANY, tenant=TENANT)).data == []
        for name in ("link", "folder"):
            with pytest.raises(InvalidRequest):
                await containers.add_file(identity, name, b"1", tenant=TENANT)


async def test_impossible_names_are_refused() -> None:
    async with started(**PATIENCE) as python:
        container = await make_container(python.containers())
        for name in ("", ".", "..", "a/..", ".hidden", "a\0b", "x" * 256, "\ud800", "\u202egnp"):
            with pytest.raises(InvalidRequest):
                await python.containers().add_file(container, name, b"", tenant=TENANT)


async def test_a_file_that_is_too_large_is_refused() -> None:
    async with started(timeout_s=5, scratch_mib=4) as python:
        identity = await make_container(python.containers())
        for size in (5 << 20, 17 << 20):
            with pytest.raises(InvalidRequest):
                await python.containers().add_file(identity, "large", bytes(size), tenant=TENANT)
        assert await text_of(python, "1", identity) == "1"


async def test_lists_come_in_pages() -> None:
    async with started(**PATIENCE) as python:
        containers = python.containers()
        ids = [await make_container(containers, name) for name in ("a", "b", "a")]
        first = await containers.list(ContainerListParams(limit=2), tenant=TENANT)
        assert ([each.id for each in first.data], first.has_more) == ([ids[2], ids[1]], True)
        rest = await containers.list(ContainerListParams(after=ids[1]), tenant=TENANT)
        assert ([each.id for each in rest.data], rest.has_more) == ([ids[0]], False)
        assert len((await containers.list(ContainerListParams(name="a"), tenant=TENANT)).data) == 2
        with pytest.raises(InvalidRequest):
            await containers.list(ContainerListParams(after="gone"), tenant=TENANT)


async def test_a_container_is_refused_while_all_sessions_are_in_use(session_log: SessionLog) -> None:
    async with started(max_sessions=1, timeout_s=60) as python:
        containers = python.containers()
        identity = await make_container(containers)
        await text_of(python, "x = 1", identity)
        session_log.begun.clear()
        user = asyncio.ensure_future(python.call(program(ENDLESS, identity)))
        async with asyncio.timeout(10):
            await session_log.begun.wait()
        with pytest.raises(Overloaded):
            await make_container(containers)
        user.cancel()
        await asyncio.wait([user])


async def test_a_toolbox_has_the_containers_of_its_member() -> None:
    async with started(**PATIENCE) as python:
        members: dict[str, ToolRuntime] = {"python": python}
        toolbox = Toolbox(Toolbox.Config(providers={"python": {}}), members)
        await toolbox.start()
        assert toolbox.containers() is python.containers()


LIMITS = ("cpu_limit", "timed_out")
RUINOUS: dict[str, tuple[str, tuple[str, ...]]] = {
    "loops": ("while True: pass", LIMITS),
    "sleeps": ("import time; time.sleep(100)", LIMITS),
    "takes all memory": (
        "import os\nwhile True:\n    if not os.fork():\n        x = b'x' * (20 << 20)\n",
        ("memory_limit", *LIMITS),
    ),
    "exits": ("import os; os._exit(3)", ("crashed",)),
    "crashes": ("import ctypes; ctypes.string_at(0)", ("crashed",)),
    "kills all": (
        "import os\nfor pid in (-1, os.getppid(), os.getpid()):\n    try: os.kill(pid, 9)\n    except OSError: pass",
        ("crashed",),
    ),
    "kills its group": ("import os; os.killpg(0, 9)", ("crashed",)),
    "becomes another program": ("import os; os.execv('/bin/true', ['true'])", ("crashed",)),
    "closes all": ("import os; os.closerange(0, 1000)", ("crashed",)),
    "is a fork bomb": ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", (*LIMITS, "crashed")),
    "leaves a fork bomb": (
        "import os\nif not os.fork():\n    while True:\n        try: os.fork()\n        except OSError: pass",
        ("ok", "crashed"),
    ),
    "stops the first process": ("import os; os.kill(os.getppid(), 19); os._exit(0)", ("crashed",)),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def small() -> AsyncGenerator[Python]:
    async with started(timeout_s=1, cpu_s=0.5, memory_mib=128) as python:
        yield python


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", RUINOUS)
async def test_a_container_keeps_its_files_when_a_program(name: str, small: Python) -> None:
    """Uploaded files and files of programs are there afterwards, and for the next program."""
    code, exit_statuses = RUINOUS[name]
    containers = small.containers()
    container = await make_container(containers)
    await containers.add_file(container, "data.csv", b"a,b", tenant=TENANT)
    await text_of(small, "open('made.txt', 'w').write('an hour of work')", container)
    result = await small.call(program(f"open('last.txt', 'w').close()\n{code}", container))
    assert result.data["exit"] in exit_statuses
    if result.data["exit"] != "ok":
        assert "Its variables are gone; its files are kept" in result.text
    assert [file.name for file in result.files] == ["last.txt"]
    files = (await containers.list_files(container, ANY, tenant=TENANT)).data
    assert {file.path.rpartition("/")[2]: file.source for file in files} == {
        "data.csv": "user",
        "made.txt": "assistant",
        "last.txt": "assistant",
    }
    assert (await containers.get(container, tenant=TENANT)).status == "running"
    read = "import os; sorted(os.listdir()), open('made.txt').read()"
    assert await text_of(small, read, container) == "(['data.csv', 'last.txt', 'made.txt'], 'an hour of work')"
    await containers.delete(container, tenant=TENANT)


async def test_a_container_keeps_its_files_when_its_caller_leaves(session_log: SessionLog) -> None:
    """The program ends, and nothing else."""
    async with started(**PATIENCE) as python:
        container = await make_container(python.containers())
        await text_of(python, "x = 1; open('made.txt', 'w').close()", container)
        session_log.begun.clear()
        call = asyncio.ensure_future(python.call(program(ENDLESS, container)))
        async with asyncio.timeout(10):
            await session_log.begun.wait()
            call.cancel()
            await asyncio.wait([call])
        assert await text_of(python, "import os; os.listdir(), 'x' in globals()", container) == (
            "(['made.txt'], False)"
        )


async def test_the_variables_that_a_command_has_ended_are_missed() -> None:
    """The next program says that it begins a new session, and why."""
    async with started(**PATIENCE) as python:
        container = await make_container(python.containers())
        await text_of(python, "x = 1; open('made.txt', 'w').close()", container)
        commands = [ShellCommand("kill -9 -1", 5, 1000)]
        await python.containers().run_commands(container, commands, lambda _: None, tenant=TENANT)
        program = "import os; os.listdir(), 'x' in globals()"
        text = await text_of(python, program, container)
        if text.startswith("[the Python session was ended"):  # the program came before the end was noticed
            assert "by SIGKILL. Its variables are gone; its files are kept" in text
            assert await text_of(python, program, container) == "(['made.txt'], False)"
        else:
            assert text == (
                "[this is a new Python session, the earlier one is gone: it was ended by SIGKILL]\n"
                "(['made.txt'], False)"
            )


async def test_a_container_that_has_lost_its_files_has_expired() -> None:
    """No empty list of files that says `running`."""
    async with started(**PATIENCE) as python:
        container = await make_container(python.containers())
        before = sandboxes()
        await text_of(python, "open('made.txt', 'w').close()", container)
        (sandbox,) = sandboxes() - before
        sandbox.kill()
        assert "Its variables and files are gone" in await text_of(python, "1", container)
        with pytest.raises(NotFound, match="has expired: its first process ended"):
            await python.containers().get(container, tenant=TENANT)
