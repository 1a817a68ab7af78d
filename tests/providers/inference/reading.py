"""Reads streams of chunks into deltas, whole and cut, for the tests of the parser."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from apis.chat import ChatRequest
from apis.deltas import (
    DelayedOutput,
    Delta,
    Finish,
    ReasoningDelta,
    ReasoningSummaryDelta,
    RefusalDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallStart,
    Usage,
)
from apis.errors import StackError
from providers.inference.chat_completions.chunks import ChatChunkReader
from tests.support.servers.upstream_server import DONE, Chunk, event

USED = Usage(11, 7)


def chat_request(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields})


def tools(*names: str, custom: Sequence[str] = ()) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name}} for name in names] + [
        {"type": "custom", "custom": {"name": name}} for name in custom
    ]


def read(chunks: Sequence[Chunk | str], request: ChatRequest | None = None, *, done: bool = True) -> list[Delta]:
    """All deltas, from one read and from reads of one byte, which must say the same."""
    raw = b"".join(event(chunk) for chunk in chunks) + (DONE if done else b"")
    whole = read_cut(raw, [], request)
    assert joined(read_cut(raw, list(range(len(raw))), request)) == joined(whole)
    return whole


def read_cut(raw: bytes, cuts: list[int], request: ChatRequest | None = None) -> list[Delta]:
    parser = ChatChunkReader(request or chat_request())
    edges = [0, *cuts, len(raw)]
    deltas = [delta for a, b in pairwise(edges) for delta in parser.feed(raw[a:b])]
    deltas += parser.end()
    if parser.failure is not None:
        raise parser.failure
    assert parser.is_finished
    return deltas


def joined(deltas: Sequence[Delta]) -> list[tuple[Any, ...]]:
    """Deltas without what chance decides: made-up ids, and where texts were cut."""
    ids: dict[str, str] = {}
    out: list[tuple[Any, ...]] = []
    for delta in deltas:
        match delta:
            case ToolCallStart(call_id, name, custom):
                ids[call_id] = f"call {len(ids)}"
                out.append((ids[call_id], name, custom))
            case ToolArgumentsDelta(call_id, text):
                _extend(out, (ToolArgumentsDelta, ids[call_id]), text, ())
            case TextDelta(text, logprobs):
                _extend(out, (TextDelta,), text, logprobs)
            case ReasoningDelta(text) | ReasoningSummaryDelta(text) | RefusalDelta(text):
                _extend(out, (type(delta),), text, ())
            case DelayedOutput():
                pass  # counts deltas, and is no part of the answer
            case Finish(reason, usage):
                out.append((reason, usage))
    return out


def _extend(out: list[tuple[Any, ...]], key: tuple[Any, ...], text: str, logprobs: Sequence[Any]) -> None:
    if out and out[-1][0] == key:
        _, former, earlier = out.pop()
        text, logprobs = former + text, [*earlier, *logprobs]
    out.append((key, text, list(logprobs)))


def failure(chunks: Sequence[Chunk | str], *, done: bool = True) -> StackError:
    with pytest.raises(StackError) as caught:
        read(chunks, done=done)
    return caught.value
