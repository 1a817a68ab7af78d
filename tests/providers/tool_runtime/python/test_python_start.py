"""The start of the tool `python`: it says what holds programs, and refuses what it cannot hold, naming the remedy."""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from apis.containers import ContainerListParams, Containers, CreateContainer
from apis.errors import ConfigError, NotFound
from providers.tool_runtime.python.machine_sessions import MachineSessions
from providers.tool_runtime.python.provider import Python
from stack.build import confinement_lines, open_stack
from stack.config import StackConfig, load_config
from tests.providers.tool_runtime.python.test_python import build, memory, started, text_of

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
KEYS = [{"key": "a", "tenant": "one"}, {"key": "b", "tenant": "two"}]


def stack_config(keys: list[dict[str, str]], **python: Any) -> StackConfig:
    sections = {
        "inference": {"provider": "scripted"},
        "kv_store": {"provider": "memory"},
        "tool_runtime": {"provider": "toolbox", "providers": {"code": {"provider": "python", **python}}},
        "server": {"api_keys": keys},
    }
    return StackConfig.model_validate(sections)


async def confinement_of(config: StackConfig) -> str:
    async with open_stack(config) as stack:
        return "\n".join(confinement_lines(stack))


async def test_hosts_are_opened_in_the_sandbox_alone() -> None:
    python = build(memory(), backend="dangerously_unsandboxed", egress={"allowed_hosts": ["a.example"]})
    with pytest.raises(ConfigError, match=r"egress.*bubblewrap"):
        await python.start()
    for wrong in ("http://a.example", "a.example:0", "*"):
        with pytest.raises(ValueError, match=r"expected a host"):
            Python.Config.model_validate({"egress": {"allowed_hosts": [wrong]}})


async def test_the_start_says_what_holds_programs() -> None:
    """The log says it in one line."""
    assert "bubblewrap with seccomp; " in await confinement_of(stack_config([]))
    unconfined = await confinement_of(stack_config([], backend="dangerously_unsandboxed"))
    assert "tool_runtime.providers.code" in unconfined
    assert "all the rights of this server" in unconfined


