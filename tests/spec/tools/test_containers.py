"""/v1/containers through the SDK: containers, the files in them, and who may see them."""

import asyncio
import json
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from openai import APIStatusError, BadRequestError, NotFoundError

from tests.providers.tool_runtime.python.test_python import SessionLog, session_log
from tests.support.sdk.answer_shapes import Script, call
from tests.support.sdk.client import sdk_client
from tests.support.sdk.requests import bare, create, messages
from tests.support.servers.normal_user import SHARED_PYTHON
from tests.support.servers.serving import Served, serving

__all__ = ["session_log"]
pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")

KEYS = [{"key": "key-of-a", "tenant": "a"}, {"key": "key-of-b", "tenant": "b"}]


@asynccontextmanager
async def keeping(*turns: Script, python: Any = None, **sections: Any) -> AsyncGenerator[Served]:
    """A stack with containers, in a toolbox as they mostly are."""
    code: dict[str, Any] = {"provider": "python", "timeout_s": 5, **SHARED_PYTHON, **(python or {})}
    inference = {"provider": "scripted", "turns": [*turns]} if turns else None
    async with serving(
        inference, tool_runtime={"provider": "toolbox", "providers": {"code": code}}, **sections
    ) as served:
        yield served


def containers(served: Served) -> Any:
    """The SDK's `client.containers`."""
    return served.client.containers


async def test_a_container_is_made_found_listed_and_deleted() -> None:
    async with keeping() as served:
        container = await containers(served).create(
            name="mine", expires_after={"anchor": "last_active_at", "minutes": 7}, memory_limit="1g"
        )
        assert (container.object, container.name, container.status, container.id[:5]) == (
            "container",
            "mine",
            "running",
            "cntr_",
        )
        assert (container.expires_after.anchor, container.expires_after.minutes) == ("last_active_at", 7)
        assert (container.memory_limit, container.network_policy.type) == ("1g", "disabled")
        assert bare(await containers(served).retrieve(container.id)) == bare(container)
        assert [each.id async for each in containers(served).list()] == [container.id]
        await containers(served).delete(container.id)
        for gone in (containers(served).retrieve, containers(served).delete):
            with pytest.raises(NotFoundError, match="not found"):
                await gone(container.id)
        assert (await containers(served).list()).data == []


async def test_lists_are_walked_through_page_by_page() -> None:
    async with keeping() as served:
        container_ids = [(await containers(served).create(name=name)).id for name in ("a", "b", "a")]
        assert [each.id async for each in containers(served).list(limit=1)] == container_ids[::-1]
        assert [each.id async for each in containers(served).list(limit=2, order="asc")] == container_ids
        assert [each.id async for each in containers(served).list(name="a", order="asc")] == [
            container_ids[0],
            container_ids[2],
        ]


async def test_a_file_is_put_in_read_and_deleted() -> None:
    data = bytes(range(256)) * 5000
    async with keeping() as served:
        container = (await containers(served).create(name="mine")).id
        files = containers(served).files
        container_file = await files.create(container, file=("dir/na\u00efve data.bin", data))
        assert (container_file.object, container_file.bytes, container_file.source) == (
            "container.file",
            len(data),
            "user",
        )
        assert (container_file.path, container_file.container_id, container_file.id[:6]) == (
            "/mnt/data/na\u00efve data.bin",
            container,
            "cfile_",
        )
        assert bare(await files.retrieve(container_file.id, container_id=container)) == bare(container_file)
        assert (await files.content.retrieve(container_file.id, container_id=container)).content == data
        assert [each.id async for each in files.list(container)] == [container_file.id]
        await files.delete(container_file.id, container_id=container)
        with pytest.raises(NotFoundError):
            await files.content.retrieve(container_file.id, container_id=container)


async def test_a_program_reads_the_clients_file_and_the_client_reads_the_programs() -> None:
    code = json.dumps(
        {"code": "open('sum', 'w').write(str(sum(map(int, open('/mnt/data/in.csv').read().split(',')))))"}
    )
    async with keeping([call("python", code)], [{"text": "Done."}]) as served:
        container = (await containers(served).create(name="mine")).id
        await containers(served).files.create(container, file=("in.csv", b"1,2,39"))
        await create(served, tools=[{"type": "code_interpreter", "container": container}])
        assert "[files: sum]" in messages(served)[-1]["content"]
        files = {each.path: each async for each in containers(served).files.list(container, limit=1)}
        program = files["/mnt/data/sum"]
        content = await containers(served).files.content.retrieve(program.id, container_id=container)
    assert (content.content, program.source, len(files)) == (b"42", "assistant", 2)


async def test_what_programs_write_is_no_page_of_the_server() -> None:
    async with keeping() as served:
        container = (await containers(served).create(name="mine")).id
        file = await containers(served).files.create(container, file=("x.html", b"<script>"))
        url = f"{served.url}/v1/containers/{container}/files/{file.id}/content"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            assert answer.content_type == "application/octet-stream"
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["content-disposition"] == "attachment"


