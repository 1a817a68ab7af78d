"""Events of llama.cpp's /completion with `return_tokens`, as tokens.

The engine sends no event for a token that ends within a character: the next event has the text of all of them, the id
of the last, and a count by which the others are missed. Source: process_token in llama.cpp's server-context.cpp.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from apis.deltas import TokenLogprob, Usage
from apis.errors import UpstreamError
from providers.inference.chat_completions.chunk_types import clamp_logprob
from providers.inference.chat_completions.chunks import DECODE_ERRORS
from providers.inference.chat_completions.usage import parse_count
from providers.inference.harmony.chunks import TokenChunk
from providers.inference.harmony.harmony import Harmony
from providers.inference.harmony.partial_tokens import PartialTokens

FINISH_REASONS: Final = {"eos": "stop", "word": "stop", "limit": "length"}
FINAL_FIELDS: Final = ("stop", "stop_type", "tokens_predicted")
"""Fields of the last event that are read. Without this list it repeats the prompt, the grammar and all settings."""


class _TopLogprob(msgspec.Struct, gc=False):
    id: int
    logprob: float | None = None


class _TokenLogprob(_TopLogprob, gc=False):
    top_logprobs: list[_TopLogprob] = []


class _Progress(msgspec.Struct, gc=False):
    total: Any = None
    cache: Any = None


class _Chunk(msgspec.Struct, gc=False):
    tokens: list[int] = []
    content: str = ""
    stop: bool = False
    tokens_predicted: int = 0
    stop_type: str | None = None
    prompt_progress: _Progress | None = None
    completion_probabilities: list[_TokenLogprob] | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class LlamaChunkDecoder:
    """Decoder of one completion; see ChunkDecoder."""

    reason_is_last = True

    def __init__(self, harmony: Harmony, partial_tokens: PartialTokens, top_logprobs: int) -> None:
        self._harmony = harmony
        self._partial_tokens = partial_tokens
        self._top_logprobs = top_logprobs
        self._token_count = 0

    def decode(self, payload: bytes) -> TokenChunk:
        """See `ChunkDecoder.decode`."""
        try:
            chunk = _decode(payload)
        except DECODE_ERRORS as exc:
            raise UpstreamError("The local engine sent a chunk that is not valid.") from exc
        if chunk.error is not None:
            return TokenChunk(error=chunk.error)
        if chunk.prompt_progress is not None:
            # Sent while the prompt is read, so the cached tokens are known for an answer that is cut, too.
            progress = chunk.prompt_progress
            return TokenChunk(usage=Usage(parse_count(progress.total), 0, parse_count(progress.cache)))
        unread_tokens = chunk.tokens_predicted - self._token_count - len(chunk.tokens)
        self._token_count = chunk.tokens_predicted
        if chunk.stop:
            reason = FINISH_REASONS.get(chunk.stop_type or "", "unknown")
            return TokenChunk(finish_reason=reason, unread_tokens=max(unread_tokens, 0))
        ids, logprobs = chunk.tokens, self._build_logprobs(chunk.completion_probabilities or ())
        if unread_tokens > 0 and ids:
            ids = self._partial_tokens.find_ids(chunk.content, unread_tokens, ids[-1])
            logprobs = [*(None for _ in ids[:-1]), *logprobs] if logprobs else ()
        return TokenChunk(ids, logprobs)

    def _build_logprobs(self, logprobs: Sequence[_TokenLogprob]) -> Sequence[TokenLogprob | None]:
        return [
            self._harmony.build_token_logprob(
                token.id,
                clamp_logprob(token.logprob),
                [(other.id, clamp_logprob(other.logprob)) for other in token.top_logprobs[: self._top_logprobs]],
            )
            for token in logprobs
        ]
