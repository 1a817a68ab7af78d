"""POST /v1/embeddings: a third thin route over the same Inference."""

import asyncio
import base64
import struct
from typing import Any, Final

import orjson
from starlette.responses import Response
from starlette.types import Receive

from apis.embeddings import EmbeddingRequest, Embeddings
from apis.inference import Inference
from stack.http.edge import client_disconnected_response, json_response
from stack.http.parsing import read_request
from stack.http.streams import ClientDisconnected, run_while_connected

_MAX_INLINE_NUMBERS: Final = 16 * 1024
"""Answers of more are written in a thread: it would hold up other streams."""


async def create_embeddings(body: bytes, inference: Inference, receive: Receive) -> Response:
    """The answer to one request."""
    request = await read_request(body, EmbeddingRequest)
    try:
        made = await run_while_connected(receive, inference.embed(request))
    except ClientDisconnected:
        return client_disconnected_response()
    if sum(map(len, made.vectors)) > _MAX_INLINE_NUMBERS:
        return json_response(await asyncio.to_thread(_embeddings_to_json, request, made))
    return json_response(_embeddings_to_json(request, made))


def _embeddings_to_json(request: EmbeddingRequest, embeddings: Embeddings) -> bytes:
    """Not through the SDK's model, which has no base64: it decodes that before anybody sees it."""
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
