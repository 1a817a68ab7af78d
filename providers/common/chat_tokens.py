"""The length of chats in tokens: counted where the engine counts, else estimated from their measure and last usage."""

import logging
from typing import Final

from apis.chat import ChatRequest, Message, RefusalPart, TextPart
from apis.deltas import Usage
from apis.errors import CountingUnsupported, UpstreamError
from apis.inference import Inference
from apis.responses import InputTokenCount
from providers.common.recent import RecentEntries

_log = logging.getLogger(__name__)

_BYTES_PER_TOKEN: Final = 4
"""Bytes of UTF-8 for each token, before any usage of a model is known: about right for English and for code."""
_TOKENS_PER_MESSAGE: Final = 4
_TOKENS_PER_FILE: Final = 1000
"""Tokens of a picture or a file, whose bytes say little about them."""
_RATIO_BOUNDS: Final = (0.25, 4.0)
"""Least and greatest correction by a usage; beyond them an upstream counts something else."""
_MAX_MODELS: Final = 256
_MAX_TENANTS: Final = 1024


def measure_chat(chat: ChatRequest) -> int:
    """Return about how many tokens the chat's messages and tools have, by their bytes; at least 1."""
    size_bytes = sum(len(tool.model_dump_json(exclude_none=True)) for tool in chat.tools or ())
    tokens = _TOKENS_PER_MESSAGE * len(chat.messages)
    for message in chat.messages:
        content = message.content
        if isinstance(content, str) and not (message.tool_calls or message.reasoning or message.refusal):
            size_bytes += len(content) if content.isascii() else _size_bytes(content)  # nearly every message
            continue
        text_bytes, file_count = _measure_message(message)
        size_bytes += text_bytes
        tokens += _TOKENS_PER_FILE * file_count
    return max(1, tokens + size_bytes // _BYTES_PER_TOKEN)


def _measure_message(message: Message) -> tuple[int, int]:
    """Return the bytes of the message's texts and the number of its pictures and files."""
    content = message.content
    texts, file_count = [message.reasoning, message.refusal], 0
    if isinstance(content, str):
        texts.append(content)
    else:
        for part in content or ():
            match part:
                case TextPart(text=text) | RefusalPart(refusal=text):
                    texts.append(text)
                case _:
                    file_count += 1
    for call in message.tool_calls or ():
        texts += (
            (call.function.name, call.function.arguments)
            if call.type == "function"
            else (call.custom.name, call.custom.input)
        )
    return sum(_size_bytes(text) for text in texts if text), file_count


def _size_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


class TokenCounters:
    """The counters of the tenants, which learn apart from each other: prompts of one do not change the estimates of
    another. The tenant that asked the longest time ago is forgotten first."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference
        self._by_tenant = RecentEntries[str, TokenCounter](_MAX_TENANTS)

    def of_tenant(self, tenant: str) -> "TokenCounter":
        """Return the counter of a tenant."""
        counter = self._by_tenant.find(tenant)
        if counter is None:
            counter = self._by_tenant[tenant] = TokenCounter(self._inference)
        return counter


class TokenCounter:
    """Counts the tokens of chats of one tenant with the models of one Inference. For models whose server does not
    count, it learns from the usage of each turn how many tokens its own measure of a prompt stands for."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference
        self._ratios = RecentEntries[str, float](_MAX_MODELS)
        self._exact_models: set[str] = set()

    async def count(self, chat: ChatRequest) -> InputTokenCount:
        """Return the length of the prompt; an estimate where the server cannot count or does not answer. Raises the
        errors of `Inference.count_tokens` for a chat that the model cannot be sent."""
        try:
            tokens = await self._inference.count_tokens(chat)
        except (CountingUnsupported, UpstreamError) as exc:
            self._exact_models.discard(chat.model)
            estimate = self.estimate(chat)
            _log.info("%d tokens of a prompt for %s are an estimate: %s", estimate, chat.model, exc.message)
            return InputTokenCount(estimate, is_estimate=True)
        if len(self._exact_models) < _MAX_MODELS:
            self._exact_models.add(chat.model)
        return InputTokenCount(tokens)

    def record_usage(self, chat: ChatRequest, usage: Usage) -> None:
        """Learn from a turn's usage. An upstream without usage, which reports no input, teaches nothing."""
        if usage.input_tokens <= 0 or chat.model in self._exact_models:
            return
        least, greatest = _RATIO_BOUNDS
        self._ratios[chat.model] = min(greatest, max(least, usage.input_tokens / measure_chat(chat)))

    def estimate(self, chat: ChatRequest) -> int:
        """Return the measure of the prompt, corrected by the last usage of its model."""
        return max(1, round(measure_chat(chat) * self._ratios.get(chat.model, 1.0)))
