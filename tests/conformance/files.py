"""The promises of apis/documents/files.py as tests: a provider's test class inherits them and has a fixture `files`."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from apis.documents.files import CreateFile, FileListParams, Files
from apis.errors import InvalidRequest, NotFound, PayloadTooLarge

MAX_BYTES = 1_000_000
NEW = CreateFile(filename="a.txt", purpose="user_data")


async def pieces(*data: bytes) -> AsyncGenerator[bytes]:
    for each in data:
        yield each


async def cut_off(*data: bytes) -> AsyncGenerator[bytes]:
    for each in data:
        yield each
    raise InvalidRequest("The client left.")


class FilesPromises:
    """The promises of every provider of files. Its files are of MAX_BYTES at most."""

    @pytest.mark.parametrize("size", [0, 1, 262_143, 262_144, 262_145, MAX_BYTES])
    async def test_any_bytes_come_back(self, files: Files, size: int) -> None:
        data = (bytes(range(256)) * (size // 256 + 1))[:size]
        new_file = await files.create(NEW, pieces(data[:100], data[100:]), tenant="t")
        assert new_file.bytes == size
        assert await files.read(new_file.id, tenant="t") == data
        async for piece in files.content(new_file.id, tenant="t"):
            assert len(piece) <= 2**20

    async def test_one_tenants_file_is_unknown_to_another(self, files: Files) -> None:
        new_file = await files.create(NEW, pieces(b"x"), tenant="t")
        for tenant in ("u", "", "t/file", "t2"):
            with pytest.raises(NotFound):
                await files.get(new_file.id, tenant=tenant)
            with pytest.raises(NotFound):
                await files.read(new_file.id, tenant=tenant)
            with pytest.raises(NotFound):
                await files.delete(new_file.id, tenant=tenant)
            assert (await files.list(FileListParams.model_validate({}), tenant=tenant)).data == []

    @pytest.mark.parametrize("name", ["", "file-", "file-x", "../x", "\0", "file-" + "0" * 44, "x" * 5000, "\ud800"])
    async def test_what_is_no_id_is_unknown(self, files: Files, name: str) -> None:
        with pytest.raises(NotFound):
            await files.get(name, tenant="t")
        with pytest.raises(NotFound):
            await files.delete(name, tenant="t")

    async def test_too_large_is_refused_before_its_end(self, files: Files) -> None:
        read_count = 0

        async def endless() -> AsyncGenerator[bytes]:
            nonlocal read_count
            while True:
                read_count += 100_000
                yield b"x" * 100_000

        with pytest.raises(PayloadTooLarge):
            await files.create(NEW, endless(), tenant="t")
        assert read_count <= files.max_file_bytes + 100_000

    async def test_an_upload_that_is_cut_off_leaves_nothing(self, files: Files) -> None:
        with pytest.raises(InvalidRequest):
            await files.create(NEW, cut_off(b"x" * 600_000), tenant="t")
        waiting = asyncio.Event()

        async def stalled() -> AsyncGenerator[bytes]:
            yield b"x" * 600_000
            waiting.set()
            await asyncio.Event().wait()

        upload = asyncio.create_task(files.create(NEW, stalled(), tenant="t"))
        async with asyncio.timeout(10):
            await waiting.wait()
            upload.cancel()
            with pytest.raises(asyncio.CancelledError):
                await upload
        assert (await files.list(FileListParams.model_validate({}), tenant="t")).data == []
        await self.nothing_is_left(files)

    async def test_deleted_is_gone(self, files: Files) -> None:
        files_created = [await files.create(NEW, pieces(b"x" * 500_000), tenant="t") for _ in range(3)]
        for each in files_created:
            await files.delete(each.id, tenant="t")
            with pytest.raises(NotFound):
                await files.get(each.id, tenant="t")
            with pytest.raises(NotFound):
                await files.read(each.id, tenant="t")
            with pytest.raises(NotFound):
                await files.delete(each.id, tenant="t")
        await self.nothing_is_left(files)

    async def test_many_at_once_are_all_there(self, files: Files) -> None:
        files_created = await asyncio.gather(*[files.create(NEW, pieces(b"%d" % i), tenant="t") for i in range(20)])
        assert [await files.read(each.id, tenant="t") for each in files_created] == [b"%d" % i for i in range(20)]
        await asyncio.gather(*[files.delete(each.id, tenant="t") for each in files_created])
        await self.nothing_is_left(files)

    async def nothing_is_left(self, files: Files) -> None:
        """Assert that no bytes of any file are kept."""
        raise NotImplementedError
