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
from stack.http.edge import client_gone, json_response
from stack.http.parsing import read_request
from stack.http.streams import ClientGone, while_connected

_BLOCKING_NUMBERS: Final = 16 * 1024
"""Answers of more are written in a thread: it would hold up other streams."""


async def embeddings(body: bytes, inference: Inference, receive: Receive) -> Response:
    """The answer to one request."""
    request = await read_request(body, EmbeddingRequest)
    try:
        made = await while_connected(receive, inference.embed(request))
    except ClientGone:
        return client_gone()
    if sum(map(len, made.vectors)) > _BLOCKING_NUMBERS:
        return json_response(await asyncio.to_thread(_to_json, request, made))
    return json_response(_to_json(request, made))


def _to_json(request: EmbeddingRequest, made: Embeddings) -> bytes:
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
        for index, vector in enumerate(made.vectors)
    ]
    usage = {"prompt_tokens": made.input_tokens, "total_tokens": made.input_tokens}
    return orjson.dumps({"object": "list", "data": data, "model": request.model, "usage": usage})
