"""Compaction: the model itself sums a conversation up, and one sealed item stands for it from then on."""

import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from openai.types.responses import ResponseCompactionCompactingEvent, ResponseCompactionItem
from openai.types.responses.response import InputTransformation

from apis.chat import ChatRequest, Message
from apis.deltas import DeltaBatch, Finish, TextDelta, Usage
from apis.errors import ContextLengthExceeded, InvalidRequest, UpstreamError
from apis.events import EventBatch
from apis.inference import Inference
from apis.responses import CompactedConversation, ContextManagement, CreateResponse
from apis.wire.items import ITEM_LIST_ADAPTER, CompactionItem, InputMessage, items_to_json
from providers.responses.context.conversation import Conversation, stored_item
from providers.responses.context.sealed_reasoning import SealedReasoning
from providers.responses.context.sealing import UnsealError
from providers.responses.context.truncation import with_truncation
from providers.responses.context.url_files import public_item
from providers.responses.context.window import CompactionContent
from providers.responses.events.ids import ResponseIds
from providers.responses.events.open_items import item_added_event, item_done_event
from providers.responses.events.output import ResponseOutput
from providers.responses.events.response_object import usage_to_wire
from providers.responses.tools.item_types import id_prefix

_log = logging.getLogger(__name__)

Seal = Callable[[str], str]
_ANY_MODEL: Final = ""
"""A summary is plain text, which one model may write and another go on from."""
_COPIED_FIELDS: Final = (
    *("model", "reasoning_effort", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("prompt_cache_key", "cache_salt", "priority"),
)
_MAX_SUMMARY_WORDS: Final = 1500
_MAX_SUMMARY_TOKENS: Final = 8192
"""Of a summary, its reasoning included; fewer where the model's context ends before."""
_PROMPT: Final = """\
Stop here and sum up the conversation above, for a model that will go on with it and sees your summary in its place.

Write down all it needs to go on as if it had seen everything: what the user wants, and every wish, limit and decision \
that still holds; what has been found out, with exact names, numbers, dates, paths, links, ids and pieces of code or \
text that will be needed again; what has been done, tools that were called and what they gave included; what is not \
done yet, and what comes next. Keep what an earlier summary says, unless it is out of date.

Do not answer the user, do not call tools and do nothing else that the conversation asks for. Write the summary and \
nothing else, in the conversation's own language, with at most {words} words."""


class Compactor:
    """Over one Inference; `keys` seal the items."""

    def __init__(self, inference: Inference, sealed_reasoning: SealedReasoning) -> None:
        self._inference = inference
        self._sealed_reasoning = sealed_reasoning

    async def open_latest_compaction(self, conversation: Conversation, tenant: str) -> Sequence[InputTransformation]:
        """Let the conversation begin with its newest compaction that can be opened; returns those that cannot, which
        no model is shown."""
        sealed = [item for item in conversation.items if isinstance(item, CompactionItem) and item.encrypted_content]
        sealer = await self._sealed_reasoning.load_sealer()
        removed: list[InputTransformation] = []
        for item in reversed(sealed):
            try:
                text = sealer.unseal(item.encrypted_content, tenant=tenant, model=_ANY_MODEL)
            except UnsealError as exc:
                # the API's only word for what is sealed; the id says what it was
                kind = "reasoning"
                removed.append(InputTransformation(id=item.id or "", action="removed", reason=exc.reason, type=kind))
            else:
                conversation.compactions_by_token[item.encrypted_content] = CompactionContent.model_validate_json(text)
                break
        return removed

    async def create_automatic_compaction(
        self,
        context_management: ContextManagement,
        request: CreateResponse,
        conversation: Conversation,
        output: ResponseOutput,
        tenant: str,
    ) -> "ResponseCompaction":
        """What compacts while the request's response is made. Raises InvalidRequest where it is not said when, and
        nobody knows the model's context."""
        threshold = context_management.compact_threshold or await self._default_threshold(request.model)
        inference = with_truncation(self._inference, request)
        return ResponseCompaction(inference, conversation, output, threshold, await self._build_seal(tenant))

    async def create_triggered_compaction(
        self, request: CreateResponse, conversation: Conversation, output: ResponseOutput, tenant: str
    ) -> "ResponseCompaction":
        """What compacts the conversation instead of an answer."""
        return ResponseCompaction(
            with_truncation(self._inference, request), conversation, output, None, await self._build_seal(tenant)
        )

    async def compact(
        self, chat: ChatRequest, conversation: Conversation, ids: ResponseIds, tenant: str
    ) -> CompactedConversation:
        """What the user said as it is, and one item for all the rest of the chat, which is the conversation's. Raises
        as `Inference.chat` does."""
        summary = _Summary()
        async with aclosing(summary.generate(self._inference, chat, _MAX_SUMMARY_WORDS)) as writing:
            async for _ in writing:
                pass
        users = [item for item in conversation.window().verbatim_items() if item.role == "user"]
        token = (await self._build_seal(tenant))(
            _content_to_json(_build_partial_content(users, conversation, summary.text))
        )
        output = [public_item(stored_item(item, ids)) for item in users]
        output.append(
            {"id": ids.new_item_id(id_prefix("compaction")), "type": "compaction", "encrypted_content": token}
        )
        usage = usage_to_wire(summary.usage)
        return CompactedConversation(id=ids.response_id, created_at=int(time.time()), output=output, usage=usage)

    async def _default_threshold(self, model: str) -> int:
        context = next((each.context_tokens for each in await self._inference.models() if each.id == model), None)
        if context is None:
            raise InvalidRequest(
                "Give a 'compact_threshold': how much fits into this model's context is not known.",
                param="context_management[0].compact_threshold",
                code="missing_required_parameter",
            )
        return max(1, context * 4 // 5)

    async def _build_seal(self, tenant: str) -> Seal:
        sealer = await self._sealed_reasoning.load_sealer()
        return lambda text: sealer.seal(text, tenant=tenant, model=_ANY_MODEL)


@dataclass(slots=True)
class _OpenCompactionItem:
    """A compaction item that is not done."""

    id: str
    index: int

    def item(self, token: str = "") -> ResponseCompactionItem:
        return ResponseCompactionItem(id=self.id, type="compaction", encrypted_content=token)


class ResponseCompaction:
    """Compacts the conversation of a response that is being made, whenever its chat is longer than `threshold`
    tokens; without one, at once and as all that the response is: what was said then stays beside it. `spent` is what
    the last `run` took; None where it had nothing to do."""

    def __init__(
        self,
        inference: Inference,
        conversation: Conversation,
        output: ResponseOutput,
        threshold: int | None,
        seal: Seal,
    ) -> None:
        self.last_usage: Usage | None = None
        self._inference = inference
        self._conversation = conversation
        self._output = output
        self._threshold = threshold
        self._seal = seal
        self._open_item: _OpenCompactionItem | None = None

    @property
    def is_whole_response(self) -> bool:
        """Whether the response is to be the compaction alone."""
        return self._threshold is None

    async def run(self, chat: ChatRequest) -> AsyncGenerator[EventBatch]:
        """The events of a compaction, if there is one; then the conversation begins with it."""
        self.last_usage = None
        answered = max((at for at, each in enumerate(chat.messages) if each.role in ("assistant", "tool")), default=-1)
        threshold = self._threshold
        if threshold is not None and (answered < 0 or await self._inference.count_tokens(chat) <= threshold):
            return
        summary = _Summary()
        words = _MAX_SUMMARY_WORDS if threshold is None else max(50, min(_MAX_SUMMARY_WORDS, threshold // 4))
        async with aclosing(summary.generate(self._inference, chat, words)) as writing:
            async for _ in writing:
                self._open_item = opened = _OpenCompactionItem(
                    self._output.ids.new_item_id(id_prefix("compaction")), self._output.reserve_index()
                )
                yield [item_added_event(opened.index, opened.item()), _build_compacting_event(opened)]
        if threshold is None:
            compacted = _build_partial_content(
                self._conversation.window().verbatim_items(), self._conversation, summary.text
            )
        else:
            compacted = self._build_content(summary.text, len(chat.messages) - 1 - answered, threshold)
        token = self._seal(_content_to_json(compacted))
        self._conversation.compactions_by_token[token] = compacted
        self.last_usage = summary.usage
        yield self._close_item(token)

    def close_open_items(self) -> EventBatch:
        """The events that close what is open when the response ends before its end."""
        return self._close_item("")

    def _close_item(self, token: str) -> EventBatch:
        opened, self._open_item = self._open_item, None
        if opened is None:
            return ()
        item = self._output.items[opened.index] = opened.item(token)
        return [item_done_event(opened.index, item)]

    def _build_content(self, summary: str, pending_count: int, threshold: int) -> CompactionContent:
        """`pending` is how many messages came after the last answer."""
        said = self._conversation.verbatim_messages(
            ITEM_LIST_ADAPTER.validate_json(items_to_json(self._output.finished_items()))
        )
        earlier = said[: len(said) - pending_count]
        kept: list[Message] = []
        room = threshold  # in characters, which is about a quarter of it in tokens
        latest = True
        for message in reversed(earlier):
            size = len(message.model_dump_json(exclude_none=True))
            if message.role != "user" or size <= room or (latest and not pending_count):
                kept.append(message)
                room -= size if message.role == "user" else 0
            latest = latest and message.role != "user"
        return CompactionContent(
            summary=summary,
            verbatim_messages=kept[::-1],
            pending_messages=said[len(said) - pending_count :],
            replaces_history=True,
        )


class _Summary:
    """What the model makes of a chat. `text` and `usage` are there when `write` has ended."""

    def __init__(self) -> None:
        self.text = ""
        self.usage = Usage()

    async def generate(self, inference: Inference, chat: ChatRequest, max_words: int) -> AsyncGenerator[None]:
        """Ask for it; yields once, when the model begins. Raises as `Inference.chat` does, and UpstreamError for a
        model that says nothing."""
        fields = {name: value for name in _COPIED_FIELDS if (value := getattr(chat, name)) is not None}
        prompt = Message(role="user", content=_PROMPT.format(words=max_words))
        request = ChatRequest.model_validate({**fields, "messages": [*chat.messages, prompt]})
        begun = False
        # where less than the bound is left of the model's context, that is the bound
        for bound in (_MAX_SUMMARY_TOKENS, None):
            bounded = request.model_copy(update={"max_completion_tokens": bound})
            try:
                async with aclosing(inference.chat(bounded)) as steps:
                    async for step in steps:
                        if not begun:
                            begun = True
                            yield
                        self._apply_deltas(step)
                break
            except ContextLengthExceeded:
                if begun or bound is None:
                    raise
        self.text = self.text.strip()
        if not self.text:
            raise UpstreamError("The model gave no summary of the conversation.")

    def _apply_deltas(self, deltas: DeltaBatch) -> None:
        for delta in deltas:
            if isinstance(delta, TextDelta):
                self.text += delta.text
            elif isinstance(delta, Finish):
                self.usage = delta.usage
                if delta.reason == "length":
                    _log.warning("a summary of a conversation was cut at its limit")


def _build_partial_content(
    retained_items: Sequence[InputMessage], conversation: Conversation, summary: str
) -> CompactionContent:
    """A compaction that leaves these messages as they are, and keeps what else was said."""
    shown = conversation.render_items(retained_items)
    kept = [message for message in conversation.verbatim_messages() if message not in shown]
    return CompactionContent(summary=summary, verbatim_messages=kept, replaces_history=False)


def _build_compacting_event(open_item: _OpenCompactionItem) -> ResponseCompactionCompactingEvent:
    return ResponseCompactionCompactingEvent(
        type="response.compaction.compacting", item_id=open_item.id, output_index=open_item.index, sequence_number=0
    )


def _content_to_json(content: CompactionContent) -> str:
    return content.model_dump_json(exclude_none=True, by_alias=True)
