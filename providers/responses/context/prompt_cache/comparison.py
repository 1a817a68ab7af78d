"""Diagnostics of prompt caches: the first difference between a prompt and that of an earlier response."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

from openai.types.responses import Response
from openai.types.responses.response import (
    PromptCacheDiagnostics,
    PromptCacheDiagnosticsCacheHit,
    PromptCacheDiagnosticsCacheMiss,
    PromptCacheDiagnosticsComparisonResponseNotFound,
    PromptCacheDiagnosticsUnavailable,
)

from apis.chat import ChatRequest
from apis.deltas import Usage
from apis.errors import InvalidRequest, NotFound
from apis.responses import CreateResponse
from apis.wire.items import ITEM_LIST_ADAPTER, CompactionItem, Item
from providers.common.chat_tokens import TokenCounter, TokenCounters
from providers.responses.context.conversation import Conversation, stored_item
from providers.responses.context.sealed_content import SealedContent
from providers.responses.events.ids import ResponseIds
from providers.responses.events.response_object import begin_response
from providers.responses.item_index import ItemIndex
from providers.responses.store.history import History

MissReason = Literal[
    "model_changed",
    "prompt_cache_key_changed",
    "tools_changed",
    "text_format_changed",
    "reasoning_effort_changed",
    "verbosity_changed",
    "context_compacted",
    "input_changed",
]
_UNREAD_FIELDS: Final = ("id", "status", "encrypted_content", "annotations", "logprobs", "summary")
"""Fields of items and their parts that no prompt holds, or that differ between an item and its repetition."""
_NO_IDS: Final = ResponseIds("resp_comparison")


@dataclass(frozen=True, slots=True)
class PromptComparison:
    """Result of a comparison before the model is called; with `is_prefix` the engine's usage decides."""

    diagnostics: PromptCacheDiagnostics
    is_prefix: bool = False

    def with_usage(self, usage: Usage) -> PromptCacheDiagnostics:
        """Return the diagnostics of the ended response: a hit where the prompts agree and the engine reports cached
        tokens; where it reports none, nothing here shows why."""
        if self.is_prefix and usage.cached_tokens:
            return PromptCacheDiagnosticsCacheHit(type="cache_hit")
        return self.diagnostics


class PromptComparer:
    """Compares requests with the stored responses that they name in `prompt_cache_options.comparison_response_id`."""

    def __init__(self, history: History, sealed_content: SealedContent, token_counters: TokenCounters) -> None:
        self._history = history
        self._sealed_content = sealed_content
        self._token_counters = token_counters

    async def compare(
        self, request: CreateResponse, compared_id: str, chat: ChatRequest, conversation: Conversation, *, tenant: str
    ) -> PromptComparison:
        """Return the comparison with the response that the request names. Tokens are estimates."""
        try:
            compared = await self._history.load_response(compared_id, tenant=tenant)
        except NotFound:
            kind = "comparison_response_not_found"
            return PromptComparison(PromptCacheDiagnosticsComparisonResponseNotFound(type=kind))
        counter = self._token_counters.of_tenant(tenant)
        reason = _changed_option(begin_response(request, compared.id, created_at=0), compared)
        if reason is not None:
            return self._miss(reason, chat, 0, counter)
        earlier_items = await self._load_items(request, compared, tenant)
        if earlier_items is None:
            return PromptComparison(PromptCacheDiagnosticsUnavailable(type="unavailable"))
        if not conversation.compactions.keys() <= _compaction_tokens(earlier_items):
            return self._miss("context_compacted", chat, 0, counter)
        if (request.instructions or None) != (compared.instructions or None):
            return self._miss("input_changed", chat, 0, counter)
        common = _count_common(earlier_items, conversation.items)
        if common == len(earlier_items):
            return PromptComparison(PromptCacheDiagnosticsUnavailable(type="unavailable"), is_prefix=True)
        common_messages = conversation.render_items(conversation.items[:common])
        instructions = chat.messages[:1] if request.instructions else []
        prefix = chat.model_copy(update={"messages": [*instructions, *common_messages]})
        return self._miss("input_changed", chat, counter.estimate(prefix), counter)

    async def _load_items(self, request: CreateResponse, compared: Response, tenant: str) -> Sequence[Item] | None:
        """Return the items of the compared prompt; None where a turn of another conversation is compared, whose items
        may have been deleted since."""
        if compared.conversation is not None:
            if compared.conversation.id != request.conversation_id:
                return None
            input_items = await self._history.load_input_items(compared.id, tenant=tenant)
            return ITEM_LIST_ADAPTER.validate_json(bytes(input_items))
        try:
            history = await self._history.load_history(compared.id, tenant=tenant)
        except InvalidRequest:  # too long for this request to load, or deleted meanwhile
            return None
        index = ItemIndex(history.items[: len(history.items) - len(compared.output)])
        await self._sealed_content.unseal_reasoning(index, request.model, tenant)
        return index.items

    def _miss(
        self, reason: MissReason, chat: ChatRequest, reusable_tokens: int, counter: TokenCounter
    ) -> PromptComparison:
        miss = PromptCacheDiagnosticsCacheMiss(
            type="cache_miss",
            reason=reason,
            cache_missed_tokens=max(0, counter.estimate(chat) - reusable_tokens),
            comparison_reusable_tokens=reusable_tokens,
        )
        return PromptComparison(miss)


def _changed_option(current: Response, compared: Response) -> MissReason | None:
    """Return the first option, in the order of a prompt, that differs between two responses."""
    current_text, compared_text = current.text, compared.text
    options: Mapping[MissReason, tuple[Any, Any]] = {
        "model_changed": (current.model, compared.model),
        "prompt_cache_key_changed": (current.prompt_cache_key, compared.prompt_cache_key),
        "tools_changed": (current.tools, compared.tools),
        "text_format_changed": (current_text and current_text.format, compared_text and compared_text.format),
        "reasoning_effort_changed": (
            current.reasoning and current.reasoning.effort,
            compared.reasoning and compared.reasoning.effort,
        ),
        "verbosity_changed": (current_text and current_text.verbosity, compared_text and compared_text.verbosity),
    }
    return next((reason for reason, (one, other) in options.items() if one != other), None)


def _count_common(earlier_items: Sequence[Item], items: Sequence[Item]) -> int:
    """Return how many of the first items are the same for a model."""
    start = 0
    if earlier_items and items and earlier_items[0].id != items[0].id:
        # a turn of a conversation is stored without the items before it
        start = next((at for at, item in enumerate(items) if item.id and item.id == earlier_items[0].id), 0)
    common = 0
    for earlier, item in zip(earlier_items, items[start:], strict=False):
        if _read_fields(earlier) != _read_fields(item):
            break
        common += 1
    return common


def _read_fields(item: Item) -> Any:
    return _without_unread(stored_item(item, _NO_IDS))


def _without_unread(value: Any) -> Any:
    if isinstance(value, dict):
        fields = cast(dict[str, Any], value)
        return {key: _without_unread(each) for key, each in fields.items() if key not in _UNREAD_FIELDS}
    return [_without_unread(each) for each in cast(list[Any], value)] if isinstance(value, list) else value


def _compaction_tokens(items: Sequence[Item]) -> set[str]:
    return {item.encrypted_content for item in items if isinstance(item, CompactionItem) and item.encrypted_content}