async def test_uploaded_files_can_be_copied_into_a_container() -> None:
    sections: Any = {"more": {"files": {"provider": "kv"}}}
    async with keeping(**sections) as served:
        uploaded = await served.client.files.create(file=("a.txt", b"one"), purpose="user_data")
        container = await containers(served).create(name="mine", file_ids=[uploaded.id])
        files = containers(served).files
        (first,) = (await files.list(container.id)).data
        again = await files.create(container.id, file_id=uploaded.id)
        assert (first.path, first.id, first.source) == ("/mnt/data/a.txt", again.id, "user")
        assert (await files.content.retrieve(first.id, container_id=container.id)).content == b"one"
        with pytest.raises(NotFoundError):
            await containers(served).create(name="other", file_ids=["file-none"])
        assert len((await containers(served).list()).data) == 1


async def test_the_interpreters_own_container_gets_uploaded_files() -> None:
    sections: Any = {"more": {"files": {"provider": "kv"}}}
    turns: list[Script] = [[call("python", '{"code": "open(\'a.txt\').read()"}')], [{"text": "Done."}]]
    async with keeping(*turns, **sections) as served:
        uploaded = await served.client.files.create(file=("a.txt", b"one"), purpose="user_data")
        declared = {"type": "code_interpreter", "container": {"type": "auto", "file_ids": [uploaded.id]}}
        await create(served, tools=[declared])
        assert messages(served)[-1]["content"] == "'one'"


async def test_another_tenants_containers_are_unknown_ones() -> None:
    async with keeping(server={"api_keys": KEYS}) as served:
        mine = (await containers(served).create(name="mine")).id
        file = (await containers(served).files.create(mine, file=("f", b"1"))).id
        async with sdk_client(served.url, "key-of-b") as client:
            assert (await client.containers.list()).data == []
            for container in (mine, "cntr_" + "0" * 32):
                for asking in (
                    client.containers.retrieve(container),
                    client.containers.delete(container),
                    client.containers.files.create(container, file=("f", b"2")),
                    client.containers.files.retrieve(file, container_id=container),
                    client.containers.files.content.retrieve(file, container_id=container),
                    client.containers.files.delete(file, container_id=container),
                ):
                    with pytest.raises(NotFoundError) as caught:
                        await asking
                    assert caught.value.message.count(container) >= caught.value.message.count("cntr_")
        content = await containers(served).files.content.retrieve(file, container_id=mine)
        assert content.content == b"1"


async def test_a_container_expires(session_log: SessionLog) -> None:
    async with keeping(python={"idle_timeout_s": 0.3}) as served:
        container = (await containers(served).create(name="mine")).id
        await containers(served).files.create(container, file=("f", b"1"))
        async with asyncio.timeout(10):
            await session_log.ended.wait()
        with pytest.raises(NotFoundError):
            await containers(served).retrieve(container)


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"name": ""}, "name"),
    ({"name": "a", "memory_limit": "16g"}, "memory_limit"),
    ({"name": "a", "memory_limit": "3g"}, "memory_limit"),
    ({"name": "a", "file_ids": ["file-1"]}, "file_ids"),
    ({"name": "a", "expires_after": {"anchor": "created_at", "minutes": 1}}, "expires_after.anchor"),
    ({"name": "a", "expires_after": {"anchor": "last_active_at", "minutes": 0}}, "expires_after.minutes"),
    ({"name": "a", "network_policy": {"type": "allowlist", "allowed_domains": ["a.b"]}}, "network_policy"),
]


async def test_what_cannot_be_had_is_refused_by_name() -> None:
    async with keeping() as served:
        for fields, param in IMPOSSIBLE:
            with pytest.raises(BadRequestError) as caught:
                await containers(served).create(**fields)
            assert caught.value.param == param, fields


async def test_files_of_impossible_names_are_refused() -> None:
    async with keeping() as served:
        container = (await containers(served).create(name="mine")).id
        for name in (".", "..", ".hidden", "a\u202eb", "x" * 300):
            with pytest.raises(BadRequestError):
                await containers(served).files.create(container, file=(name, b"1"))


NO_FILE: list[tuple[str, bytes, int]] = [
    ("multipart/form-data", b"x", 400),
    ("multipart/form-data; boundary=b", b"", 400),
    (
        "multipart/form-data; boundary=b",
        b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nx\r\n--b--',
        400,
    ),
    ("multipart/form-data; boundary=b", b"--b\r\n" + b"x" * 100_000, 400),
    ("application/json", b"{}", 400),
    ("application/json", b'{"file_id": "file-1"}', 400),
    ("text/plain", b"x", 415),
]


async def test_bodies_that_hold_no_file_are_refused() -> None:
    async with keeping() as served, aiohttp.ClientSession() as session:
        container = (await containers(served).create(name="mine")).id
        url = f"{served.url}/v1/containers/{container}/files"
        for kind, body, status in NO_FILE:
            async with session.post(url, data=body, headers={"content-type": kind}) as answer:
                assert answer.status == status, body
                assert (await answer.json())["error"]["message"]
            assert (await containers(served).files.list(container)).data == []


async def test_a_file_that_is_too_large_is_refused() -> None:
    async with keeping() as served:
        container = (await containers(served).create(name="mine")).id
        with pytest.raises(APIStatusError) as caught:
            await containers(served).files.create(container, file=("large", bytes(17 << 20)))
    assert caught.value.status_code == 413


async def test_without_a_python_tool_there_are_no_containers() -> None:
    async with serving() as served:
        with pytest.raises(BadRequestError, match="tool_runtime"):
            await containers(served).list()
