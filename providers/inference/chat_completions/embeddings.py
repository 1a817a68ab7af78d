"""The bodies of POST /embeddings: an EmbeddingRequest in parts of a fit size out, vectors in."""

import binascii
import math
import struct
from array import array
from collections.abc import Sequence
from typing import Final

import msgspec

from apis.embeddings import EmbeddingRequest, Embeddings
from apis.errors import UpstreamError
from providers.inference.chat_completions.body import body_to_json

PART_INPUTS: Final = 32
"""So few that the longest vectors there are fit into what is read of an answer."""


class _Vector(msgspec.Struct):
    index: int
    embedding: str | list[float]


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0


class _Answer(msgspec.Struct):
    data: list[_Vector]
    usage: _Usage | None = None


def request_to_parts(request: EmbeddingRequest) -> Sequence[EmbeddingRequest]:
    """The same request for a few of its inputs at a time."""
    if len(request.inputs) <= PART_INPUTS:
        return [request]
    inputs = request.inputs
    starts = range(0, len(inputs), PART_INPUTS)
    return [request.model_copy(update={"input": inputs[start : start + PART_INPUTS]}) for start in starts]


def request_to_embedding_body(request: EmbeddingRequest) -> bytes:
    """Numbers are asked for in base64, which is a quarter of their length in digits; digits are understood too."""
    body = request.model_dump(exclude_none=True, exclude={"encoding_format"})
    return body_to_json({**body, "encoding_format": "base64"})


def answer_to_embeddings(answer: bytes, request: EmbeddingRequest) -> Embeddings:
    """Raises UpstreamError for everything but one finite vector per input, all of the length that was asked for."""
    try:
        found = msgspec.json.decode(answer, type=_Answer)
        vectors = {each.index: _vector(each.embedding) for each in found.data}
    except (
        msgspec.DecodeError,
        UnicodeDecodeError,
        RecursionError,
        binascii.Error,
        struct.error,
        OverflowError,
    ) as exc:
        raise UpstreamError("The inference server sent embeddings that are not valid.") from exc
    count = len(request.inputs)
    if len(found.data) != count or vectors.keys() != set(range(count)):
        raise UpstreamError(f"The inference server sent {len(found.data)} embeddings for {count} inputs.")
    lengths = {len(vector) for vector in vectors.values()}
    wanted = request.dimensions or len(vectors[0])
    if lengths != {wanted} or not wanted:
        raise UpstreamError("The inference server sent embeddings of the wrong length.")
    if not all(map(math.isfinite, (sum(map(abs, vector)) for vector in vectors.values()))):
        raise UpstreamError("The inference server sent embeddings with numbers that are none.")
    return Embeddings([vectors[index] for index in range(count)], found.usage.prompt_tokens if found.usage else 0)


def join(parts: Sequence[Embeddings]) -> Embeddings:
    """The answers to the parts of one request, as the answer to the whole. Raises UpstreamError where they differ."""
    vectors = [vector for part in parts for vector in part.vectors]
    if len({len(vector) for vector in vectors}) > 1:
        raise UpstreamError("The inference server sent embeddings of different lengths.")
    return Embeddings(vectors, sum(part.input_tokens for part in parts))


def _vector(given: str | list[float]) -> "array[float]":
    if isinstance(given, list):
        return array("f", given)
    raw = binascii.a2b_base64(given, strict_mode=True)
    return array("f", struct.unpack(f"<{len(raw) // 4}f", raw))
