"""`stack files move`: files go to an object store and back, while servers run where that is safe."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from apis.documents.files import CreateFile, FileExpiry, FileListParams, FileParts
from apis.errors import StackError, StoreUnavailable
from apis.storage.kv_store import KVStore, Op
from providers.files.kv import StoredFiles
from providers.files.moving import FileMove
from providers.files.object_claim import CLAIM_NAME
from providers.files.object_store import ObjectStoreFiles
from providers.kv_store.memory import Memory
from stack.cli import app
from tests.conformance.files import pieces
from tests.support.servers.serving import serving

DATA = bytes(range(256)) * 5000


def move(source: Path, target: Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["files", "move", str(source), "--to", str(target)])
    return result.exit_code, result.stdout, result.stderr


class Place:
    """A folder with run configs that share one store, and keep files in different places."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.store = {"provider": "sqlite", "path": str(folder / "stack.db")}
        self.kv = self.write("kv", {"provider": "kv"})
        self.first = self.write("first", self.objects("first"))
        self.second = self.write("second", self.objects("second"))

    def objects(self, name: str) -> dict[str, Any]:
        return {"provider": "object_store", "url": f"file://{self._folder}/{name}-objects"}

    def write(self, name: str, files: dict[str, Any] | None) -> Path:
        sections = {"inference": {"provider": "scripted"}, "kv_store": self.store, "files": files}
        path = self._folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(sections))
        return path

    def names(self, name: str) -> list[str]:
        files = (self._folder / f"{name}-objects").rglob("*")
        return [file.name for file in files if file.is_file() and file.name != CLAIM_NAME]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


async def test_files_go_to_an_object_store_while_servers_with_it_run(place: Place) -> None:
    async with serving(kv_store=place.store, more={"files": {"provider": "kv"}}) as served:
        old = [await served.client.files.create(file=("a", DATA), purpose="user_data") for _ in range(3)]
        code, _, error = await asyncio.to_thread(move, place.kv, place.first)
        assert (code, "restart them" in error) == (1, True)
    async with serving(kv_store=place.store, more={"files": place.objects("first")}) as served:
        new = await served.client.files.create(file=("b", DATA), purpose="user_data")
        assert (await served.client.files.content(old[0].id)).content == DATA
        await served.client.files.delete(old[2].id)
        code, line, error = await asyncio.to_thread(move, place.kv, place.first)
        assert (code, error) == (0, ""), error
        assert line.startswith("moved 2/2 files, 2.4 MiB")
        for file in (*old[:2], new):
            assert (await served.client.files.content(file.id)).content == DATA
        assert (await served.client.files.retrieve(old[0].id)) == old[0]
        assert len(place.names("first")) == 3
        assert await served.stack.kv_store.scan("default/file_piece/") == []
        assert await served.stack.kv_store.scan("~") == []
        code, line, _ = await asyncio.to_thread(move, place.kv, place.first)
        assert (code, line[:15]) == (0, "moved 0/0 files")
        code, _, error = await asyncio.to_thread(move, place.first, place.second)
        assert (code, "stop them" in error) == (1, True)


