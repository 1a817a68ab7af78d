"""Inference servers with a prefix cache like vLLM's: prompts are cached in blocks, and a block is a hit only if all
blocks before it are the same."""

import asyncio
import hashlib
import json
from typing import Any, Final, Self

from tests.support.servers.upstream_server import (
    Answer,
    Received,
    UpstreamServer,
    Wait,
    delta_chunk,
    stream,
    usage_chunk,
)

BLOCK_CHARS: Final = 64
CHARS_PER_TOKEN: Final = 4


class PrefixCache:
    """The blocks of all prompts so far, and the tokens that were found in it and that were asked for."""

    def __init__(self) -> None:
        self.blocks: set[bytes] = set()
        self.hit_tokens = 0
        self.prompt_tokens = 0

    def add(self, prompt: str) -> int:
        """Cache the prompt, and return how many of its first tokens were there."""
        digest, hits, is_hit = b"", 0, True
        for start in range(0, len(prompt) - BLOCK_CHARS + 1, BLOCK_CHARS):
            digest = hashlib.sha256(digest + prompt[start : start + BLOCK_CHARS].encode()).digest()
            is_hit = is_hit and digest in self.blocks
            hits += is_hit
            self.blocks.add(digest)
        tokens = hits * BLOCK_CHARS // CHARS_PER_TOKEN
        self.hit_tokens += tokens
        self.prompt_tokens += len(prompt) // CHARS_PER_TOKEN
        return tokens


class PrefixCacheServer(UpstreamServer):
    """Answers every chat with a sentence, and reports `cached_tokens`. `possible` is the cache of one server that gets
    all requests. An answer waits for `open_gate` where the test closes it."""

    def __init__(self, possible: PrefixCache | None = None) -> None:
        super().__init__()
        self.cache = PrefixCache()
        self.open_gate: asyncio.Event | None = None
        self._possible = possible or PrefixCache()
        self.routes["/v1/chat/completions"] = self._answer_chat

    def _answer_chat(self, request: Received) -> Answer:
        prompt = render(request.json)
        cached = self.cache.add(prompt)
        self._possible.add(prompt)
        usage = usage_chunk(len(prompt) // CHARS_PER_TOKEN, 7, prompt_tokens_details={"cached_tokens": cached})
        text = delta_chunk(content=f"An answer to request {len(self.received)}.")
        answer = stream([text, delta_chunk("stop", content=""), usage])
        return answer if self.open_gate is None else [Wait(self.open_gate), *answer]

    async def restart(self) -> Self:
        """Listen again on the same port, with an empty cache, as an engine that was started again."""
        self.cache = PrefixCache()
        port = int(self.base_url.removesuffix("/v1").rpartition(":")[2])
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        return self


def render(body: dict[str, Any]) -> str:
    """The prompt of a chat, as a template would write it: the tools, then the messages."""
    return "".join(json.dumps(part) + "\n" for part in [body.get("tools"), *body["messages"]])
