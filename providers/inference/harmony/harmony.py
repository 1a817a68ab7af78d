"""Entry point to Harmony, gpt-oss's own format: requests become prompts of tokens, tokens become deltas."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Self

from pydantic import JsonValue

from apis.chat import (
    ChatCustomTool,
    ChatFunctionTool,
    ChatGrammarFormat,
    ChatJsonSchemaFormat,
    ChatRequest,
    ChatTool,
    ChatToolCall,
    CustomCall,
    Message,
    NativeTool,
)
from apis.deltas import TokenLogprob, TopLogprob
from providers.common.grammars.checks import run_in_turn
from providers.inference.decisions.labels import Label, find_labels, list_spellings
from providers.inference.decisions.prompts import build_chat
from providers.inference.harmony.grammar import TurnGrammar, request_to_grammar
from providers.inference.harmony.matcher import GrammarCompiler, GrammarMatcher
from providers.inference.harmony.options import HarmonyOptions
from providers.inference.harmony.partial_tokens import PartialTokens
from providers.inference.harmony.read import HarmonyReader
from providers.inference.harmony.render import Renderer
from providers.inference.harmony.token_cache import TokenCache
from providers.inference.harmony.vocabulary import CHANNEL, MESSAGE, Vocabulary, load_vocabulary

INLINE_CHARS: Final = 20_000
"""Prompts of fewer characters are rendered in the event loop, since they take at most a few milliseconds."""


@dataclass(frozen=True, slots=True)
class HarmonyPrompt:
    """Rendered prompt. `token_ids` end with `<|start|>assistant`. `grammar` constrains the output; None allows
    anything."""

    token_ids: Sequence[int]
    grammar: TurnGrammar | None


class Harmony:
    """Shared state of a provider that uses Harmony. One token cache serves all requests: a conversation is encoded
    once."""

    def __init__(self, vocabulary: Vocabulary, options: HarmonyOptions) -> None:
        self._vocabulary = vocabulary
        self._token_cache = TokenCache()
        self._renderer = Renderer(vocabulary, options, self._token_cache)
        self._grammar_compiler: GrammarCompiler | None = None

    @classmethod
    async def load(cls, options: HarmonyOptions) -> Self:
        """Load the vocabulary. Raises ConfigError with the remedy when it is unavailable."""
        return cls(await asyncio.to_thread(load_vocabulary), options)

    async def prepare_grammar_compiler(self) -> None:
        """Load the compiler that `build_matcher` needs; takes about a second, once."""
        if self._grammar_compiler is None:
            self._grammar_compiler = await asyncio.to_thread(GrammarCompiler, self._vocabulary)

    async def load_partial_tokens(self) -> PartialTokens:
        """Return the index of the tokens that are parts of a character; takes a third of a second."""
        return await asyncio.to_thread(PartialTokens, self._vocabulary)

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of ordinary text, in which control tokens stay text."""
        return self._vocabulary.encode(text)

    async def render_prompt(self, request: ChatRequest) -> HarmonyPrompt:
        """Render the prompt. Raises InvalidRequest or Unsupported naming the field that cannot be rendered or
        enforced."""
        if _estimate_chars(request) < INLINE_CHARS:
            return self._render_prompt(request)
        return await asyncio.to_thread(self._render_prompt, request)

    @cached_property
    def labels(self) -> tuple[Label, ...]:
        """The labels of decisions that are one token each."""
        ids = {text: self.encode_text(text) for text in list_spellings()}
        return find_labels({text: one[0] for text, one in ids.items() if len(one) == 1})

    async def render_decision(self, model: str, messages: Sequence[Message]) -> list[int]:
        """Return the prompt of one question, up to where the text of the final answer begins: the model does not
        reason."""
        prompt = await self.render_prompt(build_chat(model, messages, reasoning_effort="low"))
        return [*prompt.token_ids, CHANNEL, *self.encode_text("final"), MESSAGE]

    async def build_matcher(self, grammar: TurnGrammar, tenant: str) -> GrammarMatcher:
        """Return a matcher at the start of a turn. A new grammar is compiled at the tenant's turn. Raises
        InvalidRequest naming the field that cannot be compiled."""
        compiler = self._grammar_compiler
        assert compiler is not None  # `prepare_grammar_compiler` comes first
        matcher = await asyncio.to_thread(compiler.find_matcher, grammar)
        return matcher or await run_in_turn(lambda: compiler.build_matcher(grammar), tenant)

    def build_reader(self, request: ChatRequest) -> HarmonyReader:
        """Return a reader for one response to the request."""
        return HarmonyReader(self._vocabulary, request, self._token_cache)

    def build_token_logprob(self, token: int, logprob: float, top: Sequence[tuple[int, float]] = ()) -> TokenLogprob:
        """Return a token and its likeliest alternatives as the API's log probabilities."""
        text, data = self._decode_token(token)
        alternatives = [TopLogprob(*self._build_alternative(other, value)) for other, value in top]
        return TokenLogprob(text, logprob, list(data), alternatives)

    def _build_alternative(self, token: int, logprob: float) -> tuple[str, float, list[int]]:
        text, data = self._decode_token(token)
        return text, logprob, list(data)

    def _decode_token(self, token: int) -> tuple[str, bytes]:
        data = self._vocabulary.decode_bytes(token)
        return data.decode("utf-8", "replace"), data

    def _render_prompt(self, request: ChatRequest) -> HarmonyPrompt:
        grammar = request_to_grammar(request)
        return HarmonyPrompt(self._renderer.render(request), grammar)


def _estimate_chars(request: ChatRequest) -> int:
    """Return the approximate length of the prompt and its grammar, enough to separate long requests from short ones."""
    count = 200 * len(request.messages) + 2_000 * len(request.tools or ())
    count += sum(map(_estimate_tool_chars, request.tools or ()))
    if isinstance(request.response_format, ChatJsonSchemaFormat):
        count += _estimate_json_chars(request.response_format.json_schema.schema_)
    for message in request.messages:
        count += len(message.reasoning or "") + sum(map(_count_call_chars, message.tool_calls or ()))
        content = message.content
        if isinstance(content, str):
            count += len(content)
        else:
            count += sum(len(part.text) for part in content or () if part.type == "text")
    return count


def _count_call_chars(call: ChatToolCall) -> int:
    return len(call.custom.input if isinstance(call, CustomCall) else call.function.arguments)


def _estimate_tool_chars(tool: ChatTool) -> int:
    match tool:
        case ChatFunctionTool(function=function):
            return len(function.description or "") + _estimate_json_chars(function.parameters)
        case ChatCustomTool(custom=custom):
            form = custom.format
            is_grammar = isinstance(form, ChatGrammarFormat)
            return len(custom.description or "") + (len(form.grammar.definition) if is_grammar else 0)
        case NativeTool():
            return 0


def _estimate_json_chars(schema: Mapping[str, JsonValue] | None) -> int:
    """Return the approximate length of a schema's text, or INLINE_CHARS for a longer one."""
    count = 0
    waiting: list[JsonValue | Mapping[str, JsonValue]] = [schema]
    while waiting and count < INLINE_CHARS:
        value = waiting.pop()
        count += len(value) if isinstance(value, str) else 4
        if isinstance(value, Mapping):
            count += sum(map(len, value))
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return count
