"""Harmony over vLLM's /completions: the prompt is rendered here and sent as token ids; the response is token ids
too."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Self

from apis.chat import ChatRequest, refuse_engine_options, share_of_salt
from apis.errors import Unsupported
from providers.inference.chat_completions.body import body_to_json
from providers.inference.chat_completions.chunk_reader import ChunkReader
from providers.inference.decisions.labels import Label
from providers.inference.harmony.chunks import EnforcedGrammar, HarmonyChunkReader, VLLMChunkDecoder
from providers.inference.harmony.grammar import TurnGrammar
from providers.inference.harmony.harmony import Harmony, HarmonyPrompt
from providers.inference.harmony.options import HarmonyOptions
from providers.inference.harmony.vocabulary import NATIVE_TOOLS, STOP_IDS

SUPPORTED_OPTIONS: Final = ("min_tokens", "bad_words", "allowed_token_ids", "length_penalty", "vllm_xargs")
"""Engine options that make sense for a prompt that is rendered here and output that is read as tokens."""
COMPLETION_FIELDS: Final = (
    *("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "logit_bias"),
    *("top_k", "min_p", "repetition_penalty", "cache_salt", "priority"),
    *SUPPORTED_OPTIONS,
)
DEFAULT_CONTEXT_TOKENS: Final = 131_072
"""Context length of gpt-oss, used for a model whose server does not list it."""


class HarmonyTemplate:
    """Template that renders the prompt here. Without `grammars` the server enforces nothing, and a request that needs
    it is Unsupported. `extra_body` is merged over every body."""

    native_tools: Final = NATIVE_TOOLS

    def __init__(self, harmony: Harmony, *, grammars: bool, extra_body: Mapping[str, Any]) -> None:
        self._harmony = harmony
        self._enforces_grammars = grammars
        self._extra_body = extra_body

    @classmethod
    async def load(cls, options: HarmonyOptions, *, grammars: bool, extra_body: Mapping[str, Any]) -> Self:
        """Load the vocabulary. Raises ConfigError with the remedy when it is unavailable."""
        return cls(await Harmony.load(options), grammars=grammars, extra_body=extra_body)

    async def build_request(
        self, request: ChatRequest, context_tokens: Callable[[], Awaitable[int | None]]
    ) -> tuple[str, bytes, ChunkReader]:
        """See `PromptTemplate.build_request`."""
        refuse_engine_options(request, SUPPORTED_OPTIONS)
        prompt, enforced = await self._render_prompt(request), None
        if prompt.grammar is not None:
            # Compiled here too, so that errors name the request's field and output that violates the grammar is
            # detected.
            await self._harmony.prepare_grammar_compiler()
            matcher = await self._harmony.build_matcher(prompt.grammar, share_of_salt(request.cache_salt))
            enforced = EnforcedGrammar(grammar_param(request, prompt.grammar), matcher.accept)
        context = await context_tokens() or DEFAULT_CONTEXT_TOKENS
        body = {**_build_body(request, prompt, context), **self._extra_body}
        chunks = HarmonyChunkReader(
            self._harmony,
            request,
            VLLMChunkDecoder(self._harmony, request.top_logprobs or 0),
            prompt_tokens=len(prompt.token_ids),
            max_tokens=min(request.max_completion_tokens or context, context),
            enforced_grammar=enforced,
        )
        return "/completions", body_to_json(body), chunks

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return the length of the rendered prompt."""
        return len((await self._render_prompt(request)).token_ids)

    @property
    def labels(self) -> Sequence[Label]:
        """The labels of decisions that are one token each."""
        return self._harmony.labels

    async def render_decision(self, request: ChatRequest) -> list[int]:
        """Return the prompt of one question, up to where the text of the final answer begins."""
        return await self._harmony.render_decision(request.model, request.messages)

    async def _render_prompt(self, request: ChatRequest) -> HarmonyPrompt:
        if self._enforces_grammars:
            return await self._harmony.render_prompt(request)
        if request.tool_choice == "none":
            # A model that cannot be kept from calling does not see the tools.
            request = request.model_copy(update={"tools": None, "tool_choice": None})
        prompt = await self._harmony.render_prompt(request)
        if prompt.grammar is not None:
            param = grammar_param(request, prompt.grammar)
            message = f"'{param}' is not supported by this model's server, which was not started to enforce grammars."
            raise Unsupported(message, param=param)
        return prompt


def grammar_param(request: ChatRequest, grammar: TurnGrammar) -> str:
    """Return the request field that requires the grammar."""
    if grammar.parts:
        return grammar.parts[0].param
    form = request.response_format
    return "text.format" if form is not None and form.type != "text" else "tool_choice"


def _build_body(request: ChatRequest, prompt: HarmonyPrompt, context_tokens: int) -> dict[str, Any]:
    body = {name: value for name in COMPLETION_FIELDS if (value := getattr(request, name)) is not None}
    body |= {"model": request.model, "prompt": prompt.token_ids, "return_token_ids": True, "skip_special_tokens": False}
    body["stop_token_ids"] = [*STOP_IDS, *(request.stop_token_ids or ())]
    # vLLM stops at the end of the context by itself, but refuses a limit beyond it, and its default limit is 16.
    body["max_tokens"] = min(request.max_completion_tokens or context_tokens, context_tokens)
    if request.logprobs:
        body |= {"logprobs": request.top_logprobs or 0, "return_tokens_as_token_ids": True}
    if prompt.grammar is not None:
        body["structured_outputs"] = {"grammar": prompt.grammar.text}
    return {**body, "stream": True, "stream_options": {"include_usage": True}}
