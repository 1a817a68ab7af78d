"""gpt-oss on llama.cpp: prompts are rendered here and sent as token ids, and the output is read as token ids.

llama.cpp's own template for these models loses the difference between text and control tokens, and part of what the
model wrote in earlier turns. Its grammars are llguidance's, as those of the other engines are.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final, Self

from apis.chat import ChatRequest, refuse_engine_options, share_of_salt
from apis.completion import CompletionBatch, CompletionRequest
from apis.decisions import DecisionRequest, Decisions
from apis.deltas import Delta, DeltaBatch, Finish
from apis.errors import ContextLengthExceeded
from apis.inference import ALL_CONSTRAINTS, Model
from apis.sink import ConvertedSink, Sink
from apis.wire.base import Effort
from providers.inference.chat_completions.body import body_to_json
from providers.inference.chat_completions.chunk_reader import ChunkReader
from providers.inference.decisions.labels import FEW_LABELS, require_labels
from providers.inference.decisions.prompts import refuse_images
from providers.inference.decisions.rows import DecisionRow, LabelScores, decide_by_labels
from providers.inference.harmony.chunks import EnforcedGrammar, HarmonyChunkReader
from providers.inference.harmony.completions import grammar_param
from providers.inference.harmony.grammar import TurnGrammar
from providers.inference.harmony.harmony import Harmony, HarmonyPrompt
from providers.inference.harmony.logit_bias import parse_logit_bias
from providers.inference.harmony.partial_tokens import PartialTokens
from providers.inference.harmony.vocabulary import CHANNEL, CONSTRAIN, END, MESSAGE, NATIVE_TOOLS, START
from providers.inference.llama_cpp.client import SEED_RANGE, EngineClient
from providers.inference.llama_cpp.completion_chunks import FINAL_FIELDS, LlamaChunkDecoder
from providers.inference.llama_cpp.generation import (
    ClientLender,
    GenerationSettings,
    check_common,
    check_completion,
    limit_completion,
)
from providers.inference.llama_cpp.label_scores import (
    ScoredToken,
    read_scored_completion,
    score_labels,
)
from providers.inference.llama_cpp.slots import SlotLease, SlotTable

RENDERED_TOKENS: Final = {
    CHANNEL: "<|channel|>",
    CONSTRAIN: "<|constrain|>",
    END: "<|end|>",
    MESSAGE: "<|message|>",
    START: "<|start|>",
}
"""Control tokens that the engine's grammars take for their text, since llama.cpp marks them as part of it (the "quick
hack for gpt-oss" in its llama-vocab.cpp): inside free text and JSON strings they are allowed, and mean that text."""
NOT_ENFORCED_MESSAGE: Final = "The local engine (llama.cpp) could not enforce what this request demands."
DEFAULT_TEMPERATURE: Final = 1.0
DEFAULT_TOP_P: Final = 1.0
"""Sampling of requests without their own, as gpt-oss's authors recommend."""


