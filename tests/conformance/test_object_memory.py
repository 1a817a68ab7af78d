"""The memory of a server while 2 GiB go to an object store and come back."""

import asyncio
import hashlib
import os
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from tests.support.sdk.client import sdk_client
from tests.support.servers.forked_process import forked_stack
from tests.support.servers.s3_server import S3Server

PART_BYTES = 64 * 1024 * 1024
PARTS = int(os.environ.get("STACK_OBJECT_PARTS", "32"))
MAX_GROWTH_BYTES = 150 * 1024 * 1024


async def watch(process: psutil.Process, peak: list[int]) -> None:
    with suppress(psutil.NoSuchProcess):
        while True:
            peak[0] = max(peak[0], process.memory_info().rss)
            await asyncio.sleep(0.02)


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_memory_stays_flat_while_two_gigabytes_pass(s3_server: S3Server, tmp_path: Path) -> None:
    size = PARTS * PART_BYTES
    sections = {
        "inference": {"provider": "scripted"},
        "kv_store": {"provider": "sqlite", "path": "stack.db"},
        "files": {
            "provider": "object_store",
            "url": f"s3://{s3_server.new_bucket()}/files",
            "endpoint": s3_server.url,
            "max_joined_bytes": size,
            "max_tenant_bytes": 2 * size,
        },
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(sections))
    part, md5 = os.urandom(PART_BYTES), hashlib.md5(usedforsecurity=False)
    async with forked_stack("run.yaml", tmp_path) as (url, pid), sdk_client(url, timeout_s=300) as client:
        first = await client.files.create(file=("small", b"x"), purpose="user_data")
        await client.files.content(first.id)
        process = psutil.Process(pid)
        before = process.memory_info().rss
        peak = [before]
        watching = asyncio.create_task(watch(process, peak))
        upload = await client.uploads.create(
            bytes=size, filename="large", mime_type="application/octet-stream", purpose="user_data"
        )
        ids: list[str] = []
        for _ in range(PARTS):
            md5.update(part)
            ids.append((await client.uploads.parts.create(upload.id, data=part)).id)
        uploaded = peak[0]
        file = (await client.uploads.complete(upload.id, part_ids=ids)).file
        assert file is not None
        read = hashlib.md5(usedforsecurity=False)
        async with (
            httpx.AsyncClient(timeout=60) as http,
            http.stream("GET", f"{url}/v1/files/{file.id}/content") as got,
        ):
            async for chunk in got.aiter_bytes():
                read.update(chunk)
        watching.cancel()
        assert read.digest() == md5.digest()
        figures = [f"{value / 2**20:.0f} MiB" for value in (before, uploaded, peak[0])]
        print(f"{size / 2**30:.1f} GiB: {figures[0]} before, at most {figures[1]} uploading, {figures[2]} in all")
        assert peak[0] - before < MAX_GROWTH_BYTES