def test_run_configs_that_do_not_fit_are_named(place: Place, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Place(tmp_path / "other")
    assert move(place.kv, place.kv)[2].startswith("Both run configs keep their files in the same place")
    assert "kv_store: must be that of" in move(place.kv, other.first)[2]
    place.store = {"provider": "memory"}
    memory = place.write("memory", {"provider": "kv"})
    assert "ends with its process" in move(memory, place.first)[2]
    assert "files: is required" in move(place.write("none", None), other.first)[2]


def providers(kv: KVStore, folder: Path) -> tuple[StoredFiles, ObjectStoreFiles, ObjectStoreFiles]:
    urls = [f"file://{folder}/{name}-objects" for name in ("first", "second")]
    first, second = (ObjectStoreFiles(ObjectStoreFiles.Config(url=url, orphan_grace_s=0), kv) for url in urls)
    return StoredFiles(StoredFiles.Config(), kv), first, second


async def no_ops(_size: int) -> list[Op]:
    return []


async def test_files_go_round_all_places(place: Place, tmp_path: Path) -> None:
    kv = Memory(Memory.Config())
    stored, first, second = providers(kv, tmp_path)
    expiring = CreateFile(purpose="batch", expires_after=FileExpiry(anchor="created_at", seconds=3600))
    await first.add_part("u", f"part_{0:044x}", pieces(DATA), tenant="b", life_s=3600, commit=no_ops)
    await first.add_part("u", f"part_{1:044x}", pieces(b"end"), tenant="b", life_s=3600, commit=no_ops)
    parts = FileParts("u", {f"part_{0:044x}": len(DATA), f"part_{1:044x}": 3})
    files = {
        "a": await first.create(expiring, pieces(DATA), tenant="a"),
        "b": await first.join_parts(CreateFile(purpose="user_data"), parts, tenant="b"),
    }
    lines: list[str] = []
    for source, target, reads_both in ((first, second, False), (second, stored, True), (stored, first, False)):
        assert (await FileMove(source, target, lines.append).run()).startswith("moved 2/2 files")
        for tenant, file in files.items():
            assert (await target.read(file.id, tenant=tenant)) == DATA + (b"end" if tenant == "b" else b"")
            assert (await target.list(FileListParams(), tenant=tenant)).data == [file]
        with nullcontext() if reads_both else pytest.raises(StoreUnavailable):
            await source.read(files["a"].id, tenant="a")
    assert lines[-1].startswith("moved 2/2")
    assert (len(place.names("first")), len(place.names("second"))) == (2, 0)
    assert await kv.scan("a/file_piece/") == await kv.scan("~") == []
    for tenant, file in files.items():
        await first.delete(file.id, tenant=tenant)
    kinds = {key.split("/")[1] for key, _ in await kv.scan("")}
    assert kinds == {"file_store", "file_usage"}


async def test_a_move_that_fails_in_one_file_moves_the_others_and_is_repeated(place: Place, tmp_path: Path) -> None:
    kv = Memory(Memory.Config())
    stored, first, _ = providers(kv, tmp_path)
    files = [await stored.create(CreateFile(purpose="user_data"), pieces(DATA), tenant="t") for _ in range(3)]
    chunk = f"t/file_piece/{files[1].id}/000002"
    entry = await kv.get(chunk)
    assert entry is not None
    await kv.put(chunk, b"short")
    with pytest.raises(StackError, match=f"moved 2/3 files, 2.4 MiB; 1 failed, run it again: {files[1].id}"):
        await FileMove(stored, first, lambda _line: None).run()
    await kv.put(chunk, entry.value)
    assert (await FileMove(stored, first, lambda _line: None).run()).startswith("moved 1/1 files")
    for file in files:
        assert await first.read(file.id, tenant="t") == DATA


async def test_bytes_that_a_killed_move_left_are_deleted_by_the_next(tmp_path: Path) -> None:
    class Dead(StoredFiles):
        async def delete_bytes(self, blob_ids: Sequence[str], tenant: str) -> None:
            raise StackError("killed")

    kv = Memory(Memory.Config())
    stored, first, _ = providers(kv, tmp_path)
    file = await stored.create(CreateFile(purpose="user_data"), pieces(DATA), tenant="t")
    with pytest.raises(StackError):
        await FileMove(Dead(StoredFiles.Config(), kv), first, lambda _line: None).run()
    assert await first.read(file.id, tenant="t") == DATA
    assert await kv.scan("t/file_piece/") != []
    assert (await FileMove(stored, first, lambda _line: None).run()).startswith("moved 0/0")
    assert await kv.scan("t/file_piece/") == await kv.scan("~") == []
    assert await first.read(file.id, tenant="t") == DATA


async def test_moves_at_the_same_time_lose_no_file(tmp_path: Path) -> None:
    kv = Memory(Memory.Config())
    stored, first, second = providers(kv, tmp_path)
    data = [bytes([number]) * 300_000 for number in range(8)]
    files = [await first.create(CreateFile(purpose="user_data"), pieces(each), tenant="t") for each in data]
    for source, target in ((first, stored), (stored, second), (second, first)):
        moves = [FileMove(source, target, lambda _line: None).run() for _ in range(3)]
        lines = await asyncio.gather(*moves)
        assert sum(int(line.partition("/")[0].removeprefix("moved ")) for line in lines) == len(files)
        for file, each in zip(files, data, strict=True):
            assert await target.read(file.id, tenant="t") == each
    assert len(list((tmp_path / "first-objects").rglob("0*"))) == len(files)
    assert await kv.scan("t/file_piece/") == await kv.scan("~") == []


@pytest.mark.parametrize("is_kv", [True, False], ids=["from the store", "from objects"])
async def test_a_file_that_another_move_takes_while_it_is_read_is_no_failure(tmp_path: Path, is_kv: bool) -> None:
    kv = Memory(Memory.Config())
    stored, first, second = providers(kv, tmp_path)
    source: Any = stored if is_kv else first
    file = await source.create(CreateFile(purpose="user_data"), pieces(DATA), tenant="t")
    read_bytes, lines = source.read_bytes, list[str]()

    async def read_late(*place: Any) -> AsyncGenerator[bytes]:
        source.read_bytes = read_bytes
        lines.append(await FileMove(source, second, lambda _line: None).run())
        async for chunk in read_bytes(*place):
            yield chunk

    source.read_bytes = read_late
    assert (await FileMove(source, second, lambda _line: None).run()).startswith("moved 0/0 files")
    assert lines[0].startswith("moved 1/1 files")
    assert await second.read(file.id, tenant="t") == DATA
    assert len(list((tmp_path / "second-objects").rglob("0*"))) == 1


async def test_a_damaged_record_does_not_stop_a_move(tmp_path: Path) -> None:
    """Neither of a file that an earlier move has left in half, whose bytes may be needed, nor of another one."""

    class Dead(StoredFiles):
        async def delete_bytes(self, blob_ids: Sequence[str], tenant: str) -> None:
            raise StackError("killed")

    kv = Memory(Memory.Config())
    stored, first, _ = providers(kv, tmp_path)
    request = CreateFile(purpose="user_data")
    files = [await stored.create(request, pieces(DATA), tenant="t") for _ in range(2)]
    with pytest.raises(StackError):
        await FileMove(Dead(StoredFiles.Config(), kv), first, lambda _line: None).run()
    files += [await stored.create(request, pieces(DATA), tenant="t") for _ in range(2)]
    for damaged in (files[0], files[2]):
        await kv.put(f"t/file/{damaged.id}", b"\xff")
    assert (await FileMove(stored, first, lambda _line: None).run()).startswith("moved 1/1 files")
    for whole in (files[1], files[3]):
        assert await first.read(whole.id, tenant="t") == DATA
    remaining = {key.split("/")[2] for key, _ in await kv.scan("t/file_piece/")}
    assert remaining == {files[0].id, files[2].id}


async def test_a_download_goes_on_where_its_file_has_moved(tmp_path: Path) -> None:
    kv = Memory(Memory.Config())
    stored, first, _ = providers(kv, tmp_path)
    file = await stored.create(CreateFile(purpose="user_data"), pieces(DATA), tenant="t")
    content = first.content(file.id, tenant="t")
    read = await anext(content)
    await FileMove(stored, first, lambda _line: None).run()
    async for chunk in content:
        read += chunk
    assert read == DATA
