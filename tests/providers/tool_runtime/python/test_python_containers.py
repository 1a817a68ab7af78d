"""Python's sessions as containers: terms, files in and out, and what is refused."""

import asyncio
import shutil
from typing import Any

import pytest

from apis.containers import ContainerListParams, Containers, CreateContainer
from apis.errors import InvalidRequest, NotFound, Overloaded, Unsupported
from apis.tool_runtime import ToolRuntime
from providers.tool_runtime.toolbox import Toolbox
from tests.providers.tool_runtime.python.test_python import (
    ENDLESS,
    SessionLog,
    names,
    program,
    session_log,
    started,
    text_of,
)

__all__ = ["session_log"]
pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")

ANY = ContainerListParams()
TENANT = "tenant"
PATIENCE: dict[str, Any] = {"timeout_s": 5}


async def made(containers: Containers, name: str = "c", **fields: Any) -> str:
    return (await containers.create(CreateContainer.model_validate({"name": name, **fields}), tenant=TENANT)).id


async def test_a_container_is_what_was_asked() -> None:
    async with started(**PATIENCE) as python:
        containers = python.containers()
        asked: dict[str, Any] = {"expires_after": {"anchor": "last_active_at", "minutes": 5}, "memory_limit": "1g"}
        container = await containers.get(await made(containers, **asked), tenant=TENANT)
        assert container.expires_after is not None
        assert container.network_policy is not None
        assert (container.name, container.status, container.object) == ("c", "running", "container")
        assert (container.expires_after.minutes, container.memory_limit) == (5, "1g")
        assert container.network_policy.type == "disabled"
        assert (await text_of(python, "len(bytearray(600 << 20))", container.id)) == "629145600"


async def test_an_id_that_was_told_before_makes_one_container() -> None:
    async with started(**PATIENCE) as python:
        new = CreateContainer(name="auto")
        for _ in range(2):
            assert (await python.containers().create(new, tenant=TENANT, container_id="cntr_1")).id == "cntr_1"
        assert await names(python) == ["cntr_1"]


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"memory_limit": "4g"}, "memory_limit"),
        ({"network_policy": {"type": "allowlist", "allowed_domains": ["a.example"]}}, "network_policy"),
        ({"file_ids": ["file-1"]}, "file_ids"),
    ],
)
async def test_what_a_container_cannot_have_is_refused_by_name(asked: dict[str, Any], param: str) -> None:
    async with started(**PATIENCE) as python:
        with pytest.raises(Unsupported) as caught:
            await made(python.containers(), **asked)
        assert caught.value.param == param
        assert await names(python) == []


async def test_a_plain_process_cannot_promise_to_have_no_network() -> None:
    async with started(backend="dangerously_unsandboxed") as python:
        with pytest.raises(Unsupported, match="network"):
            await made(python.containers(), network_policy={"type": "disabled"})
        container = await made(python.containers())
        assert (await python.containers().get(container, tenant=TENANT)).network_policy is None


async def test_files_go_in_and_out() -> None:
    async with started(**PATIENCE) as python:
        containers = python.containers()
        identity = await made(containers)
        assert (await containers.list_files(identity, ANY, tenant=TENANT)).data == []
        given = await containers.add_file(identity, "../in/data.csv", b"1,2", tenant=TENANT)
        assert (given.path, given.bytes, given.source) == ("/mnt/data/data.csv", 3, "user")
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
        assert await containers.get_file(identity, given.id, tenant=TENANT) == given


async def test_a_container_of_another_tenant_is_unknown() -> None:
    async with started(**PATIENCE) as python:
        containers = python.containers()
        identity = await made(containers)
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
        identity = await made(containers)
        code = "import os; os.symlink('/etc/ld.so.cache', 'link'); os.mkfifo('fifo'); os.mkdir('folder')"
        await text_of(python, code, identity)
        assert (await containers.list_files(identity, ANY, tenant=TENANT)).data == []
        for name in ("link", "folder"):
            with pytest.raises(InvalidRequest):
                await containers.add_file(identity, name, b"1", tenant=TENANT)


@pytest.mark.parametrize("name", ["", ".", "..", "a/..", ".hidden", "a\0b", "x" * 256, "\ud800", "\u202egnp"])
async def test_impossible_names_are_refused(name: str) -> None:
    async with started(**PATIENCE) as python:
        with pytest.raises(InvalidRequest):
            await python.containers().add_file(await made(python.containers()), name, b"", tenant=TENANT)


async def test_a_file_that_is_too_large_is_refused() -> None:
    async with started(timeout_s=5, scratch_mib=4) as python:
        identity = await made(python.containers())
        for size in (5 << 20, 17 << 20):
            with pytest.raises(InvalidRequest):
                await python.containers().add_file(identity, "large", bytes(size), tenant=TENANT)
        assert await text_of(python, "1", identity) == "1"


async def test_lists_come_in_pages() -> None:
    async with started(**PATIENCE) as python:
        containers = python.containers()
        ids = [await made(containers, name) for name in ("a", "b", "a")]
        first = await containers.list(ContainerListParams(limit=2), tenant=TENANT)
        assert ([each.id for each in first.data], first.has_more) == ([ids[2], ids[1]], True)
        rest = await containers.list(ContainerListParams(after=ids[1]), tenant=TENANT)
        assert ([each.id for each in rest.data], rest.has_more) == ([ids[0]], False)
        assert len((await containers.list(ContainerListParams(name="a"), tenant=TENANT)).data) == 2
        with pytest.raises(InvalidRequest):
            await containers.list(ContainerListParams(after="gone"), tenant=TENANT)


async def test_where_all_places_are_in_use_there_is_no_room(session_log: SessionLog) -> None:
    async with started(max_sessions=1, timeout_s=60) as python:
        containers = python.containers()
        identity = await made(containers)
        await text_of(python, "x = 1", identity)
        session_log.begun.clear()
        user = asyncio.ensure_future(python.call(program(ENDLESS, identity)))
        async with asyncio.timeout(10):
            await session_log.begun.wait()
        with pytest.raises(Overloaded):
            await made(containers)
        user.cancel()
        await asyncio.wait([user])


async def test_a_toolbox_has_the_containers_of_its_member() -> None:
    async with started(**PATIENCE) as python:
        members: dict[str, ToolRuntime] = {"python": python}
        toolbox = Toolbox(Toolbox.Config(providers={"python": {}}), members)
        await toolbox.start()
        assert toolbox.containers() is python.containers()
