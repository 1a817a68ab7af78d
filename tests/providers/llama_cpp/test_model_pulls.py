"""Models that a running server fetches: one at a time, durable, cancelled, refused with the reason, and then served."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from apis.errors import Conflict, InvalidRequest
from apis.model_pulls import ModelPull
from providers.inference.llama_cpp.installation import ModelPulls
from providers.inference.llama_cpp.provider import LlamaCpp
from providers.inference.model_files import catalogue, packages
from providers.inference.model_files.catalogue import CatalogueModel, HubFile
from providers.inference.model_files.library import GgufLibrary, LibraryListing, LibraryModel
from providers.kv_store.memory import Memory
from tests.conformance.inference import drain
from tests.providers.llama_cpp.asking import chat_request, small_config, text_of
from tests.support.servers.hub_server import HubServer, hub_environment, running_hub

REPOSITORY, FILE = "someone/tiny-GGUF", "tiny.gguf"
CONTENT = b"GGUF" + bytes(range(256)) * 50_000
WEIGHTS = packages.models_dir() / packages.PACKAGED_MODELS["smollm2-135m-instruct"].filename
"""The default model, which other tests have fetched; here it is also a file of the hub."""


def put_in_catalogue(monkeypatch: pytest.MonkeyPatch, name: str, size_bytes: int) -> None:
    model = CatalogueModel(name, "chat", "MIT", 2048, 100, (HubFile(REPOSITORY, FILE, size_bytes=size_bytes),))
    monkeypatch.setitem(catalogue.CATALOGUE, name, model)  # type: ignore[arg-type]  # it is a dict


class Library(GgufLibrary):
    """A library that knows its machine, and asks no child process for it."""

    def __init__(self, memory_bytes: int = 10**12, disk_free_bytes: int = 10**12) -> None:
        self._memory_bytes, self._disk_free_bytes = memory_bytes, disk_free_bytes

    async def list_models(self) -> LibraryListing:
        size = len(CONTENT)
        fits = size <= self._memory_bytes
        row = LibraryModel(
            "tiny", "chat", size, size, 2048, "MIT", "", fits, is_suggested=True, disk_bytes=0, path=None
        )
        return LibraryListing([row], "a machine", self._memory_bytes, ["/disk"], self._disk_free_bytes)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with running_hub() as server, hub_environment(server, str(tmp_path)):
        server.put(REPOSITORY, FILE, CONTENT)
        put_in_catalogue(monkeypatch, "tiny", len(CONTENT))
        yield server
        server.resumed.set()


@asynccontextmanager
async def pulling(kv: Memory) -> AsyncGenerator[ModelPulls]:
    pulls = ModelPulls(kv, Library(), lease_s=1, poll_s=0.05)
    pulls.start()
    try:
        yield pulls
    finally:
        await pulls.close()


async def wait_for(pulls: ModelPulls, *statuses: str, done_bytes: int = 0) -> ModelPull:
    async with asyncio.timeout(30):
        while True:
            pull = await pulls.find()
            if pull is not None and pull.status in statuses and pull.done_bytes >= done_bytes:
                return pull
            await asyncio.sleep(0.05)


async def test_a_fetch_is_shown_cancelled_and_continued_where_it_was(hub: HubServer) -> None:
    hub.stalls_after = 11_000_000
    async with pulling(Memory(Memory.Config())) as pulls:
        assert (await pulls.begin("tiny", ())).status == "queued"
        pull = await wait_for(pulls, "in_progress", done_bytes=10_000_000)
        assert pull.done_bytes < pull.total_bytes == len(CONTENT)
        with pytest.raises(Conflict, match="now 'tiny'"):
            await pulls.begin("tiny", ())
        ended = await pulls.cancel()
        assert ended is not None
        assert ended.status == "cancelled"
        hub.resumed.set()
        await pulls.begin("tiny", ())
        assert (await wait_for(pulls, "completed")).done_bytes == len(CONTENT)
        assert await pulls.list_installed() == ["tiny"]
        assert len(hub.ranges()) == 2
        assert hub.ranges()[1].startswith("bytes=")


async def test_a_fetch_survives_the_process_that_began_it(hub: HubServer) -> None:
    kv = Memory(Memory.Config())
    await ModelPulls(kv, Library()).begin("tiny", ())
    async with pulling(kv) as pulls:
        await wait_for(pulls, "completed")


async def test_a_fault_of_the_hub_is_said_in_plain_words(hub: HubServer) -> None:
    hub.gated.add(REPOSITORY)
    async with pulling(Memory(Memory.Config())) as pulls:
        await pulls.begin("tiny", ())
        error = (await wait_for(pulls, "failed")).error
        assert error is not None
        assert f"{REPOSITORY} is gated. Accept its terms" in error


async def test_memory_and_disk_are_checked_before_anything_is_fetched(hub: HubServer) -> None:
    kv = Memory(Memory.Config())
    with pytest.raises(InvalidRequest, match=r"needs about .* GB of memory, and models may take 0\.0 GB here"):
        await ModelPulls(kv, Library(memory_bytes=10**7)).begin("tiny", ())
    with pytest.raises(InvalidRequest, match=r"are missing, and the disk of /disk has 0\.0 GB free"):
        await ModelPulls(kv, Library(disk_free_bytes=10**6)).begin("tiny", ())
    with pytest.raises(InvalidRequest, match=r"no model 'hf:a/b/c\.gguf' in the catalogue: tiny\."):
        await ModelPulls(kv, Library()).begin("hf:a/b/c.gguf", ())
    with pytest.raises(Conflict, match="is served already"):
        await ModelPulls(kv, Library()).begin("tiny", ("tiny",))
    assert await ModelPulls(kv, Library()).find() is None
    assert not hub.ranges()


@pytest.mark.long
async def test_a_fetched_model_is_served_and_a_second_process_finds_it(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.put(REPOSITORY, FILE, WEIGHTS.read_bytes())
    put_in_catalogue(monkeypatch, "tiny", WEIGHTS.stat().st_size)
    kv = Memory(Memory.Config())
    few = small_config(model_path=str(WEIGHTS), model="first", context_tokens=512, parallel=1, installs_models=True)
    first, second = LlamaCpp(few, kv_store=kv), LlamaCpp(few, kv_store=kv)
    try:
        await first.start()
        installer = first.installer()
        assert installer is not None
        await installer.begin_pull("tiny")
        async with asyncio.timeout(60):
            while (pull := await installer.find_pull()) is None or pull.status != "completed":
                assert pull is None or pull.status in ("queued", "in_progress"), pull
                await asyncio.sleep(0.1)
        assert [model.id for model in await first.models()] == ["first", "tiny"]
        request = chat_request("Say hi.").model_copy(update={"model": "tiny"})
        assert text_of(await drain(first, request))
        await second.start()
        assert [model.id for model in await second.models()] == ["first", "tiny"]
    finally:
        await first.close()
        await second.close()
