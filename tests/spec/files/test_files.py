"""Files through the official SDK: what was uploaded comes back, listed, whole, to its tenant alone."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any, get_args

import httpx
import openai
import pytest
from openai.types import FilePurpose

from apis.storage.kv_store import Delete
from tests.support.sdk.client import TLS, sdk_client
from tests.support.servers.serving import Served, serving

FILES: dict[str, Any] = {"files": {"provider": "kv", "max_file_bytes": 2_000_000}}
KEYS = [{"key": "key-a", "tenant": "a"}, {"key": "key-b", "tenant": "b"}]


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving(more=FILES) as served:
        yield served


async def test_what_was_uploaded_comes_back(served: Served) -> None:
    data = bytes(range(256)) * 4321
    new_file = await served.client.files.create(file=("répört.bin", data), purpose="user_data")
    assert new_file.id.startswith("file-")
    assert (new_file.object, new_file.bytes, new_file.filename) == ("file", len(data), "répört.bin")
    assert (new_file.purpose, new_file.expires_at) == ("user_data", None)
    assert await served.client.files.retrieve(new_file.id) == new_file
    content = await served.client.files.content(new_file.id)
    assert content.content == data
    headers = content.response.headers
    assert headers["content-type"] == "application/octet-stream"
    assert headers["content-disposition"].startswith("attachment; filename*=UTF-8''r%C3%A9p")
    assert headers["x-content-type-options"] == "nosniff"
    deleted = await served.client.files.delete(new_file.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (new_file.id, True, "file")
    with pytest.raises(openai.NotFoundError):
        await served.client.files.retrieve(new_file.id)
    with pytest.raises(openai.NotFoundError):
        await served.client.files.content(new_file.id)


async def test_a_file_may_have_every_purpose_of_the_api(served: Served) -> None:
    """Files for evals are stored, too."""
    for purpose in get_args(FilePurpose):
        uploaded = await served.client.files.create(file=("a.jsonl", b"{}"), purpose=purpose)
        assert uploaded.purpose == purpose
        page = await served.client.files.list(purpose=purpose)
        assert [file.id for file in page.data] == [uploaded.id]


async def test_an_empty_file_is_a_file(served: Served) -> None:
    new_file = await served.client.files.create(file=("empty.txt", b""), purpose="assistants")
    assert new_file.bytes == 0
    assert (await served.client.files.content(new_file.id)).content == b""


async def test_lists_page_by_cursor_in_both_orders(served: Served) -> None:
    file_ids = [
        (await served.client.files.create(file=(f"{i}.txt", b"x"), purpose="vision" if i % 2 else "batch")).id
        for i in range(7)
    ]
    listed = [file.id async for file in served.client.files.list(limit=2, order="asc")]
    assert sorted(listed) == sorted(file_ids)
    assert listed == [file.id async for file in served.client.files.list(limit=3)][::-1]
    page = await served.client.files.list(limit=2, purpose="vision", order="asc")
    assert [file.purpose for file in page.data] == ["vision"] * 2
    assert page.has_more
    assert len((await served.client.files.list(purpose="vision")).data) == 3
    with pytest.raises(openai.BadRequestError, match="limit"):
        await served.client.files.list(limit=0)


async def test_expiry_is_shown_and_bounded(served: Served) -> None:
    new_file = await served.client.files.create(
        file=("a.txt", b"x"), purpose="user_data", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert new_file.expires_at == new_file.created_at + 3600
    batch = await served.client.files.create(file=("a.jsonl", b"{}"), purpose="batch")
    assert batch.expires_at == batch.created_at + 30 * 86400
    with pytest.raises(openai.BadRequestError) as caught:
        await served.client.files.create(
            file=("a.txt", b"x"), purpose="user_data", expires_after={"anchor": "created_at", "seconds": 1}
        )
    assert caught.value.param == "expires_after.seconds"


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("../../etc/passwd", "passwd"),
        ("..\\..\\boot.ini", "boot.ini"),
        ("a\u202egpj.exe", "agpj.exe"),
        ("x" * 2_000 + ".txt", "x" * 251 + ".txt"),
        ("..", ".."),
        ("/", "file"),
    ],
)
async def test_a_file_name_is_a_label_and_no_path(served: Served, name: str, label: str) -> None:
    new_file = await served.client.files.create(file=(name, b"x"), purpose="user_data")
    assert new_file.filename == label


async def test_a_name_of_ten_thousand_letters_is_refused(served: Served) -> None:
    with pytest.raises(openai.BadRequestError):
        await served.client.files.create(file=("x" * 10_000, b"x"), purpose="user_data")


async def test_what_is_too_large_is_refused_by_size_and_by_share() -> None:
    limits = {
        "files": {"provider": "kv", "max_file_bytes": 100_000, "max_tenant_bytes": 150_000, "max_tenant_files": 3}
    }
    async with serving(more=limits) as served:
        with pytest.raises(openai.APIStatusError) as caught:
            await served.client.files.create(file=("large", b"x" * 100_001), purpose="user_data")
        assert caught.value.status_code == 413
        with pytest.raises(openai.APIStatusError) as caught:
            await served.client.files.create(file=("huge", b"x" * 1_000_000), purpose="user_data")
        assert caught.value.status_code == 413
        first = await served.client.files.create(file=("one", b"x" * 100_000), purpose="user_data")
        with pytest.raises(openai.BadRequestError) as refused:
            await served.client.files.create(file=("two", b"x" * 50_001), purpose="user_data")
        assert refused.value.code == "storage_quota_exceeded"
        await served.client.files.delete(first.id)
        tiny = [served.client.files.create(file=("tiny", b"x"), purpose="user_data") for _ in range(5)]
        outcomes = await asyncio.gather(*tiny, return_exceptions=True)
        assert sorted(type(each).__name__ for each in outcomes) == ["BadRequestError"] * 2 + ["FileObject"] * 3
        remaining_keys = await served.stack.kv_store.scan("default/file_piece/")
        assert len(remaining_keys) == 3  # what was refused left nothing
        assert await served.stack.kv_store.scan("~") == []


async def test_another_tenants_file_is_an_unknown_file() -> None:
    async with serving(more=FILES, server={"api_keys": KEYS}) as served:
        mine = await served.client.files.create(file=("mine.txt", b"secret"), purpose="user_data")
        async with sdk_client(served.url, "key-b") as other:
            assert (await other.files.list()).data == []
            for call in (other.files.retrieve, other.files.content, other.files.delete):
                with pytest.raises(openai.NotFoundError):
                    await call(mine.id)
        assert (await served.client.files.retrieve(mine.id)).id == mine.id


BOUNDARY = "multipart/form-data; boundary=b"
PART = b'--b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\nx\r\n'
PURPOSE = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'
FILE = PART % (b"file", b'; filename="a"')
BROKEN: dict[str, tuple[str, bytes, int]] = {
    "no form": ("application/json", b"{}", 415),
    "no boundary": ("multipart/form-data", FILE, 400),
    "nothing": (BOUNDARY, b"", 400),
    "cut off": (BOUNDARY, PURPOSE + FILE[:-4], 400),
    "no file": (BOUNDARY, PURPOSE + b"--b--\r\n", 400),
    "a file without a name": (BOUNDARY, PURPOSE + PART % (b"file", b"") + b"--b--\r\n", 400),
    "no purpose": (BOUNDARY, FILE + b"--b--\r\n", 400),
    "an unknown purpose": (BOUNDARY, FILE + PURPOSE.replace(b"user_data", b"evil") + b"--b--\r\n", 400),
    "two files": (BOUNDARY, PURPOSE + FILE * 2 + b"--b--\r\n", 400),
    "many parts": (BOUNDARY, (PART % (b"f", b"")) * 20_000 + b"--b--\r\n", 400),
    "a header without end": (BOUNDARY, b"--b\r\nX: " + b"x" * 60_000, 400),
    "bytes": (BOUNDARY, bytes(range(256)) * 10, 400),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_a_broken_form_is_refused_and_leaves_nothing(served: Served, name: str) -> None:
    kind, body, status = BROKEN[name]
    async with httpx.AsyncClient(trust_env=False, verify=TLS) as client:
        answer = await client.post(f"{served.url}/v1/files", content=body, headers={"content-type": kind})
    assert answer.status_code == status, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert [key for key, _ in await served.stack.kv_store.scan("") if "file" in key] == []


async def test_a_file_without_its_first_part_is_an_error_before_anything_is_sent(served: Served) -> None:
    """The client gets an error with a code, and not a 200 that is cut off."""
    new_file = await served.client.files.create(file=("a.bin", bytes(300_000)), purpose="user_data")
    [key, _] = [key for key, _ in await served.stack.kv_store.scan("default/file_piece/")]
    await served.stack.kv_store.write([Delete(key)])
    with pytest.raises(openai.InternalServerError) as refusal:
        await served.client.files.content(new_file.id)
    assert refusal.value.code == "storage_corrupt"


async def test_a_file_without_its_last_part_is_cut_off_without_a_traceback(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """The client sees that the end is missing, and the log has one line."""
    new_file = await served.client.files.create(file=("a.bin", bytes(300_000)), purpose="user_data")
    [_, key] = [key for key, _ in await served.stack.kv_store.scan("default/file_piece/")]
    await served.stack.kv_store.write([Delete(key)])
    async with httpx.AsyncClient(verify=TLS) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get(f"{served.url}/v1/files/{new_file.id}/content")
    lines = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(lines) == 1
    assert "cut off" in lines[0].getMessage()
    assert lines[0].exc_info is None


async def test_without_a_section_the_routes_say_what_to_configure() -> None:
    async with serving() as served:
        with pytest.raises(openai.BadRequestError, match="section `files`"):
            await served.client.files.list()
        with pytest.raises(openai.BadRequestError, match="section `vector_stores`"):
            await served.client.vector_stores.list()
