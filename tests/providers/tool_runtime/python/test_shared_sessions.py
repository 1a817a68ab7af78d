"""Commands of several calls in one container at the same time, and what else is done with it meanwhile."""

import asyncio
import io
import shutil
import tarfile
from typing import Any

import pytest

from apis.confinement.commands import CommandEvent, ShellCommand
from apis.containers import Containers, CreateContainer
from apis.workspaces import WorkspaceContents, WorkspaceRequest
from providers.tool_runtime.python.sessions import UseLock
from tests.providers.tool_runtime.python.test_python import started, text_of
from tests.providers.tool_runtime.python.test_python_containers import TENANT

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
UNTIL = "until [ -e {0} ]; do sleep 0.02; done"


class Call:
    """The commands of one call, which run in a task, and what they have reported."""

    def __init__(self, containers: Containers, container: str, command: str) -> None:
        self.events: list[CommandEvent] = []
        self._has_news = asyncio.Event()
        commands = [ShellCommand(command, 30, 1000)]
        self.task = asyncio.ensure_future(containers.run_commands(container, commands, self._take, tenant=TENANT))

    def _take(self, event: CommandEvent) -> None:
        self.events.append(event)
        self._has_news.set()

    async def begun(self) -> None:
        """Wait until the command has written something."""
        async with asyncio.timeout(20):
            await self._has_news.wait()

    async def end(self) -> tuple[str, int | None]:
        """The output and the exit code."""
        await self.task
        return "".join(event.stdout + event.stderr for event in self.events), self.events[-1].exit_code


async def make(containers: Containers) -> str:
    return (await containers.create(CreateContainer(name="c"), tenant=TENANT)).id


async def test_commands_of_several_calls_meet_and_files_are_read_and_written_meanwhile() -> None:
    async with started(timeout_s=20) as python:
        containers = python.containers()
        container = await make(containers)
        one, other = [
            Call(containers, container, f"echo begun; touch {own}; {UNTIL.format(met)}; {UNTIL.format('go')}; cat go")
            for own, met in ("ab", "ba")
        ]
        await asyncio.gather(one.begun(), other.begun())
        await containers.add_file(container, "go", b"on", tenant=TENANT)
        assert await one.end() == await other.end() == ("begun\non", 0)


async def test_a_limit_that_one_call_exceeds_ends_the_commands_of_all_and_the_files_stay() -> None:
    async with started(timeout_s=60, cpu_s=60, memory_mib=128) as python:
        containers = python.containers()
        container = await make(containers)
        quiet = Call(containers, container, "echo begun > kept; echo begun; sleep 60")
        await quiet.begun()
        greedy = Call(containers, container, "head -c 500m /dev/zero | tail")
        output, code = await quiet.end()
        assert ("it used more than 128 MiB of memory" in output, code) == (True, 137)
        assert (await greedy.end())[1] == 137
        assert await Call(containers, container, "cat kept").end() == ("begun\n", 0)


async def test_a_cancelled_call_leaves_the_commands_of_another_one() -> None:
    async with started(timeout_s=20) as python:
        containers = python.containers()
        container = await make(containers)
        quitter = Call(containers, container, "echo begun; sleep 61")
        await quitter.begun()
        other = Call(containers, container, f"echo begun; {UNTIL.format('go')}; echo went")
        await other.begun()
        quitter.task.cancel()
        await asyncio.wait([quitter.task])
        gone = "while cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -q 'sleep 6[1]'; do sleep 0.02; done"
        assert await Call(containers, container, gone).end() == ("", 0)
        await containers.add_file(container, "go", b"", tenant=TENANT)
        assert await other.end() == ("begun\nwent\n", 0)


async def test_code_runs_when_commands_have_ended() -> None:
    async with started(timeout_s=20) as python:
        containers = python.containers()
        container = await make(containers)
        first = Call(containers, container, "echo begun; sleep 0.5; touch ended")
        await first.begun()
        assert await text_of(python, "import os; os.listdir()", container) == "['ended']"
        assert await first.end() == ("begun\n", 0)


async def test_a_workspace_is_saved_while_commands_change_its_files() -> None:
    async with started(timeout_s=20) as python:
        workspaces: Any = python.workspaces()
        await workspaces.create("cntr_env_w", WorkspaceRequest("w", 20), WorkspaceContents(), tenant=TENANT)
        restless = "echo begun; until [ -e go ]; do head -c 3000000 /dev/zero > f; : > f; rm -f g; mkfifo g; rm g; done"
        call = Call(python.containers(), "cntr_env_w", restless)
        await call.begun()
        for _ in range(10):
            archive = await workspaces.pack("cntr_env_w", tenant=TENANT)
            with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
                files = [file.read() for each in tar if each.isreg() and (file := tar.extractfile(each)) is not None]
                assert (len(files) <= 1, "outputs" in tar.getnames()) == (True, True)
                assert not any(each.strip(b"\0") for each in files)
        await workspaces.write_file("cntr_env_w", "/workspace/go", b"", tenant=TENANT)
        assert (await call.end())[1] == 0


async def test_who_wants_a_session_alone_is_not_overtaken_by_those_that_share_it() -> None:
    lock, order = UseLock(), list[str]()
    leave = asyncio.Event()

    async def share(name: str) -> None:
        async with lock.share():
            order.append(name)
            await leave.wait()

    async def have_alone() -> None:
        async with lock.have_alone():
            order.append("alone")

    tasks = [asyncio.ensure_future(each) for each in (share("one"), share("other"), have_alone(), share("late"))]
    await asyncio.wait(tasks, timeout=0.05)
    assert order == ["one", "other"]
    leave.set()
    await asyncio.gather(*tasks)
    assert order == ["one", "other", "alone", "late"]
