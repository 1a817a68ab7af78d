"""Uploads in parts through the official SDK: files that are larger than one body, whole or not at all."""

import hashlib
from collections.abc import AsyncIterator
from typing import Any, cast

import openai
import pytest
from openai import AsyncOpenAI
from openai.types import Upload

from providers.uploads.kv import LIFETIME_S, StoredUploads
from tests.support.sdk.client import sdk_client
from tests.support.servers.serving import Served, serving

FILES: dict[str, Any] = {
    "files": {
        "provider": "kv",
        "max_file_bytes": 300_000,
        "max_joined_bytes": 2_000_000,
        "max_tenant_bytes": 3_000_000,
    },
    "uploads": {"provider": "kv", "max_part_bytes": 700_000},
}
KEYS = [{"key": "key-a", "tenant": "a"}, {"key": "key-b", "tenant": "b"}]
DATA = bytes(range(256)) * 4500


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving(more=FILES) as served:
        yield served


async def begin(client: AsyncOpenAI, size: int = len(DATA)) -> Upload:
    return await client.uploads.create(bytes=size, filename="../large.bin", mime_type="text/plain", purpose="user_data")


async def add(client: AsyncOpenAI, upload: Upload, data: bytes) -> str:
    part = await client.uploads.parts.create(upload.id, data=data)
    assert (part.object, part.upload_id) == ("upload.part", upload.id)
    return part.id


async def test_parts_are_joined_in_the_order_of_the_completion(served: Served) -> None:
    client = served.client
    upload = await begin(client)
    assert (upload.status, upload.bytes, upload.expires_at) == ("pending", len(DATA), upload.created_at + LIFETIME_S)
    last = await add(client, upload, DATA[600_001:])
    unused = await add(client, upload, DATA[:600_001])
    first = await add(client, upload, DATA[:600_001])
    completed = await client.uploads.complete(
        upload.id, part_ids=[first, last], md5=hashlib.md5(DATA, usedforsecurity=False).hexdigest()
    )
    assert completed.status == "completed"
    assert completed.file is not None
    assert (completed.file.bytes, completed.file.filename) == (len(DATA), "large.bin")
    assert (await client.files.content(completed.file.id)).content == DATA
    again = await client.uploads.complete(upload.id, part_ids=[first, last])
    assert again.file == completed.file
    assert len((await client.files.list()).data) == 1
    assert unused
    assert await served.stack.kv_store.scan("default/upload_piece/") == []
    assert await served.stack.kv_store.scan("default/upload_part/") == []


async def test_the_sdks_own_upload_in_chunks_is_a_file(served: Served) -> None:
    upload = await served.client.uploads.upload_file_chunked(
        file=DATA,
        filename="chunked.txt",
        bytes=len(DATA),
        mime_type="text/plain",
        purpose="batch",
        part_size=500_000,
        md5=hashlib.md5(DATA, usedforsecurity=False).hexdigest(),
    )
    assert upload.file is not None
    assert upload.file.purpose == "batch"
    assert (await served.client.files.content(upload.file.id)).content == DATA


async def test_what_does_not_fit_is_refused_and_can_be_corrected(served: Served) -> None:
    client = served.client
    upload = await begin(client, 1000)
    short = await add(client, upload, b"x" * 900)
    with pytest.raises(openai.BadRequestError, match="900 bytes, and the upload was created for 1000"):
        await client.uploads.complete(upload.id, part_ids=[short])
    with pytest.raises(openai.BadRequestError) as unknown:
        await client.uploads.complete(upload.id, part_ids=[short, "part_" + "0" * 44])
    assert unknown.value.param == "part_ids[1]"
    rest = await add(client, upload, b"y" * 100)
    with pytest.raises(openai.BadRequestError) as twice:
        await client.uploads.complete(upload.id, part_ids=[short, short])
    assert twice.value.param == "part_ids"
    with pytest.raises(openai.BadRequestError) as wrong:
        await client.uploads.complete(upload.id, part_ids=[short, rest], md5="0" * 32)
    assert wrong.value.param == "md5"
    assert (await client.files.list()).data == []
    assert await served.stack.kv_store.scan("default/file_piece/") == []
    with pytest.raises(openai.BadRequestError) as much:
        await add(client, upload, b"z" * 1001)
    assert much.value.param == "data"
    with pytest.raises(openai.APIStatusError) as large:
        await add(client, await begin(client, 800_000), b"z" * 700_001)
    assert large.value.status_code == 413
    with pytest.raises(openai.BadRequestError, match="empty"):
        await add(client, upload, b"")
    done = await client.uploads.complete(upload.id, part_ids=[short, rest])
    assert done.file is not None
    assert (await client.files.content(done.file.id)).content == b"x" * 900 + b"y" * 100


async def test_a_cancelled_upload_takes_nothing_and_leaves_nothing(served: Served) -> None:
    client = served.client
    upload = await begin(client, 1000)
    part = await add(client, upload, b"x" * 1000)
    cancelled = await client.uploads.cancel(upload.id)
    assert (cancelled.status, cancelled.file) == ("cancelled", None)
    for call in (add(client, upload, b"x"), client.uploads.complete(upload.id, part_ids=[part])):
        with pytest.raises(openai.BadRequestError, match="cancelled"):
            await call
    with pytest.raises(openai.BadRequestError):
        await client.uploads.cancel(upload.id)
    assert await served.stack.kv_store.scan("default/upload_piece/") == []
    with pytest.raises(openai.NotFoundError):
        await client.uploads.cancel("upload_unknown")


async def test_an_expired_upload_takes_nothing(served: Served) -> None:
    upload = await begin(served.client, 1000)
    provider = cast("StoredUploads", served.stack.uploads)
    clock = provider.now
    provider.now = lambda: clock() + LIFETIME_S + 1
    with pytest.raises(openai.BadRequestError, match="expired"):
        await add(served.client, upload, b"x")


async def test_pending_uploads_count_for_the_quota_of_their_tenant() -> None:
    async with serving(more=FILES, server={"api_keys": KEYS}) as served:
        client = served.client
        with pytest.raises(openai.APIStatusError) as large:
            await begin(client, 2_000_001)
        assert large.value.status_code == 413
        first = await begin(client, 1_900_000)
        with pytest.raises(openai.BadRequestError) as refused:
            await begin(client, 1_900_000)
        assert refused.value.code == "storage_quota_exceeded"
        async with sdk_client(served.url, "key-b") as other:
            await begin(other, 1_900_000)
            with pytest.raises(openai.NotFoundError):
                await add(other, first, b"x")
        await client.uploads.cancel(first.id)
        await begin(client, 1_900_000)


async def test_a_server_without_files_names_the_missing_section() -> None:
    async with serving() as served:
        for call in (begin(served.client), served.client.batches.retrieve("batch_1")):
            with pytest.raises(openai.BadRequestError, match="section `files`"):
                await call
