"""ChatSummary: the summary of a chat by its model, which a compaction puts in the place of the chat."""

import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Final

from apis.chat import ChatRequest, Message
from apis.deltas import DeltaBatch, Finish, TextDelta, Usage, estimate_tokens, measure_deltas
from apis.errors import ContextLengthExceeded, UpstreamError
from apis.inference import Inference
from providers.common.chat_tokens import measure_chat

_log = logging.getLogger(__name__)
_COPIED_FIELDS: Final = (
    *("model", "reasoning_effort", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("prompt_cache_key", "cache_root", "cache_salt", "priority"),
)
_MAX_SUMMARY_TOKENS: Final = 8192
"""Longest summary in tokens, reasoning included; the model's context may allow less."""
_PROMPT: Final = """\
Stop here and sum up the conversation above, for a model that will go on with it and sees your summary in its place.

Write down all it needs to go on as if it had seen everything: what the user wants, and every wish, limit and decision \
that still holds; what has been found out, with exact names, numbers, dates, paths, links, ids and pieces of code or \
text that will be needed again; what has been done, tools that were called and what they gave included; what is not \
done yet, and what comes next. Keep what an earlier summary says, unless it is out of date.

Do not answer the user, do not call tools and do nothing else that the conversation asks for. Write the summary and \
nothing else, in the conversation's own language, with at most {words} words."""


class ChatSummary:
    """Summary of a chat by its model. `text` and `usage` are complete when `generate` has ended."""

    def __init__(self) -> None:
        self.text = ""
        self.usage = Usage()
        self._prompt: ChatRequest | None = None
        self._delta_count = self._chars = 0

    def estimate_usage(self) -> Usage:
        """Return the usage: an estimate, where the model has begun and not ended."""
        if self._prompt is None or self.usage.output_tokens or not self._delta_count:
            return self.usage
        return Usage(measure_chat(self._prompt), estimate_tokens(self._delta_count, self._chars))

    async def generate(
        self,
        inference: Inference,
        chat: ChatRequest,
        max_words: int,
        on_begin: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Have the model write the summary; `on_begin` is called when the model begins. Raises like `Inference.chat`,
        and UpstreamError for an empty summary."""
        fields = {name: value for name in _COPIED_FIELDS if (value := getattr(chat, name)) is not None}
        prompt = Message(role="user", content=_PROMPT.format(words=max_words))
        request = ChatRequest.model_validate({**fields, "messages": [*chat.messages, prompt]})
        begun = False
        self._prompt = request
        # without a bound, the model's own context is the bound: it may have less room than the first one
        for bound in (_MAX_SUMMARY_TOKENS, None):
            bounded = request.model_copy(update={"max_completion_tokens": bound})
            try:
                async with aclosing(inference.chat(bounded)) as batches:
                    async for deltas in batches:
                        if not begun:
                            begun = True
                            if on_begin is not None:
                                await on_begin()
                        self._apply_deltas(deltas)
                break
            except ContextLengthExceeded:
                if begun or bound is None:
                    raise
        self.text = self.text.strip()
        if not self.text:
            raise UpstreamError("The model gave no summary of the conversation.")

    def _apply_deltas(self, deltas: DeltaBatch) -> None:
        count, chars = measure_deltas(deltas)
        self._delta_count += count
        self._chars += chars
        for delta in deltas:
            if isinstance(delta, TextDelta):
                self.text += delta.text
            elif isinstance(delta, Finish):
                self.usage = delta.usage
                if delta.reason == "length":
                    _log.warning("a summary of a conversation was cut at its limit")