async def test_several_tenants_need_bounds_that_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of several tenants does not start without a control group, unless its config permits it."""
    async with started() as python:
        if python.shared_use_risk() is None:
            await confinement_of(stack_config(KEYS))
    monkeypatch.setattr(MachineSessions, "has_cgroup", False)
    with pytest.raises(
        ConfigError, match=r"tool_runtime.providers.code: server.api_keys has several tenants.*Delegate=yes"
    ):
        await confinement_of(stack_config(KEYS))
    same = [{"key": "a", "tenant": "one"}, {"key": "b", "tenant": "one"}]
    assert "without a control group" in await confinement_of(stack_config(same))
    assert "without a control group" in await confinement_of(stack_config(KEYS, dangerously_share_without_bounds=True))
    with pytest.raises(ConfigError, match="dangerously_share_without_bounds"):
        await confinement_of(stack_config(KEYS, backend="dangerously_unsandboxed"))


async def test_programs_may_have_a_server_of_their_own_where_the_operator_allows_it() -> None:
    """The option for a server inside."""
    program = (
        "import socket\nserver = socket.create_server(('127.0.0.1', 0))\n"
        "client = socket.create_connection(server.getsockname())\nclient.send(b'hi'); server.accept()[0].recv(9)"
    )
    async with started(allow_loopback=True) as python:
        assert await text_of(python, program) == "b'hi'"
        assert "Error" in await text_of(python, "socket.create_connection(('192.0.2.1', 80), 1)")
    async with started() as python:
        assert "PermissionError" in await text_of(python, program)


async def test_an_address_space_of_a_half_gibibyte_more_suffices_for_threads_and_processes() -> None:
    """The bound on the address space leaves room for what libraries reserve."""
    program = (
        "import threading, multiprocessing, resource\n"
        "threads = [threading.Thread(target=bytearray, args=(1 << 20,)) for _ in range(20)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "with multiprocessing.Pool(4) as pool: print(sum(pool.map(int, '123')))\n"
        "resource.getrlimit(resource.RLIMIT_AS)[1] >> 20, resource.getrlimit(resource.RLIMIT_NOFILE)[1]"
    )
    async with started() as python:
        assert await text_of(python, program) == "6\n(1024, 128)"


@pytest.fixture
def closed_folder() -> Generator[Path]:
    """A folder that only this user may enter, below none that every sandbox has of its own."""
    folder = Path(tempfile.mkdtemp(prefix="python-closed-", dir="/var/tmp"))
    yield folder
    shutil.rmtree(folder)


def make_environment(folder: Path) -> None:
    subprocess.run(["/usr/bin/python3", "-m", "venv", "--without-pip", folder], check=True)


async def refusal(python: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        async with started(python=python):
            pass
    return str(caught.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only a server run by root has another user for its programs")
async def test_an_interpreter_in_a_closed_folder_is_named_with_the_folder(closed_folder: Path) -> None:
    """Neither bubblewrap nor user namespaces are to blame."""
    make_environment(closed_folder / "venv")
    message = await refusal(closed_folder / "venv/bin/python")
    assert f"{closed_folder}/venv/bin/python cannot be used" in message
    assert f"must not enter {closed_folder}. Make the environment where all users may read" in message
    assert "user namespaces" not in message
    closed_folder.chmod(0o755)
    async with started(python=closed_folder / "venv/bin/python") as python:
        assert await text_of(python, "import sys; sys.prefix") == f"'{closed_folder}/venv'"


async def test_an_interpreter_below_a_folder_of_the_sandboxs_own_is_named(tmp_path: Path) -> None:
    """Every sandbox has a /tmp of its own."""
    folder = Path(tempfile.mkdtemp(prefix="python-open-", dir="/tmp"))
    try:
        folder.chmod(0o755)
        make_environment(folder / "venv")
        message = await refusal(folder / "venv/bin/python")
        assert f"needs {folder}/venv, which the sandbox cannot show" in message
        assert "/opt" in message
    finally:
        shutil.rmtree(folder)
    assert "tool_runtime.python" in await refusal(tmp_path / "none")


async def until_gone(containers: Containers, container_id: str) -> None:
    async with asyncio.timeout(10):
        while True:
            await containers.get(container_id, tenant="tenant")


async def test_an_expired_container_says_so() -> None:
    """The audit of hosted tools: an expired container is not merely 'not found'."""
    async with started(idle_timeout_s=0.2) as python:
        containers = python.containers()
        container = await containers.create(CreateContainer(name="c"), tenant="tenant")
        with pytest.raises(NotFound, match=r"has expired: it was not used for .* minutes\. .* make a new one"):
            await until_gone(containers, container.id)
        with pytest.raises(NotFound, match="has expired"):
            await containers.list_files(container.id, ContainerListParams(), tenant="tenant")
        for name, tenant in ((container.id, "other"), ("cntr_none", "tenant")):
            with pytest.raises(NotFound, match="not found"):
                await containers.get(name, tenant=tenant)


def test_the_process_of_a_server_imports_nothing_heavy() -> None:
    """It starts with the first program of a stack, and stays in memory: the SDK's types alone would be 0.6 s."""
    code = "import sys, providers.tool_runtime.python.session_server; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"openai", "pydantic", "httpx2", "starlette"} & set(run.stdout.split())


async def test_programs_import_the_packages_of_the_environment_that_the_run_config_names(
    closed_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The packaged config takes it from `TOOLS_PYTHON`; without it the system's Python has no packages."""
    make_environment(closed_folder / "venv")
    closed_folder.chmod(0o755)
    (site_packages,) = (closed_folder / "venv/lib").glob("python*/site-packages")
    (site_packages / "installed_package.py").write_text("def count(): return [0, 1, 2]\n")
    monkeypatch.setenv("TOOLS_PYTHON", str(closed_folder / "venv/bin/python"))
    section = (await asyncio.to_thread(load_config, "tools")).tool_runtime
    assert section is not None
    (named,) = (each["python"] for each in section.model_dump()["providers"].values() if each["provider"] == "python")
    async with started(python=named) as python:
        assert await text_of(python, "import installed_package; installed_package.count()") == "[0, 1, 2]"
    async with started() as python:
        assert "ModuleNotFoundError" in await text_of(python, "import installed_package")
