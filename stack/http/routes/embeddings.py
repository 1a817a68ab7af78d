"""/v1/embeddings: the vectors of texts, from the inference."""

import asyncio
import base64
import struct
from typing import Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import Response

from apis.deltas import Usage
from apis.documents.embeddings import EmbeddingRequest, Embeddings
from stack.http.answers import json_response
from stack.http.context import HttpContext, Services
from stack.http.request_body import read_metered
from stack.http.route import RESPONSES, Route
from stack.http.streams import run_while_connected

_MAX_INLINE_NUMBERS: Final = 16 * 1024
"""Numbers in a response. Larger responses are serialized in a thread, because they would hold up other streams."""


async def create_embeddings(http: Request, context: HttpContext, services: Services) -> Response:
    request = await read_metered(http, EmbeddingRequest)
    embedding = services.stack.inference.embed(request, tenant=context.tenant)
    embeddings = await run_while_connected(http, embedding)
    usage = Usage(input_tokens=embeddings.input_tokens)
    context.request_record.record_usage(request.model, usage, category="embeddings")
    if sum(map(len, embeddings.vectors)) > _MAX_INLINE_NUMBERS:
        return json_response(await asyncio.to_thread(_embeddings_to_json, request, embeddings))
    return json_response(_embeddings_to_json(request, embeddings))


EMBEDDING_ROUTES: Final = (
    Route("POST", "/embeddings", RESPONSES, create_embeddings, body=EmbeddingRequest, stores=False, batched=True),
)


def _embeddings_to_json(request: EmbeddingRequest, embeddings: Embeddings) -> bytes:
    """Serialize without the SDK's model, whose field has no type for base64."""
    data: list[dict[str, Any]] = [
        {
            "object": "embedding",
            "index": index,
            "embedding": (
                base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
                if request.encoding_format == "base64"
                else vector.tolist()
            ),
        }
        for index, vector in enumerate(embeddings.vectors)
    ]
    usage = {"prompt_tokens": embeddings.input_tokens, "total_tokens": embeddings.input_tokens}
    return orjson.dumps({"object": "list", "data": data, "model": request.model, "usage": usage})
