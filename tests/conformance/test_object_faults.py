"""Faults on the way to an object store: a clear error or a repetition, and never a file without its bytes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from apis.documents.files import FileListParams, FileParts
from apis.errors import ConfigError, StackError, StorageCorrupt, StoreUnavailable
from providers.files.blob_objects import PIECE_BYTES
from providers.files.object_store import ObjectStoreFiles
from providers.kv_store.memory import Memory
from tests.conformance.files import NEW, pieces
from tests.conformance.test_object_files import FAST, names_in, no_ops, sweep
from tests.support.servers.s3_server import Fault, FaultyProxy, S3Server

LARGE = bytes(range(256)) * ((PIECE_BYTES + 100_000) // 256)
PASSING: tuple[Fault, ...] = ("slow_down", "error", "applied_error", "half", "cut", "applied_cut")


@pytest.fixture
async def proxy(s3_server: S3Server) -> AsyncIterator[FaultyProxy]:
    async with FaultyProxy(s3_server.url).listen() as proxy:
        yield proxy


@pytest.fixture
async def files(proxy: FaultyProxy, s3_server: S3Server) -> AsyncIterator[ObjectStoreFiles]:
    files = new_files(proxy, s3_server.new_bucket())
    await files.start()
    yield files
    proxy.choose_fault = lambda _method, _path: ""
    await files.close()


def new_files(proxy: FaultyProxy, bucket: str, **more: Any) -> ObjectStoreFiles:
    place: dict[str, Any] = {"url": f"s3://{bucket}/files", "endpoint": proxy.url}
    fields: dict[str, Any] = {**FAST, **place, "max_file_bytes": 2**26, **more}
    files = ObjectStoreFiles(ObjectStoreFiles.Config(**fields), Memory(Memory.Config()))
    files.object_bytes = PIECE_BYTES
    return files


def once(fault: Fault, method: str, name: str = "") -> Any:
    """Return a function that gives the first such request this fault."""
    remaining: list[Fault] = [fault]

    def choose(of: str, path: str) -> Fault:
        return remaining.pop() if remaining and of == method and name in path else ""

    return choose


@pytest.mark.parametrize("fault", PASSING)
@pytest.mark.parametrize("number", ["000000", "000001"])
async def test_a_write_that_fails_once_is_repeated(
    files: ObjectStoreFiles, proxy: FaultyProxy, fault: Fault, number: str
) -> None:
    proxy.choose_fault = once(fault, "PUT", number)
    file = await files.create(NEW, pieces(LARGE), tenant="t")
    assert await files.read(file.id, tenant="t") == LARGE
    assert len(await names_in(files.objects)) == 2


@pytest.mark.parametrize("fault", ["slow_down", "error", "half", "cut", "flipped"])
async def test_a_read_that_fails_once_is_repeated(files: ObjectStoreFiles, proxy: FaultyProxy, fault: Fault) -> None:
    file = await files.create(NEW, pieces(LARGE), tenant="t")
    proxy.choose_fault = once(fault, "GET")
    assert await files.read(file.id, tenant="t") == LARGE


@pytest.mark.parametrize("fault", ["slow_down", "error", "cut", "forbidden"])
async def test_a_store_that_is_away_is_a_clear_error_and_leaves_no_file(
    files: ObjectStoreFiles, proxy: FaultyProxy, fault: Fault
) -> None:
    other = await files.create(NEW, pieces(b"kept"), tenant="t")
    proxy.choose_fault = lambda method, path: fault if method != "PUT" or path.endswith("000001") else ""
    with pytest.raises(StoreUnavailable) as failed:
        await files.create(NEW, pieces(LARGE), tenant="t")
    assert "bucket" not in failed.value.message
    assert "127.0.0.1" not in failed.value.message
    with pytest.raises(StoreUnavailable):
        await files.read(other.id, tenant="t")
    assert [file.id for file in (await files.list(FileListParams(), tenant="t")).data] == [other.id]
    await files.delete(other.id, tenant="t")  # the record goes, and the object with the next sweep
    proxy.choose_fault = lambda _method, _path: ""
    assert len(await names_in(files.objects)) == 2
    await sweep(files)
    assert await names_in(files.objects) == []


async def test_damage_on_the_way_that_stays_is_found(files: ObjectStoreFiles, proxy: FaultyProxy) -> None:
    file = await files.create(NEW, pieces(LARGE), tenant="t")
    proxy.choose_fault = lambda _method, path: "flipped" if path.endswith("000001") else ""
    read = bytearray()

    async def read_all() -> None:
        async for chunk in files.content(file.id, tenant="t"):
            read.extend(chunk)

    with pytest.raises(StorageCorrupt):
        await read_all()
    assert read == LARGE[:PIECE_BYTES]


@pytest.mark.parametrize("fault", ["slow_down", "applied_cut"])
async def test_a_part_that_fails_can_be_sent_again(files: ObjectStoreFiles, proxy: FaultyProxy, fault: Fault) -> None:
    proxy.choose_fault = lambda method, _path: fault if method == "PUT" else ""
    first, second = f"part_{1:044x}", f"part_{2:044x}"
    with pytest.raises(StackError):
        await files.add_part("u", first, pieces(b"data"), tenant="t", life_s=3600, commit=no_ops)
    proxy.choose_fault = lambda _method, _path: ""
    await files.add_part("u", second, pieces(b"data"), tenant="t", life_s=3600, commit=no_ops)
    with pytest.raises(StorageCorrupt):
        await files.join_parts(NEW, FileParts("u", {first: 4}), tenant="t")
    file = await files.join_parts(NEW, FileParts("u", {second: 4}), tenant="t")
    proxy.requests.clear()
    assert await files.read(file.id, tenant="t") == b"data"
    assert [method for method, _ in proxy.requests] == ["GET"]


async def test_completing_an_upload_moves_no_bytes(files: ObjectStoreFiles, proxy: FaultyProxy) -> None:
    ids = [f"part_{number:044x}" for number in range(2)]
    for part_id in ids:
        await files.add_part("u", part_id, pieces(LARGE), tenant="t", life_s=3600, commit=no_ops)
    proxy.requests.clear()
    file = await files.join_parts(NEW, FileParts("u", dict.fromkeys(ids, len(LARGE))), tenant="t")
    assert proxy.requests == []
    assert file.bytes == 2 * len(LARGE)


async def test_a_request_that_hangs_is_repeated_after_its_time(proxy: FaultyProxy, s3_server: S3Server) -> None:
    files = new_files(proxy, s3_server.new_bucket(), timeout_s=1, retry_timeout_s=20)
    await files.claim()
    remaining: set[str] = {"PUT", "GET"}

    def choose(method: str, _path: str) -> Fault:
        if method in remaining:
            remaining.remove(method)
            return "slow"
        return ""

    proxy.choose_fault = choose
    file = await files.create(NEW, pieces(b"data"), tenant="t")
    assert await files.read(file.id, tenant="t") == b"data"
    assert not remaining


async def test_a_server_starts_without_its_object_store_and_uses_it_later(
    proxy: FaultyProxy, s3_server: S3Server
) -> None:
    async with AsyncExitStack() as entered:
        files = new_files(proxy, s3_server.new_bucket(), max_retries=0)
        entered.push_async_callback(files.close)
        proxy.choose_fault = lambda _method, _path: "error"
        await files.start()
        with pytest.raises(StoreUnavailable):
            await files.create(NEW, pieces(b"x"), tenant="t")
        proxy.choose_fault = lambda _method, _path: ""
        file = await files.create(NEW, pieces(b"x"), tenant="t")
        assert await files.read(file.id, tenant="t") == b"x"


@pytest.mark.parametrize("fault", ["forbidden", ""])
async def test_a_store_that_refuses_ends_the_start(proxy: FaultyProxy, fault: Fault) -> None:
    files = new_files(proxy, "no-such-bucket", max_retries=0)
    proxy.choose_fault = lambda _method, _path: fault
    with pytest.raises(ConfigError, match="url: s3://no-such-bucket/files refuses"):
        await files.start()
    await files.close()


async def test_an_upload_that_is_cancelled_while_it_is_written_leaves_nothing(
    files: ObjectStoreFiles, proxy: FaultyProxy
) -> None:
    proxy.hold = asyncio.Event()
    upload = asyncio.create_task(files.create(NEW, pieces(b"x" * 100), tenant="t"))
    async with asyncio.timeout(10):
        await proxy.arrived.wait()
        upload.cancel()
        proxy.hold.set()
        with pytest.raises(asyncio.CancelledError):
            await upload
    proxy.hold = None
    await sweep(files)
    assert await names_in(files.objects) == []
    assert (await files.list(FileListParams(), tenant="t")).data == []
