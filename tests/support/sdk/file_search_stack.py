"""A stack whose scripted model can search in files: the texts, the store they are in, and a model that embeds too."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from apis.documents.embeddings import EmbeddingRequest, Embeddings
from apis.errors import UpstreamError
from apis.inference import Model
from providers.inference.scripted import Scripted
from tests.support.models.hashing import DIMENSIONS, embed
from tests.support.sdk.answer_shapes import Script
from tests.support.servers.serving import Served, serving

Json = dict[str, Any]
POLL_MS = 20
TEXTS = {
    "whales.md": "# Whales\n\nThe blue whale is the largest animal that has ever lived. It eats krill.",
    "ships.md": "# Ships\n\nA clipper was a fast sailing ship. Tea came from China on clippers.",
    "bread.md": "# Bread\n\nSourdough rises by wild yeast. Flour, water and salt are all that it takes.",
}


class Filing(Scripted):
    """A scripted model, and one that embeds by the letters of words. A text with `unwell` in it makes it fail."""

    class Config(Scripted.Config):
        pass

    async def models(self) -> Sequence[Model]:
        return [*await super().models(), Model("hashing", "tests", embedding_dimensions=DIMENSIONS)]

    async def embed(self, request: EmbeddingRequest, *, tenant: str = "") -> Embeddings:
        if any("unwell" in str(text) for text in request.inputs):
            raise UpstreamError("The model is not well.")
        return Embeddings([embed(str(text)) for text in request.inputs], 1)


def vector_sections(folder: Path) -> Json:
    """The sections of a run config that vector stores need."""
    return {
        "vector_index": {"provider": "sqlite_vec", "path": str(folder / "vectors.db")},
        "vector_stores": {"provider": "hybrid", "embedding_model": "hashing"},
    }


@asynccontextmanager
async def filing(folder: Path, *turns: Script, **sections: Any) -> AsyncGenerator[Served]:
    """A stack with vector stores, whose model plays `turns`."""
    more = vector_sections(folder)
    inference = {"provider": "tests.support.sdk.file_search_stack:Filing", "turns": list(turns)}
    async with serving(inference, more=more, **sections) as served:
        yield served


async def store_of(served: Served, *names: str, **attributes: Json) -> tuple[str, dict[str, str]]:
    """A new store with these of TEXTS, all without any; its id, and the files' ids by name."""
    client = served.client
    store = await client.vector_stores.create()
    ids: dict[str, str] = {}
    for name in names or TEXTS:
        ids[name] = (await client.files.create(file=(name, TEXTS[name].encode()), purpose="assistants")).id
    batch = await client.vector_stores.file_batches.create_and_poll(
        store.id,
        files=[{"file_id": file_id, "attributes": attributes.get(name[:-3])} for name, file_id in ids.items()],
        poll_interval_ms=POLL_MS,
    )
    assert (batch.status, batch.file_counts.completed) == ("completed", len(ids))
    return store.id, ids
