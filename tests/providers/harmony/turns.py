"""Harmony as readable text to ids and back, what a reader makes of ids, and walks that a grammar allows."""

import random
import re
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import count, pairwise
from typing import Any, Literal

from apis.chat import ChatRequest
from apis.deltas import Delta, Finish, ReasoningDelta, TextDelta, ToolArgumentsDelta, ToolCallStart
from providers.inference.harmony.grammar import request_to_grammar
from providers.inference.harmony.matcher import GrammarCompiler, GrammarMatcher
from providers.inference.harmony.read import HarmonyReader
from providers.inference.harmony.token_cache import TokenCache
from providers.inference.harmony.vocabulary import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    MESSAGE,
    RETURN,
    START,
    VOCABULARY_SIZE,
    load_vocabulary,
)

MARKS = {
    "<|start|>": START,
    "<|end|>": END,
    "<|message|>": MESSAGE,
    "<|channel|>": CHANNEL,
    "<|constrain|>": CONSTRAIN,
    "<|return|>": RETURN,
    "<|call|>": CALL,
}
NAMES = {token: name for name, token in MARKS.items()}


def encode(turn: str) -> list[int]:
    """The ids of a turn whose marks are written out."""
    ids: list[int] = []
    for piece in re.split(r"(<\|[a-z]+\|>)", turn):
        ids += [MARKS[piece]] if piece in MARKS else load_vocabulary().encode(piece)
    return ids


def decode(ids: Iterable[int]) -> str:
    data = b"".join(NAMES[token].encode() if token in NAMES else load_vocabulary().decode_bytes(token) for token in ids)
    return data.decode("utf-8", "replace")


def chat_request(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields})


def function(name: str, parameters: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


def custom(name: str, syntax: str = "", definition: str = "") -> dict[str, Any]:
    form = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}} if syntax else None
    return {"type": "custom", "custom": {"name": name, "format": form}}


READ_TOOLS = chat_request(
    tools=[
        function("add"),
        function("find", namespace="files"),
        custom("shell"),
        {"type": "browser"},
        {"type": "python"},
    ]
)


CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
THINK = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"


def formatted(schema: Any, **fields: Any) -> ChatRequest:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    return chat_request(response_format=form, **fields)


def reader(request: ChatRequest | None = None, memo: TokenCache | None = None) -> HarmonyReader:
    numbers = count(1)
    return HarmonyReader(
        load_vocabulary(), request or chat_request(), memo, make_call_id=lambda: f"call_{next(numbers)}"
    )


def read(
    turn: str | Sequence[int],
    request: ChatRequest | None = None,
    *,
    reason: Literal["stop", "length"] = "stop",
    cuts: Sequence[int] = (),
) -> list[Delta]:
    """All deltas of the turn, fed in pieces where `cuts` are."""
    ids = encode(turn) if isinstance(turn, str) else list(turn)
    one = reader(request)
    edges = [0, *sorted(cuts), len(ids)]
    deltas = [delta for at, to in pairwise(edges) for delta in one.feed(ids[at:to])]
    return [*deltas, *one.finish(reason, input_tokens=7, cached_tokens=3)]


def joined(deltas: Iterable[Delta]) -> list[Delta]:
    """Deltas of the same message as one, logprobs left out."""
    out: list[Delta] = []
    for delta in deltas:
        match out[-1] if out else None, delta:
            case TextDelta(before, _, phase, is_new), TextDelta(text, _, now, False) if now == phase:
                out[-1] = TextDelta(before + text, (), phase, is_new)
            case _, TextDelta(text, _, phase, is_new):
                out.append(TextDelta(text, (), phase, is_new))
            case ReasoningDelta(before, is_new), ReasoningDelta(text, False):
                out[-1] = ReasoningDelta(before + text, is_new)
            case ToolArgumentsDelta(was, before), ToolArgumentsDelta(id_, text) if was == id_:
                out[-1] = ToolArgumentsDelta(id_, before + text)
            case _:
                out.append(delta)
    return out


def said(turn: str | Sequence[int], request: ChatRequest | None = None, **how: Any) -> list[Delta]:
    """`read`, joined, without the Finish."""
    return joined(read(turn, request, **how))[:-1]


def check_order(deltas: Sequence[Delta]) -> None:
    """One Finish, last; arguments only of calls that have begun; nothing empty."""
    begun: set[str] = set()
    for delta in deltas[:-1]:
        match delta:
            case ToolCallStart(id_, name):
                assert id_ not in begun
                assert name
                begun.add(id_)
            case ToolArgumentsDelta(id_, text):
                assert id_ in begun
                assert text
            case TextDelta(text) | ReasoningDelta(text):
                assert text
            case _:
                raise AssertionError(f"{delta} before the end")
    assert isinstance(deltas[-1], Finish)
    assert deltas[-1].reason != "tool_calls" or begun


# --- grammars --------------------------------------------------------------------------------------------------------


@cache
def matchers() -> GrammarCompiler:
    return GrammarCompiler(load_vocabulary())


@cache
def closers() -> tuple[int, ...]:
    """Tokens that bring most texts to an end."""
    words = ["}", "]", '"', "0", "1", ",", ":", "a", "-", " ", "\n", "***", " End", " Patch"]
    return tuple(token for word in words for token in encode(word))


def matcher(request: ChatRequest) -> GrammarMatcher:
    grammar = request_to_grammar(request)
    assert grammar is not None
    return matchers().build_matcher(grammar)


def allowed(mask: bytes, token: int) -> bool:
    return bool(mask[token >> 3] >> (token & 7) & 1)


def allows(one: GrammarMatcher, turn: str | Sequence[int]) -> bool:
    """Take the turn token by token, and return false at the first that is not allowed. The masks must agree."""
    for token in encode(turn) if isinstance(turn, str) else turn:
        may = allowed(one.mask(), token)
        assert one.accept(token) == may
        if not may:
            return False
    return True


def pick(mask: bytes, rng: random.Random, at: int, patience: int) -> int:
    """Any token of the mask, but the longer it takes the sooner one that ends things."""
    if rng.random() < at / patience:
        for group in ((RETURN, CALL, END, MESSAGE), closers()):
            if fit := [token for token in group if allowed(mask, token)]:
                return rng.choice(fit)
    bits = int.from_bytes(mask, "little")
    start = rng.randrange(VOCABULARY_SIZE)
    rest = bits >> start
    if not rest:
        start, rest = 0, bits
    return start + (rest & -rest).bit_length() - 1


def walk(one: GrammarMatcher, rng: random.Random, patience: int = 40) -> list[int]:
    """A turn that the masks allow; it must come to an end."""
    ids: list[int] = []
    while not one.is_done:
        assert len(ids) < 3000, decode(ids[-200:])
        forced = one.forced_tokens() or [pick(one.mask(), rng, len(ids), patience)]
        for token in forced:
            assert one.accept(token), decode([*ids, token])
        ids += forced
    return ids
