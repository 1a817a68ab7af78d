"""How a model is used: the prompts that it is sent and the reading of its output.

There is one for gpt-oss (Harmony, in tokens), one for embedding models, and one for every other model (its own chat
template).
"""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from apis.chat import ChatJsonSchemaFormat, ChatRequest, refuse_engine_options, share_of_salt
from apis.completion import CompletionBatch, CompletionRequest
from apis.decisions import DecisionRequest, Decisions
from apis.deltas import Delta
from apis.errors import Unsupported
from apis.inference import ALL_CONSTRAINTS, Modality, Model
from apis.sink import Sink, put_all
from apis.wire.base import Effort
from apis.wire.text_format import JsonObjectFormat
from providers.inference.decisions.labels import FEW_LABELS, Label, find_labels, list_spellings, require_labels
from providers.inference.decisions.prompts import build_chat, refuse_images
from providers.inference.decisions.rows import DecisionRow, LabelScores, decide_by_labels
from providers.inference.harmony.options import HarmonyOptions
from providers.inference.llama_cpp.client import Constraint, EngineClient, schema_to_constraint
from providers.inference.llama_cpp.label_scores import ScoredToken, read_scored_chat, score_labels
from providers.inference.llama_cpp.prompts import (
    add_verbosity,
    build_answer_messages,
    build_decision_messages,
    check_input_parts,
)
from providers.inference.llama_cpp.tools import ToolTurn, request_to_choices, tool_to_constraint

MAX_LIMIT: Final = 2**31 - 1
"""The largest number of tokens that the engine reads as a limit."""


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """Settings of a model. `slots` requests run at once, each in `context_tokens`; `max_output_tokens` limits
    requests without a limit. `shares_cache`: the engine stores caches that leave their slots, and moves them between
    slots. `takes_images`: a projector is loaded. `drafts`: the engine speculates. `harmony` is for gpt-oss."""

    slots: int
    context_tokens: int
    max_output_tokens: int
    shares_cache: bool
    takes_images: bool
    drafts: bool
    harmony: HarmonyOptions


def check_common(request: ChatRequest, settings: GenerationSettings) -> None:
    """Raise Unsupported naming a field that no chat on this engine can have."""
    if request.stop_token_ids:
        raise Unsupported("'stop_token_ids' is not supported by the local engine.", param="stop_token_ids")
    if request.logprobs and settings.drafts:
        raise Unsupported(
            "Log probabilities are not supported while draft_model is set: the local engine (llama.cpp) has none of "
            "tokens that were drafted.",
            param="logprobs",
        )


ClientLender = Callable[[], AbstractAsyncContextManager[EngineClient]]
"""Loads the model if need be, and lends a client of its engine."""


class Generation(Protocol):
    """Use of one model, loaded or not. `client` is that of the engine as it runs now."""

    def describe(self, model: Model) -> Model:
        """Return the model with what this use of it can do."""
        ...

    def check(self, request: ChatRequest) -> None:
        """Raise Unsupported or InvalidRequest naming a field that the model cannot honour."""
        ...

    async def generate(self, client: EngineClient, request: ChatRequest, sink: Sink[Delta]) -> None:
        """See `Inference.stream`; `check` has passed."""
        ...

    def check_completion(self, request: CompletionRequest) -> None:
        """Raise Unsupported naming a field of a text completion that the model cannot honour."""
        ...

    def complete(self, client: EngineClient, request: CompletionRequest) -> AsyncGenerator[CompletionBatch]:
        """See `Inference.complete`; `check_completion` has passed."""
        ...

    def check_decision(self, request: DecisionRequest) -> None:
        """Raise Unsupported naming what the model cannot decide."""
        ...

    async def decide(self, client: EngineClient, request: DecisionRequest) -> Decisions:
        """See `Inference.decide`; `check_decision` has passed."""
        ...

    async def count_tokens(self, lend_client: ClientLender, request: ChatRequest) -> int:
        """See `Inference.count_tokens`; `check` has passed. The model is loaded only if the engine must count."""
        ...

    def used_effort(self, request: ChatRequest) -> Effort | None:
        """See `Inference.used_effort`."""
        ...