class HarmonyGeneration:
    """See Generation. Every request runs in a slot that is chosen here, at most `slots` at a time."""

    def __init__(self, harmony: Harmony, partial_tokens: PartialTokens, settings: GenerationSettings) -> None:
        self._harmony = harmony
        self._partial_tokens = partial_tokens
        self._settings = settings
        self._slots = SlotTable(settings.slots, shares_cache=settings.shares_cache)
        (self._user_id,) = harmony.encode_text("user")
        self._texts = {token: harmony.encode_text(text) for token, text in RENDERED_TOKENS.items()}

    @classmethod
    async def load(cls, settings: GenerationSettings) -> Self:
        """Load the vocabulary. Raises ConfigError with the remedy when it is unavailable."""
        harmony = await Harmony.load(settings.harmony)
        return cls(harmony, await harmony.load_partial_tokens(), settings)

    def describe(self, model: Model) -> Model:
        """See `Generation.describe`."""
        return replace(model, modalities=frozenset(), native_tools=NATIVE_TOOLS, enforces=ALL_CONSTRAINTS)

    def check(self, request: ChatRequest) -> None:
        """See `Generation.check`."""
        check_common(request, self._settings)
        refuse_engine_options(request)
        parse_logit_bias(request.logit_bias or {})

    def used_effort(self, request: ChatRequest) -> Effort | None:
        """Return the effort of the system message."""
        return self._settings.harmony.used_effort(request.reasoning_effort)

    async def count_tokens(self, lend_client: ClientLender, request: ChatRequest) -> int:
        """Return the length of the rendered prompt, for which no engine is needed."""
        return len((await self._harmony.render_prompt(request)).token_ids)

    async def generate(self, client: EngineClient, request: ChatRequest, sink: Sink[Delta]) -> None:
        """See `Generation.generate`. A grammar enforces `tool_choice`, `strict` functions and the text format during
        generation."""
        prompt = await self._harmony.render_prompt(request)
        if len(prompt.token_ids) >= self._settings.context_tokens:
            raise ContextLengthExceeded(
                f"The prompt has {len(prompt.token_ids)} tokens, and the context of this model holds"
                f" {self._settings.context_tokens}."
            )
        enforced = None if prompt.grammar is None else await self._build_enforced_grammar(request, prompt.grammar)
        lease = self._slots.lease(prompt.token_ids, self._count_turn_tokens(prompt.token_ids), request.cache_salt)
        output_tokens = self._settings.context_tokens

        def count_output(batch: DeltaBatch) -> DeltaBatch:
            nonlocal output_tokens
            if isinstance(finish := batch[-1], Finish):
                output_tokens = finish.usage.output_tokens
            return batch

        try:
            template = _CompletionTemplate(
                self._build_body(request, prompt, lease), self._build_reader(prompt, enforced)
            )
            await client.stream_with_template(request, template, ConvertedSink(sink, count_output))
        finally:
            self._slots.release(lease, output_tokens)

    def check_decision(self, request: DecisionRequest) -> None:
        """See `Generation.check_decision`."""
        refuse_images(request)
        require_labels(len(self._harmony.labels), request.questions, FEW_LABELS)

    async def decide(self, client: EngineClient, request: DecisionRequest) -> Decisions:
        """See `Generation.decide`. All rows are read in one slot."""
        labels, lease = self._harmony.labels, self._slots.lease((), 0, request.cache_salt)
        may_reuse = lease.may_reuse

        async def read(row: DecisionRow) -> LabelScores:
            ids = await self._harmony.render_decision(request.model, row.messages)

            async def ask(fields: Mapping[str, Any]) -> ScoredToken:
                nonlocal may_reuse
                own = {"id_slot": lease.number, "cache_prompt": may_reuse}
                scored = read_scored_completion(await client.score_tokens(ids, {**fields, **own}))
                may_reuse = True  # from now on the slot has a prompt of this decision
                return scored

            return await score_labels(ask, labels[: row.label_count], measures_mass=row.is_first)

        try:
            return await decide_by_labels(request, [label.text for label in labels], read, is_joined=False)
        finally:
            self._slots.release(lease, self._settings.context_tokens)

    def check_completion(self, request: CompletionRequest) -> None:
        """See `Generation.check_completion`."""
        check_completion(request)

    async def complete(self, client: EngineClient, request: CompletionRequest) -> AsyncGenerator[CompletionBatch]:
        """See `Generation.complete`. The slot's cache serves no later conversation."""
        request = limit_completion(request, self._settings.max_output_tokens)
        lease = self._slots.lease((), 0, request.cache_salt)
        try:
            batches = client.complete(request, id_slot=lease.number, cache_prompt=lease.may_reuse)
            async with aclosing(batches):
                async for batch in batches:
                    yield batch
        finally:
            self._slots.release(lease, self._settings.context_tokens)

    def _count_turn_tokens(self, ids: Sequence[int]) -> int:
        """Return the number of tokens up to the last user message and with its text: later turns have them too,
        whereas reasoning after it may be dropped."""
        starts = (at for at in range(len(ids) - 2, -1, -1) if ids[at] == START and ids[at + 1] == self._user_id)
        start = next(starts, None)
        if start is None:
            return len(ids)
        return next((at for at in range(start, len(ids)) if ids[at] == END), len(ids))

    def _build_reader(
        self, prompt: HarmonyPrompt, enforced: EnforcedGrammar | None
    ) -> Callable[[ChatRequest], ChunkReader]:
        def build(request: ChatRequest) -> ChunkReader:
            return HarmonyChunkReader(
                self._harmony,
                request,
                LlamaChunkDecoder(self._harmony, self._partial_tokens, request.top_logprobs or 0),
                prompt_tokens=len(prompt.token_ids),
                max_tokens=self._limit_tokens(request),
                enforced_grammar=enforced,
            )

        return build

    async def _build_enforced_grammar(self, request: ChatRequest, grammar: TurnGrammar) -> EnforcedGrammar:
        """Compile the grammar here too, so that errors name the request's field and every token is checked: the engine
        ignores a grammar that it cannot compile or continue."""
        await self._harmony.prepare_grammar_compiler()
        matcher = await self._harmony.build_matcher(grammar, share_of_salt(request.cache_salt))
        return EnforcedGrammar(grammar_param(request, grammar), matcher.accept, self._texts, NOT_ENFORCED_MESSAGE)

    def _limit_tokens(self, request: ChatRequest) -> int:
        return min(request.max_completion_tokens or self._settings.max_output_tokens, self._settings.context_tokens)

    def _build_body(self, request: ChatRequest, prompt: HarmonyPrompt, lease: SlotLease) -> bytes:
        """Build the body of /completion. Every sampling field is sent, because the engine's defaults are not those of
        gpt-oss's authors."""
        settings = self._settings
        body: dict[str, Any] = {
            "prompt": prompt.token_ids,
            "stream": True,
            "return_tokens": True,
            "return_progress": True,
            "response_fields": FINAL_FIELDS,
            "n_predict": self._limit_tokens(request),
            "id_slot": lease.number,
            "cache_prompt": lease.may_reuse,
            "n_probs": max(request.top_logprobs or 0, 1) if request.logprobs else 0,
        }
        body |= _build_sampling(request, settings.context_tokens)
        if request.seed is not None:
            body["seed"] = request.seed % SEED_RANGE
        if request.logit_bias:
            body["logit_bias"] = request.logit_bias
        if prompt.grammar is not None:
            body["grammar"] = prompt.grammar.unforced_text
        return body_to_json(body)


