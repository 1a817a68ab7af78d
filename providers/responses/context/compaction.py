"""Compaction: the model itself sums a conversation up, and one sealed item stands for it from then on."""

import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from openai.types.responses import ResponseCompactionCompactingEvent, ResponseCompactionItem, ResponseStreamEvent
from openai.types.responses.response import InputTransformation

from apis.chat import ChatRequest, Message
from apis.deltas import Finish, Step, Text, Usage
from apis.errors import ContextLengthExceeded, InvalidRequest, UpstreamError
from apis.inference import Inference
from apis.responses import CompactedConversation, ContextManagement, CreateResponse
from apis.wire.items import CompactionItem, GivenMessage
from providers.responses.context.conversation import Conversation, kept_item
from providers.responses.context.sealed_reasoning import KeptReasoning
from providers.responses.context.sealing import CannotOpen
from providers.responses.context.truncation import fitting
from providers.responses.context.url_files import as_given
from providers.responses.context.window import Compacted
from providers.responses.events.ids import Ids
from providers.responses.events.open_items import item_added, item_done
from providers.responses.events.output import Output
from providers.responses.events.response_object import usage_to_wire
from providers.responses.store.history import ITEMS, items_to_json

_log = logging.getLogger(__name__)

Events = Sequence[ResponseStreamEvent]
Seal = Callable[[str], str]
_ANY_MODEL: Final = ""
"""A summary is plain text, which one model may write and another go on from."""
_SAME: Final = (
    *("model", "reasoning_effort", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("prompt_cache_key", "cache_salt", "priority"),
)
_WORDS: Final = 1500
_MAX_TOKENS: Final = 8192
"""Of a summary, its reasoning included; fewer where the model's context ends before."""
_PROMPT: Final = """\
Stop here and sum up the conversation above, for a model that will go on with it and sees your summary in its place.

Write down all it needs to go on as if it had seen everything: what the user wants, and every wish, limit and decision \
that still holds; what has been found out, with exact names, numbers, dates, paths, links, ids and pieces of code or \
text that will be needed again; what has been done, tools that were called and what they gave included; what is not \
done yet, and what comes next. Keep what an earlier summary says, unless it is out of date.

Do not answer the user, do not call tools and do nothing else that the conversation asks for. Write the summary and \
nothing else, in the conversation's own language, with at most {words} words."""


class Compactions:
    """Over one Inference; `keys` seal the items."""

    def __init__(self, inference: Inference, keys: KeptReasoning) -> None:
        self._inference = inference
        self._keys = keys

    async def open(self, conversation: Conversation, tenant: str) -> Sequence[InputTransformation]:
        """Let the conversation begin with its newest compaction that can be opened; returns those that cannot, which
        no model is shown."""
        sealed = [item for item in conversation.items if isinstance(item, CompactionItem) and item.encrypted_content]
        sealer = await self._keys.sealer()
        removed: list[InputTransformation] = []
        for item in reversed(sealed):
            try:
                text = sealer.open(item.encrypted_content, tenant=tenant, model=_ANY_MODEL)
            except CannotOpen as exc:
                # the API's only word for what is sealed; the id says what it was
                kind = "reasoning"
                removed.append(InputTransformation(id=item.id or "", action="removed", reason=exc.reason, type=kind))
            else:
                conversation.compacted[item.encrypted_content] = Compacted.model_validate_json(text)
                break
        return removed

    async def during(
        self,
        managed: ContextManagement,
        request: CreateResponse,
        conversation: Conversation,
        output: Output,
        tenant: str,
    ) -> "Compacting":
        """What compacts while the request's response is made. Raises InvalidRequest where it is not said when, and
        nobody knows the model's context."""
        threshold = managed.compact_threshold or await self._usual_threshold(request.model)
        inference = fitting(self._inference, request)
        return Compacting(inference, conversation, output, threshold, await self._sealing(tenant))

    async def instead(
        self, request: CreateResponse, conversation: Conversation, output: Output, tenant: str
    ) -> "Compacting":
        """What compacts the conversation instead of an answer."""
        return Compacting(fitting(self._inference, request), conversation, output, None, await self._sealing(tenant))

    async def compact(
        self, chat: ChatRequest, conversation: Conversation, ids: Ids, tenant: str
    ) -> CompactedConversation:
        """What the user said as it is, and one item for all the rest of the chat, which is the conversation's. Raises
        as `Inference.chat` does."""
        summary = _Summary()
        async with aclosing(summary.write(self._inference, chat, _WORDS)) as writing:
            async for _ in writing:
                pass
        users = [item for item in conversation.window().said_items() if item.role == "user"]
        token = (await self._sealing(tenant))(_to_json(_beside(users, conversation, summary.text)))
        output = [as_given(kept_item(item, ids)) for item in users]
        output.append({"id": ids.item("cmp"), "type": "compaction", "encrypted_content": token})
        usage = usage_to_wire(summary.usage)
        return CompactedConversation(id=ids.response, created_at=int(time.time()), output=output, usage=usage)

    async def _usual_threshold(self, model: str) -> int:
        context = next((each.context_tokens for each in await self._inference.models() if each.id == model), None)
        if context is None:
            raise InvalidRequest(
                "Give a 'compact_threshold': how much fits into this model's context is not known.",
                param="context_management[0].compact_threshold",
                code="missing_required_parameter",
            )
        return max(1, context * 4 // 5)

    async def _sealing(self, tenant: str) -> Seal:
        sealer = await self._keys.sealer()
        return lambda text: sealer.seal(text, tenant=tenant, model=_ANY_MODEL)


@dataclass(slots=True)
class _Open:
    """A compaction item that is not done."""

    id: str
    index: int

    def item(self, token: str = "") -> ResponseCompactionItem:
        return ResponseCompactionItem(id=self.id, type="compaction", encrypted_content=token)


class Compacting:
    """Compacts the conversation of a response that is being made, whenever its chat is longer than `threshold`
    tokens; without one, at once and as all that the response is: what was said then stays beside it. `spent` is what
    the last `run` took; None where it had nothing to do."""

    def __init__(
        self, inference: Inference, conversation: Conversation, output: Output, threshold: int | None, seal: Seal
    ) -> None:
        self.spent: Usage | None = None
        self._inference = inference
        self._conversation = conversation
        self._output = output
        self._threshold = threshold
        self._seal = seal
        self._open: _Open | None = None

    @property
    def is_all(self) -> bool:
        """Whether the response is to be the compaction alone."""
        return self._threshold is None

    async def run(self, chat: ChatRequest) -> AsyncGenerator[Events]:
        """The events of a compaction, if there is one; then the conversation begins with it."""
        self.spent = None
        answered = max((at for at, each in enumerate(chat.messages) if each.role in ("assistant", "tool")), default=-1)
        threshold = self._threshold
        if threshold is not None and (answered < 0 or await self._inference.count_tokens(chat) <= threshold):
            return
        summary = _Summary()
        words = _WORDS if threshold is None else max(50, min(_WORDS, threshold // 4))
        async with aclosing(summary.write(self._inference, chat, words)) as writing:
            async for _ in writing:
                self._open = opened = _Open(self._output.ids.item("cmp"), self._output.grow())
                yield [item_added(opened.index, opened.item()), _compacting(opened)]
        if threshold is None:
            compacted = _beside(self._conversation.window().said_items(), self._conversation, summary.text)
        else:
            compacted = self._compacted(summary.text, len(chat.messages) - 1 - answered, threshold)
        token = self._seal(_to_json(compacted))
        self._conversation.compacted[token] = compacted
        self.spent = summary.usage
        yield self._close(token)

    def break_off(self) -> Events:
        """The events that close what is open when the response ends before its end."""
        return self._close("")

    def _close(self, token: str) -> Events:
        opened, self._open = self._open, None
        if opened is None:
            return ()
        item = self._output.items[opened.index] = opened.item(token)
        return [item_done(opened.index, item)]

    def _compacted(self, summary: str, pending: int, threshold: int) -> Compacted:
        """`pending` is how many messages came after the last answer."""
        said = self._conversation.said(ITEMS.validate_json(items_to_json(self._output.finished())))
        earlier = said[: len(said) - pending]
        kept: list[Message] = []
        room = threshold  # in characters, which is about a quarter of it in tokens
        latest = True
        for message in reversed(earlier):
            size = len(message.model_dump_json(exclude_none=True))
            if message.role != "user" or size <= room or (latest and not pending):
                kept.append(message)
                room -= size if message.role == "user" else 0
            latest = latest and message.role != "user"
        return Compacted(summary=summary, kept=kept[::-1], pending=said[len(said) - pending :], alone=True)


class _Summary:
    """What the model makes of a chat. `text` and `usage` are there when `write` has ended."""

    def __init__(self) -> None:
        self.text = ""
        self.usage = Usage()

    async def write(self, inference: Inference, chat: ChatRequest, words: int) -> AsyncGenerator[None]:
        """Ask for it; yields once, when the model begins. Raises as `Inference.chat` does, and UpstreamError for a
        model that says nothing."""
        fields = {name: value for name in _SAME if (value := getattr(chat, name)) is not None}
        prompt = Message(role="user", content=_PROMPT.format(words=words))
        request = ChatRequest.model_validate({**fields, "messages": [*chat.messages, prompt]})
        begun = False
        # where less than the bound is left of the model's context, that is the bound
        for bound in (_MAX_TOKENS, None):
            bounded = request.model_copy(update={"max_completion_tokens": bound})
            try:
                async with aclosing(inference.chat(bounded)) as steps:
                    async for step in steps:
                        if not begun:
                            begun = True
                            yield
                        self._take(step)
                break
            except ContextLengthExceeded:
                if begun or bound is None:
                    raise
        self.text = self.text.strip()
        if not self.text:
            raise UpstreamError("The model gave no summary of the conversation.")

    def _take(self, step: Step) -> None:
        for delta in step:
            if isinstance(delta, Text):
                self.text += delta.text
            elif isinstance(delta, Finish):
                self.usage = delta.usage
                if delta.reason == "length":
                    _log.warning("a summary of a conversation was cut at its limit")


def _beside(left: Sequence[GivenMessage], conversation: Conversation, summary: str) -> Compacted:
    """A compaction that leaves these messages as they are, and keeps what else was said."""
    shown = conversation.messages_of(left)
    kept = [message for message in conversation.said() if message not in shown]
    return Compacted(summary=summary, kept=kept, alone=False)


def _compacting(opened: _Open) -> ResponseCompactionCompactingEvent:
    return ResponseCompactionCompactingEvent(
        type="response.compaction.compacting", item_id=opened.id, output_index=opened.index, sequence_number=0
    )


def _to_json(compacted: Compacted) -> str:
    return compacted.model_dump_json(exclude_none=True)
