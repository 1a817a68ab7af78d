"""Hashing: an Inference that embeds text by the words in it, the same way everywhere, for tests."""

import asyncio
import hashlib
import math
import re
from array import array
from collections.abc import AsyncGenerator, Sequence

from apis.chat import ChatRequest
from apis.deltas import DeltaBatch, Finish, TextDelta, Usage
from apis.documents.embeddings import EmbeddingRequest, Embeddings
from apis.errors import UpstreamError
from apis.inference import Inference, Model
from apis.provider import Provider

DIMENSIONS = 256


class Hashing(Inference):
    """Each word's letters, by threes, are added up in places that their hash says. `gate`, where set, is waited for."""

    def __init__(self, config: Provider.Config) -> None:
        self.gate: asyncio.Event | None = None
        self.waiting = asyncio.Event()
        self.failing = False
        self.request_sizes: list[int] = []

    async def models(self) -> Sequence[Model]:
        return [Model("hashing", "tests", embedding_dimensions=DIMENSIONS)]

    async def chat(self, request: ChatRequest) -> AsyncGenerator[DeltaBatch]:
        yield (TextDelta("Yes."), Finish("stop", Usage()))

    async def count_tokens(self, request: ChatRequest) -> int:
        return len(request.messages)

    async def embed(self, request: EmbeddingRequest, *, tenant: str = "") -> Embeddings:
        self.request_sizes.append(len(request.inputs))
        if self.failing:
            raise UpstreamError("The model is not well.")
        if self.gate is not None:
            self.waiting.set()
            await self.gate.wait()
        return Embeddings([embed(str(text)) for text in request.inputs], 1)


def embed(text: str) -> "array[float]":
    vector = [0.0] * DIMENSIONS
    for word in re.findall(r"\w+", text.lower()):
        padded = f"^{word}$"
        for start in range(len(padded) - 2):
            digest = hashlib.blake2b(padded[start : start + 3].encode(), digest_size=4).digest()
            place = int.from_bytes(digest, "big")
            vector[place % DIMENSIONS] += 1 - 2 * (place >> 31)
    norm = math.hypot(*vector) or 1.0
    return array("f", [each / norm for each in vector])
