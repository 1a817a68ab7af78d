"""The laws of every Inference that makes embeddings: run each of `LAWS` over a `Subject`."""

import asyncio
import math
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from apis.documents.embeddings import EmbeddingRequest, Embeddings
from apis.errors import ModelNotFound
from apis.inference import Inference

PATIENCE_S = 60.0


@dataclass(frozen=True)
class Subject:
    """A started provider, its model of embeddings, and the name of a model that does not exist."""

    inference: Inference
    model: str
    unknown: str = "no-such-model"

    async def embed(self, value: Any, **fields: Any) -> Embeddings:
        request = EmbeddingRequest.model_validate({"model": self.model, "input": value, **fields})
        async with asyncio.timeout(PATIENCE_S):
            return await self.inference.embed(request)


def close(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(abs(a - b) < 1e-5 for a, b in zip(one, other, strict=True))


async def each_input_has_a_vector_in_its_place(subject: Subject) -> None:
    texts = [f"cat {'s' * (number % 7)} {number}" for number in range(70)]
    embeddings = await subject.embed(texts)
    assert len(embeddings.vectors) == len(texts)
    for at in (0, 1, 33, 69):
        (alone,) = (await subject.embed(texts[at])).vectors
        assert close(embeddings.vectors[at], alone)
    assert not close(embeddings.vectors[0], embeddings.vectors[1])


async def vectors_are_finite_floats_of_one_length(subject: Subject) -> None:
    embeddings = await subject.embed(["a", "the stock market", "cats. " * 600])
    assert len({len(vector) for vector in embeddings.vectors}) == 1
    for vector in embeddings.vectors:
        assert isinstance(vector, array)
        assert vector.typecode == "f"
        assert all(map(math.isfinite, vector))
        assert any(vector)


async def tokens_are_counted(subject: Subject) -> None:
    short, long = await subject.embed("cat"), await subject.embed(["cat", "the cat on the market"])
    assert 0 < short.input_tokens < long.input_tokens


async def requests_may_run_at_once(subject: Subject) -> None:
    texts = [f"cat {number}" for number in range(8)]
    embeddings = await asyncio.gather(*(subject.embed(text) for text in texts))
    together = await subject.embed(texts)
    assert all(close(one.vectors[0], other) for one, other in zip(embeddings, together.vectors, strict=True))


async def one_that_is_cancelled_leaves_the_others_their_own(subject: Subject) -> None:
    expected = (await subject.embed("kitten")).vectors[0]
    remaining = [asyncio.create_task(subject.embed(f"market {number}")) for number in range(4)]
    patient = asyncio.create_task(subject.embed("kitten"))
    await asyncio.sleep(0)
    for task in remaining:
        task.cancel()
    assert close((await patient).vectors[0], expected)
    outcomes = await asyncio.gather(*remaining, return_exceptions=True)
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)


async def an_unknown_model_is_not_found(subject: Subject) -> None:
    with pytest.raises(ModelNotFound) as caught:
        await subject.embed("cat", model=subject.unknown)
    assert caught.value.param == "model"


Law = Callable[[Subject], Awaitable[None]]
LAWS: tuple[Law, ...] = (
    each_input_has_a_vector_in_its_place,
    vectors_are_finite_floats_of_one_length,
    tokens_are_counted,
    requests_may_run_at_once,
    one_that_is_cancelled_leaves_the_others_their_own,
    an_unknown_model_is_not_found,
)