class TemplateGeneration:
    """Chat with the model's own template. Tools work with any model: it first decides, then fills in the input that
    the tool's schema allows."""

    def __init__(self, settings: GenerationSettings) -> None:
        self._settings = settings
        self._labels: Sequence[Label] = ()

    def describe(self, model: Model) -> Model:
        """See `Generation.describe`."""
        modalities = frozenset[Modality]({"image"} if self._settings.takes_images else ())
        return replace(model, modalities=modalities, enforces=ALL_CONSTRAINTS, shows_all_reasoning=False)

    def check(self, request: ChatRequest) -> None:
        """See `Generation.check`."""
        check_common(request, self._settings)
        refuse_engine_options(request, ("chat_template_kwargs",))
        check_input_parts(request.messages, takes_images=self._settings.takes_images)

    def used_effort(self, request: ChatRequest) -> Effort | None:
        """Return None: the model's template decides."""
        return None

    async def generate(self, client: EngineClient, request: ChatRequest, sink: Sink[Delta]) -> None:
        """See `Generation.generate`. With tools there is at most one call per turn, and the usage includes the
        decision."""
        request = add_verbosity(request)
        choices = request_to_choices(request)
        named = {tool: f"tools[{index}]" for index, tool in enumerate(tool.name for tool in request.tools or ())}
        constraints = {tool.name: tool_to_constraint(tool, named[tool.name]) for tool in choices.tools}
        answer_constraint = _build_answer_constraint(request)
        constraints, answer_constraint = await _enforce(client, constraints, answer_constraint, request)
        bound = min(request.max_completion_tokens or self._settings.max_output_tokens, MAX_LIMIT)
        request = request.model_copy(update={"max_completion_tokens": bound})
        if choices.tools:
            await put_all(ToolTurn(client, request, choices, constraints).generate(answer_constraint), sink)
        else:
            messages = build_answer_messages(request.messages)
            await client.stream(request.model_copy(update={"messages": messages}), sink, answer_constraint)

    def check_completion(self, request: CompletionRequest) -> None:
        """See `Generation.check_completion`."""
        check_completion(request)

    def complete(self, client: EngineClient, request: CompletionRequest) -> AsyncGenerator[CompletionBatch]:
        """See `Generation.complete`."""
        return client.complete(limit_completion(request, self._settings.max_output_tokens))

    def check_decision(self, request: DecisionRequest) -> None:
        """See `Generation.check_decision`."""
        if not self._settings.takes_images:
            refuse_images(request)

    async def decide(self, client: EngineClient, request: DecisionRequest) -> Decisions:
        """See `Generation.decide`. The rows are read one after the other, so that all find the input in one slot."""
        if not self._labels:
            self._labels = find_labels(await client.find_token_ids(list_spellings()))
        labels = self._labels

        async def read(row: DecisionRow) -> LabelScores:
            chat = build_chat(request.model, row.messages)

            async def ask(fields: Mapping[str, Any]) -> ScoredToken:
                return read_scored_chat(await client.score_chat(chat, fields))

            return await score_labels(ask, labels[: row.label_count], measures_mass=row.is_first)

        require_labels(len(labels), request.questions, FEW_LABELS)
        return await decide_by_labels(request, [label.text for label in labels], read)

    async def count_tokens(self, lend_client: ClientLender, request: ChatRequest) -> int:
        """Return the length of the first prompt that the model reads; with tools, the one for the decision."""
        request = add_verbosity(request)
        choices = request_to_choices(request)
        if choices.tools:
            messages = build_decision_messages(request.messages, choices.tools, may_answer=choices.may_answer)
        else:
            messages = build_answer_messages(request.messages)
        async with lend_client() as client:
            return await client.count_tokens(request.model_copy(update={"messages": messages}))


async def _enforce(
    client: EngineClient,
    constraints: Mapping[str, Constraint | None],
    answer_constraint: Constraint | None,
    request: ChatRequest,
) -> tuple[dict[str, Constraint | None], Constraint | None]:
    """Return the constraints of the tools and of the answer as the engine can enforce them."""
    demanded = {id(one): one for one in (*constraints.values(), answer_constraint) if one is not None}
    enforced = await client.check_constraints([*demanded.values()], share_of_salt(request.cache_salt))
    by_id: dict[int, Constraint | None] = dict(zip(demanded, enforced, strict=True))
    return {name: by_id.get(id(one)) for name, one in constraints.items()}, by_id.get(id(answer_constraint))


def _build_answer_constraint(request: ChatRequest) -> Constraint | None:
    match request.response_format:
        case ChatJsonSchemaFormat(json_schema=schema_format):
            return schema_to_constraint(schema_format.schema_, "text.format.schema", strict=bool(schema_format.strict))
        case JsonObjectFormat():
            return schema_to_constraint({"type": "object"}, "text.format", strict=False)
        case _:
            return None


def check_completion(request: CompletionRequest) -> None:
    """Raise Unsupported naming a field that the engine cannot honour. It makes one completion of one prompt; a prompt
    of more than the context is refused by the engine itself."""
    refuse_engine_options(request)
    for name in ("n", "echo", "suffix", "logprobs", "stop_token_ids", "repetition_penalty"):
        if (value := getattr(request, name)) is not None and (name, value) not in (("n", 1), ("echo", False)):
            raise Unsupported(f"'{name}' is not supported by the local engine in text completions.", param=name)
    if request.prompt_count > 1:
        raise Unsupported("The local engine completes one prompt per request.", param="prompt")


def limit_completion(request: CompletionRequest, max_output_tokens: int) -> CompletionRequest:
    """Return the request with a limit of its output, `max_output_tokens` where it has none."""
    bound = max_output_tokens if request.max_tokens is None else request.max_tokens
    return request.model_copy(update={"max_tokens": bound})
