"""Harmony: gpt-oss's own language as one door. Requests become prompts of tokens, tokens become deltas."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

from apis.chat import ChatRequest
from apis.deltas import TokenLogprob, TopLogprob
from providers.inference.harmony.grammar import TurnGrammar, request_to_grammar
from providers.inference.harmony.matcher import Matcher, Matchers
from providers.inference.harmony.options import HarmonyOptions
from providers.inference.harmony.read import HarmonyReader
from providers.inference.harmony.render import Renderer
from providers.inference.harmony.token_cache import Memo
from providers.inference.harmony.vocabulary import Vocabulary, load_vocabulary

INLINE_CHARS: Final = 20_000
"""Prompts of fewer characters are rendered on the spot: within a few milliseconds, whatever is in them."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """`ids` end with `<|start|>assistant`. `grammar` is what the answer must match; None where anything may come."""

    ids: Sequence[int]
    grammar: TurnGrammar | None


class Harmony:
    """What every provider that speaks Harmony shares. One memo for all its requests: a chain is encoded only once."""

    def __init__(self, vocabulary: Vocabulary, options: HarmonyOptions) -> None:
        self._vocabulary = vocabulary
        self._memo = Memo()
        self._renderer = Renderer(vocabulary, options, self._memo)
        self._matchers: Matchers | None = None

    @classmethod
    async def load(cls, options: HarmonyOptions) -> Self:
        """Raises ConfigError where the vocabulary cannot be had, naming the remedy."""
        return cls(await asyncio.to_thread(load_vocabulary), options)

    async def prepare_matchers(self) -> None:
        """What `matcher` needs: about a second, once."""
        if self._matchers is None:
            self._matchers = await asyncio.to_thread(Matchers, self._vocabulary)

    async def prompt(self, request: ChatRequest) -> Prompt:
        """Raises InvalidRequest or Unsupported naming the field that cannot be rendered or enforced."""
        if _chars(request) < INLINE_CHARS:
            return self._prompt(request)
        return await asyncio.to_thread(self._prompt, request)

    async def matcher(self, grammar: TurnGrammar) -> Matcher:
        """At the start of a turn. Raises InvalidRequest naming the field that cannot be compiled."""
        assert self._matchers is not None  # prepare_matchers comes first
        return await asyncio.to_thread(self._matchers.matcher, grammar)

    def reader(self, request: ChatRequest) -> HarmonyReader:
        """Of one answer to the request."""
        return HarmonyReader(self._vocabulary, request, self._memo)

    def token_logprob(self, token: int, logprob: float, top: Sequence[tuple[int, float]] = ()) -> TokenLogprob:
        """A token and its likeliest alternatives, as clients know them."""
        text, data = self._spelled(token)
        alternatives = [TopLogprob(*self._named(other, value)) for other, value in top]
        return TokenLogprob(text, logprob, list(data), alternatives)

    def _named(self, token: int, logprob: float) -> tuple[str, float, list[int]]:
        text, data = self._spelled(token)
        return text, logprob, list(data)

    def _spelled(self, token: int) -> tuple[str, bytes]:
        data = self._vocabulary.decode_bytes(token)
        return data.decode("utf-8", "replace"), data

    def _prompt(self, request: ChatRequest) -> Prompt:
        grammar = request_to_grammar(request)
        return Prompt(self._renderer.render(request), grammar)


def _chars(request: ChatRequest) -> int:
    """About how much there is to render: long requests are told from short ones, not more."""
    found = 200 * len(request.messages) + 2_000 * len(request.tools or ())
    for message in request.messages:
        content = message.content
        if isinstance(content, str):
            found += len(content)
        else:
            found += sum(len(part.text) for part in content or () if part.type == "text")
    return found
