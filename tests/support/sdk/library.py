"""A vector store of three texts, and how to fill and search it through the SDK."""

from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

POLL_MS = 20
WHALES = "# Whales\n\nThe blue whale is the largest animal that has ever lived. It eats krill.\n"
SHIPS = "# Ships\n\nA clipper was a fast sailing ship of the nineteenth century. Tea came from China on clippers.\n"
BREAD = "# Bread\n\nSourdough rises by wild yeast. Flour, water and salt are all that it takes.\n"
TEXTS = {"whales.md": WHALES, "ships.md": SHIPS, "bread.md": BREAD}


def sections(folder: Path, **config: Any) -> dict[str, Any]:
    return {
        "inference": {"provider": "tests.support.models.hashing:Hashing"},
        "vector_index": {"provider": "sqlite_vec", "path": str(folder / "vectors.db")},
        "vector_stores": {"provider": "hybrid", "embedding_model": "hashing", **config},
    }


async def upload(client: AsyncOpenAI, name: str, text: str | bytes) -> str:
    data = text if isinstance(text, bytes) else text.encode()
    return (await client.files.create(file=(name, data), purpose="assistants")).id


async def filled(client: AsyncOpenAI, **attributes: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """A store with all TEXTS, ready; its id, and the files' ids by name."""
    store = await client.vector_stores.create(name="library")
    ids = {name: await upload(client, name, text) for name, text in TEXTS.items()}
    batch = await client.vector_stores.file_batches.create_and_poll(
        store.id,
        files=[{"file_id": ids[name], "attributes": attributes.get(name[:-3])} for name in TEXTS],
        poll_interval_ms=POLL_MS,
    )
    assert (batch.status, batch.file_counts.completed, batch.file_counts.total) == ("completed", 3, 3)
    return store.id, ids


async def find_files(client: AsyncOpenAI, store_id: str, query: str | list[str], **options: Any) -> list[str]:
    return [hit.filename async for hit in client.vector_stores.search(store_id, query=query, **options)]
