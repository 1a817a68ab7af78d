"""The catalogue of served models: how often it asks for the list, and what it knows while that fails."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence

import pytest

from apis.chat import ChatRequest
from apis.deltas import DeltaBatch
from apis.errors import UpstreamError
from apis.inference import Inference, Modality, Model
from providers.responses.tools.models import ModelCatalog


class Listed(Inference):
    """Lists one model once `ready` is set, or fails while `is_down`; `listings` counts the calls."""

    def __init__(self) -> None:
        self.listings = 0
        self.is_down = False
        self.ready = asyncio.Event()

    async def models(self) -> Sequence[Model]:
        self.listings += 1
        await self.ready.wait()
        if self.is_down:
            raise UpstreamError("It is down.")
        return [Model("m", "us", modalities=frozenset(("image",)))]

    async def count_tokens(self, request: ChatRequest) -> int:
        raise NotImplementedError

    async def chat(self, request: ChatRequest) -> AsyncGenerator[DeltaBatch]:
        raise NotImplementedError
        yield ()


async def modalities(catalog: ModelCatalog) -> frozenset[Modality] | None:
    return (await catalog.find("m")).modalities


async def test_requests_that_come_together_wait_for_one_listing() -> None:
    """Fifty requests at once list the models once."""
    inference = Listed()
    catalog = ModelCatalog(inference)
    requests = [asyncio.create_task(modalities(catalog)) for _ in range(50)]
    await asyncio.sleep(0)
    inference.ready.set()
    assert await asyncio.gather(*requests) == [frozenset(("image",))] * 50
    assert inference.listings == 1


async def test_a_failed_listing_is_remembered_for_a_while() -> None:
    """While the upstream is down, requests do not each wait for its time-out, nor in the next seconds."""
    inference = Listed()
    inference.is_down = True
    catalog = ModelCatalog(inference)
    requests = [asyncio.create_task(modalities(catalog)) for _ in range(50)]
    await asyncio.sleep(0)
    inference.ready.set()
    assert await asyncio.gather(*requests) == [None] * 50
    assert await modalities(catalog) is None
    assert inference.listings == 1


async def test_the_last_list_is_used_while_the_models_are_listed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A known list serves the others during a new listing, and after one that failed."""
    inference = Listed()
    catalog = ModelCatalog(inference)
    inference.ready.set()
    await modalities(catalog)
    later = time.monotonic() + 61
    monkeypatch.setattr(time, "monotonic", lambda: later)
    inference.ready.clear()
    inference.is_down = True
    first = asyncio.create_task(modalities(catalog))
    await asyncio.sleep(0)
    assert await modalities(catalog) == frozenset(("image",))
    inference.ready.set()
    assert await first == frozenset(("image",))
    assert inference.listings == 2
