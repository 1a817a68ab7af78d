"""Bodies of POST /embeddings: split an EmbeddingRequest into parts, build the body, parse the vectors."""

import binascii
import math
import struct
from array import array
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from apis.documents.embeddings import EmbeddingRequest, Embeddings
from apis.errors import UpstreamError
from providers.inference.chat_completions.body import body_to_json
from providers.inference.chat_completions.usage import parse_usage

MAX_INPUTS_PER_REQUEST: Final = 32
"""Inputs per request, so few that the longest vectors fit into the largest response that is read."""


class _Vector(msgspec.Struct):
    index: int
    embedding: str | list[float]


class _EmbeddingResponse(msgspec.Struct):
    data: list[_Vector]
    usage: Any = None


def split_request(request: EmbeddingRequest) -> Sequence[EmbeddingRequest]:
    """Return requests with at most MAX_INPUTS_PER_REQUEST inputs each."""
    if len(request.inputs) <= MAX_INPUTS_PER_REQUEST:
        return [request]
    inputs = request.inputs
    starts = range(0, len(inputs), MAX_INPUTS_PER_REQUEST)
    return [request.model_copy(update={"input": inputs[start : start + MAX_INPUTS_PER_REQUEST]}) for start in starts]


def request_to_embedding_body(request: EmbeddingRequest) -> bytes:
    """Return the body. Vectors are requested in base64, a quarter of their length in digits; digits are accepted
    too."""
    body = request.model_dump(exclude_none=True, exclude={"encoding_format"})
    return body_to_json({**body, "encoding_format": "base64"})


def parse_embeddings(body: bytes, request: EmbeddingRequest) -> Embeddings:
    """Return the vectors. Raises UpstreamError unless there is one finite vector per input, all of the requested
    length."""
    try:
        response = msgspec.json.decode(body, type=_EmbeddingResponse)
        vectors = {vector.index: _parse_vector(vector.embedding) for vector in response.data}
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
    if len(response.data) != count or vectors.keys() != set(range(count)):
        raise UpstreamError(f"The inference server sent {len(response.data)} embeddings for {count} inputs.")
    lengths = {len(vector) for vector in vectors.values()}
    dimensions = request.dimensions or len(vectors[0])
    if lengths != {dimensions} or not dimensions:
        raise UpstreamError("The inference server sent embeddings of the wrong length.")
    if not all(map(math.isfinite, (sum(map(abs, vector)) for vector in vectors.values()))):
        raise UpstreamError("The inference server sent embeddings with numbers that are none.")
    return Embeddings([vectors[index] for index in range(count)], parse_usage(response.usage).input_tokens)


def join_embeddings(results: Sequence[Embeddings]) -> Embeddings:
    """Join the results of a split request. Raises UpstreamError if their lengths differ."""
    vectors = [vector for part in results for vector in part.vectors]
    if len({len(vector) for vector in vectors}) > 1:
        raise UpstreamError("The inference server sent embeddings of different lengths.")
    return Embeddings(vectors, sum(part.input_tokens for part in results))


def _parse_vector(embedding: str | list[float]) -> "array[float]":
    if isinstance(embedding, list):
        return array("f", embedding)
    raw = binascii.a2b_base64(embedding, strict_mode=True)
    return array("f", struct.unpack(f"<{len(raw) // 4}f", raw))
