"""Processes that are killed in the middle of an upload, a completion and a deletion: what is listed is whole, and what
they left is swept."""

import json
from pathlib import Path
from typing import Any

import pytest

from apis.documents.files import FileListParams
from providers.files.object_store import ObjectStoreFiles
from providers.kv_store.sqlite import SQLite
from tests.conformance.test_object_files import FAST, names_in, sweep
from tests.support.servers.dying_files import DATA, POINTS, PROGRAM
from tests.support.servers.forked_process import forked_process
from tests.support.servers.s3_server import S3Server

SIGKILL = -9


@pytest.mark.parametrize("point", POINTS)
async def test_a_killed_process_leaves_whole_files_alone(s3_server: S3Server, tmp_path: Path, point: str) -> None:
    place: dict[str, Any] = {**FAST, "url": f"s3://{s3_server.new_bucket()}/files", "endpoint": s3_server.url}
    async with forked_process(PROGRAM, str(tmp_path), json.dumps(place), point) as process:
        kept_id = (await process.stdout.readline()).decode().strip()
        assert await process.wait() == SIGKILL
    config = SQLite.Config(path=str(tmp_path / "store.db"))
    store, later_store = SQLite(config), SQLite(config)
    clock = later_store.now
    later_store.now = lambda: clock() + 4 * 3600
    await store.start()
    files = ObjectStoreFiles(ObjectStoreFiles.Config(**place), store)
    listed = [file.id for file in (await files.list(FileListParams(), tenant="t")).data]
    assert kept_id in listed
    appeared = point in ("create after record", "join after record", "delete before record")
    assert len(listed) == 1 + appeared
    sizes = [len(await files.read(file_id, tenant="t")) for file_id in listed]
    assert sizes.count(len(DATA)) == len(sizes) - ("join" in point and appeared)
    await sweep(files)
    assert [len(await files.read(file_id, tenant="t")) for file_id in listed] == sizes
    await store.close()
    await later_store.start()
    files = ObjectStoreFiles(ObjectStoreFiles.Config(**place), later_store)
    await sweep(files)  # guards and parts have expired
    assert [len(await files.read(file_id, tenant="t")) for file_id in listed] == sizes
    assert len(await names_in(files.objects)) == sum(sizes) // len(DATA) * 3
    for file_id in listed:
        await files.delete(file_id, tenant="t")
    assert await names_in(files.objects) == []
    await later_store.close()
