"""Files in an object store, through the official SDK: uploads, batches and vector stores work on it without change."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from providers.files.object_claim import CLAIM_NAME
from stack.retention.erasure import ProjectEraser
from tests.support.sdk.batch_files import batch_line, create_batch, read_results, wait_for_end
from tests.support.sdk.client import sdk_client
from tests.support.sdk.library import filled, find_files, sections
from tests.support.servers.serving import Served, scripted, serving
from tests.support.tenants.accounts import CHAINED, ROOT, stored_organization

KEYS = [{"key": "key-a", "tenant": "a"}, {"key": "key-b", "tenant": "b"}]
DATA = bytes(range(256)) * 9000


def on_objects(folder: Path) -> dict[str, Any]:
    """Return the sections of a stack whose files are in a folder of objects."""
    return {
        "files": {"provider": "object_store", "url": f"file://{folder}/objects"},
        "batches": {"provider": "leased", "poll_s": 0.05, "retry_s": 0.1},
    }


def names_of(folder: Path) -> list[str]:
    root = folder / "objects"
    return sorted(str(file.relative_to(root)) for file in root.rglob("*") if file.is_file() and file.name != CLAIM_NAME)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(scripted([{"text": "hello"}]), more=on_objects(tmp_path)) as served:
        yield served


async def test_a_batch_reads_and_writes_its_files_there(served: Served, tmp_path: Path) -> None:
    batch = await create_batch(served.client, [batch_line(f"line {number}") for number in range(20)])
    batch = await wait_for_end(served.client, batch)
    assert batch.status == "completed"
    output = await read_results(served.client, batch.output_file_id)
    assert [line["custom_id"] for line in output] == [f"line {number}" for number in range(20)]
    assert {name.split("/")[1] for name in names_of(tmp_path)} == {batch.input_file_id, batch.output_file_id}
    assert await served.stack.kv_store.scan("default/file_piece/") == []


async def test_an_upload_in_parts_is_a_file_without_a_copy(served: Served, tmp_path: Path) -> None:
    file = await served.client.uploads.upload_file_chunked(
        file=DATA,
        filename="large.bin",
        bytes=len(DATA),
        mime_type="text/plain",
        purpose="user_data",
        part_size=1_000_000,
        md5=hashlib.md5(DATA, usedforsecurity=False).hexdigest(),
    )
    assert file.file is not None
    assert len({name for name in names_of(tmp_path) if "/part_" in name}) == len(names_of(tmp_path)) == 3
    assert (await served.client.files.content(file.file.id)).content == DATA
    cancelled = await served.client.uploads.create(bytes=3, filename="x", mime_type="text/plain", purpose="user_data")
    await served.client.uploads.parts.create(cancelled.id, data=b"abc")
    assert len(names_of(tmp_path)) == 4
    await served.client.uploads.cancel(cancelled.id)
    await served.client.files.delete(file.file.id)
    assert names_of(tmp_path) == []


async def test_files_of_a_vector_store_are_found(tmp_path: Path) -> None:
    async with serving(more={**sections(tmp_path), **on_objects(tmp_path)}) as served:
        store_id, _ = await filled(served.client)
        assert await find_files(served.client, store_id, "sailing clipper", max_num_results=1) == ["ships.md"]
        assert len(names_of(tmp_path)) == 3


async def test_a_tenant_sees_its_own_files_alone(tmp_path: Path) -> None:
    async with (
        serving(more=on_objects(tmp_path), server={"api_keys": KEYS}) as served,
        sdk_client(served.url, "key-b") as other,
    ):
        file = await served.client.files.create(file=("a.bin", DATA), purpose="user_data")
        own = await other.files.create(file=("b.bin", b"b"), purpose="user_data")
        assert [each.id for each in (await other.files.list()).data] == [own.id]
        for call in (other.files.retrieve, other.files.content, other.files.delete):
            with pytest.raises(openai.NotFoundError):
                await call(file.id)
        assert (await served.client.files.content(file.id)).content == DATA


async def test_a_deleted_project_has_no_bytes_left(tmp_path: Path) -> None:
    more = {**on_objects(tmp_path), **CHAINED}
    async with serving(more=more, server={"api_keys": [ROOT]}) as served:
        files = served.stack.files
        assert files is not None
        await served.client.files.create(file=("a.bin", DATA), purpose="user_data")
        names_before = names_of(tmp_path)
        eraser = ProjectEraser(served.stack, stored_organization(served.stack.accounts).erasure)
        async with asyncio.timeout(10):
            assert await eraser.erase_tenant("operator") >= 3
        assert names_before
        assert names_of(tmp_path) == []
