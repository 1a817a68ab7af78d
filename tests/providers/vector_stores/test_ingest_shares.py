"""Files of several tenants that are made searchable: in turn by tenant, each embedded in its tenant's name."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from apis.documents.embeddings import EmbeddingRequest, Embeddings
from apis.documents.files import CreateFile
from apis.documents.vector_store_requests import CreateVectorStore
from apis.fair_share import Tenants
from apis.provider import Provider
from providers.fetcher.safe import GuardedFetcher
from providers.files.kv import StoredFiles
from providers.kv_store.memory import Memory
from providers.reader.child import ChildReader
from providers.vector_index.sqlite_vec import SQLiteVec
from providers.vector_stores.hybrid import HybridVectorStores
from tests.support.models.hashing import Hashing

TENANTS = Tenants(frozenset({"loud", "quiet"}))


class Recording(Hashing):
    """A model that records the tenants of its requests, in their order."""

    def __init__(self) -> None:
        super().__init__(Provider.Config())
        self.gate = self.may_end = asyncio.Event()
        self.tenants: list[str] = []
        self.quiet_came = asyncio.Event()

    async def embed(self, request: EmbeddingRequest, *, tenant: str = "") -> Embeddings:
        self.tenants.append(tenant)
        if tenant == "quiet":
            self.quiet_came.set()
        return await super().embed(request, tenant=tenant)


async def test_a_flood_of_files_of_one_tenant_delays_another_by_one_file(tmp_path: Path) -> None:
    """The queue is in the order of keys, in which one tenant's files come before all of another's."""
    kv, model = Memory(Memory.Config()), Recording()
    files, index = StoredFiles(StoredFiles.Config(), kv), SQLiteVec(SQLiteVec.Config(path=str(tmp_path / "vectors.db")))
    reader = ChildReader(ChildReader.Config(), files, GuardedFetcher(GuardedFetcher.Config()))
    config = HybridVectorStores.Config(embedding_model="hashing", lease_s=0.2)
    stores = HybridVectorStores(config, files, reader, index, model, kv, None, TENANTS)

    async def add(tenant: str, count: int) -> None:
        async def text() -> AsyncIterator[bytes]:
            yield b"a cat"

        upload = CreateFile(filename="a.txt", purpose="assistants")
        ids = [(await files.create(upload, text(), tenant=tenant)).id for _ in range(count)]
        await stores.create(CreateVectorStore(name="s", file_ids=ids), tenant=tenant)

    await index.start()
    try:
        await add("loud", 8)
        await stores.start()
        async with asyncio.timeout(20):
            await model.waiting.wait()
            await add("quiet", 1)
            await model.quiet_came.wait()
            assert model.tenants == ["loud", "quiet"]
    finally:
        model.may_end.set()
        await stores.close()
        await index.close()