def _build_sampling(request: ChatRequest, context_tokens: int) -> dict[str, Any]:
    """Build the sampling fields, with the samplers that have something to do. Their order is that of the other engines
    here, in which the temperature comes before the cuts; without one, no cut can change the likeliest token."""
    temperature = DEFAULT_TEMPERATURE if request.temperature is None else request.temperature
    top_p = DEFAULT_TOP_P if request.top_p is None else request.top_p
    sampling: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "min_p": request.min_p or 0.0}
    sampling |= {"top_k": max(request.top_k or 0, 0), "repeat_last_n": context_tokens}
    sampling["presence_penalty"] = request.presence_penalty or 0.0
    sampling["frequency_penalty"] = request.frequency_penalty or 0.0
    sampling["repeat_penalty"] = request.repetition_penalty or 1.0
    penalties = (sampling["presence_penalty"], sampling["frequency_penalty"], sampling["repeat_penalty"] - 1)
    active = {"penalties": any(penalties), "temperature": True}
    if temperature > 0:
        active |= {"top_k": sampling["top_k"] > 0, "top_p": top_p < 1, "min_p": sampling["min_p"] > 0}
    return {**sampling, "samplers": [name for name, is_active in active.items() if is_active]}


class _CompletionTemplate:
    """Request that is already rendered; see PromptTemplate."""

    def __init__(self, body: bytes, build_reader: Callable[[ChatRequest], ChunkReader]) -> None:
        self._body = body
        self._build_reader = build_reader

    async def build_request(
        self, request: ChatRequest, context_tokens: Callable[[], Awaitable[int | None]]
    ) -> tuple[str, bytes, ChunkReader]:
        """See `PromptTemplate.build_request`."""
        return "/completion", self._body, self._build_reader(request)
