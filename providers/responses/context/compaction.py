"""Compaction: the model summarizes a conversation, and one sealed item replaces it for all later turns."""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

from openai.types.responses import ResponseCompactionItem, ResponseStreamEvent

from apis.chat import ChatRequest, Message
from apis.deltas import DeltaBatch, Finish, TextDelta, Usage, estimate_tokens, measure_deltas
from apis.errors import ContextLengthExceeded, InvalidRequest, UpstreamError
from apis.events import EventBatch
from apis.inference import Inference
from apis.responses import CompactedConversation, CreateResponse
from apis.sink import Sink
from apis.wire.item_types import id_prefix
from apis.wire.items import CompactionItem, InputMessage, Item, output_to_input
from providers.common.chat_tokens import measure_chat
from providers.common.fair_turns import do_in_turns, end_pass
from providers.responses.context.conversation import ITEM_WORK, Conversation, ResponseProgress, stored_item
from providers.responses.context.input_items import reads_only
from providers.responses.context.sealed_content import SealedContent
from providers.responses.context.sealing import UnsealError
from providers.responses.context.token_estimate import TokenCounter, TokenCounters
from providers.responses.context.truncation import with_truncation
from providers.responses.context.window import CompactionContent, messages_without
from providers.responses.events.ids import ResponseIds
from providers.responses.events.open_items import item_added_event, item_done_event
from providers.responses.events.output import ResponseOutput
from providers.responses.events.response_events import item_event
from providers.responses.events.response_object import usage_to_wire
from providers.responses.item_index import ItemIndex
from providers.responses.store.url_files import public_item

_log = logging.getLogger(__name__)

Seal = Callable[[str], str]
_ANY_MODEL: Final = ""
"""Stands where reasoning is bound to its model: any model may read a summary, which is plain text."""
_COPIED_FIELDS: Final = (
    *("model", "reasoning_effort", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("prompt_cache_key", "cache_root", "cache_salt", "priority"),
)
_MAX_SUMMARY_WORDS: Final = 1500
"""Length that the prompt asks for."""
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


class Compactor:
    """Writes compactions with the models of one Inference, and opens sealed ones."""

    def __init__(self, inference: Inference, sealed_content: SealedContent, token_counters: TokenCounters) -> None:
        self._inference = inference
        self._token_counters = token_counters
        self._sealed_content = sealed_content

    async def open_latest_compaction(self, index: ItemIndex, tenant: str) -> Mapping[str, CompactionContent]:
        """Return the content of the newest compaction that can be opened, by its sealed token. A newer one of the
        history that cannot be opened is passed over, because the items before it are there. Raises InvalidRequest for
        one of the request's own input: the answer would be about a conversation of which a part is not known."""
        if not index.has(CompactionItem):
            return {}
        sealer = await self._sealed_content.load_sealer()
        for position in reversed(index.positions(CompactionItem)):
            item = index.items[position]
            token = item.encrypted_content if isinstance(item, CompactionItem) else None
            if not token:
                continue
            try:
                text = sealer.unseal(token, tenant=tenant, model=_ANY_MODEL, purpose="compaction")
            except UnsealError as exc:
                if index.input_start <= position < index.input_end:
                    raise InvalidRequest(
                        f"The encrypted content of the item '{item.id or ''}' could not be decrypted: it is "
                        "from another server or tenant, or was changed.",
                        param=f"{index.param(position)}.encrypted_content",
                        code="invalid_encrypted_content",
                    ) from exc
            else:
                return {token: CompactionContent.model_validate_json(text)}
        return {}

    async def suffice(self, request: CreateResponse, tenant: str, items: Sequence[Item]) -> bool:
        """Return True if the request needs none of the items of its conversation before these: the first of them is a
        compaction that can be opened, and stands for all before it."""
        if not reads_only(request, items):
            return False
        contents = await self.open_latest_compaction(ItemIndex(items[:1]), tenant)
        return any(content.replaces_history for content in contents.values())

    async def create_response_compaction(
        self, request: CreateResponse, conversation: Conversation, output: ResponseOutput, tenant: str
    ) -> "ResponseCompaction | None":
        """Return the compaction of the request's response: instead of an answer where the input ends with a trigger,
        before a turn where `context_management` asks for it, else None.

        Raises InvalidRequest where the request has no threshold and the model's context is unknown.
        """
        managed = next(iter(request.context_management or ()), None)  # one at most
        if managed is None and not conversation.must_compact:
            return None
        threshold = managed and (managed.compact_threshold or await self._default_threshold(request.model))
        return ResponseCompaction(
            with_truncation(self._inference, request),
            conversation,
            output,
            None if conversation.must_compact else threshold,
            self._token_counters.of_tenant(tenant),
            await self._build_seal(tenant),
        )

    async def compact(
        self, chat: ChatRequest, conversation: Conversation, ids: ResponseIds, tenant: str
    ) -> CompactedConversation:
        """Return the user's messages unchanged and one compaction item for everything else in the chat, which is the
        conversation's. Raises like `Inference.chat`."""
        summary = _Summary()
        await summary.generate(self._inference, chat, _MAX_SUMMARY_WORDS)
        users = [item for item in conversation.window().verbatim_items() if item.role == "user"]
        content = await _build_partial_content(users, conversation, summary.text)
        token = (await self._build_seal(tenant))(_content_to_json(content))
        output: list[dict[str, Any]] = []
        await do_in_turns(users, lambda item: output.append(public_item(stored_item(item, ids))), ITEM_WORK)
        output.append(
            {"id": ids.new_item_id(id_prefix("compaction")), "type": "compaction", "encrypted_content": token}
        )
        await end_pass(output)
        usage = usage_to_wire(summary.usage)
        return CompactedConversation(id=ids.response_id, created_at=int(time.time()), output=output, usage=usage)

    async def _default_threshold(self, model: str) -> int:
        models = await self._inference.models()
        context = next((served.context_tokens for served in models if served.id == model), None)
        if context is None:
            raise InvalidRequest(
                "Give a 'compact_threshold': how much fits into this model's context is not known.",
                param="context_management[0].compact_threshold",
                code="missing_required_parameter",
            )
        return max(1, context * 4 // 5)

    async def _build_seal(self, tenant: str) -> Seal:
        sealer = await self._sealed_content.load_sealer()
        return lambda text: sealer.seal(text, tenant=tenant, model=_ANY_MODEL, purpose="compaction")


@dataclass(slots=True)
class _OpenCompactionItem:
    """Compaction item that has been added and is not done."""

    id: str
    index: int

    def item(self, token: str = "") -> ResponseCompactionItem:
        return ResponseCompactionItem(id=self.id, type="compaction", encrypted_content=token)


class ResponseCompaction:
    """Compacts the conversation of a running response, whenever its chat is longer than `threshold` tokens. Without a
    threshold, the compaction is the whole response, and the messages of users and developers stay as they are.
    `contents` are the compactions written, by sealed token; `last_usage` is the usage of the last `run`, None where
    the chat was short enough."""

    def __init__(
        self,
        inference: Inference,
        conversation: Conversation,
        output: ResponseOutput,
        threshold: int | None,
        counter: TokenCounter,
        seal: Seal,
    ) -> None:
        self.last_usage: Usage | None = None
        self.contents: dict[str, CompactionContent] = {}
        self._inference = inference
        self._conversation = conversation
        self._output = output
        self._threshold = threshold
        self._counter = counter
        self._seal = seal
        self._open_item: _OpenCompactionItem | None = None
        self._unfinished: _Summary | None = None

    @property
    def is_whole_response(self) -> bool:
        """The response is the compaction, without an answer."""
        return self._threshold is None

    async def run(self, chat: ChatRequest, sink: Sink[ResponseStreamEvent]) -> None:
        """Put the events of a compaction into `sink`, if one is needed; `contents` then has it."""
        self.last_usage = None
        roles = [message.role for message in chat.messages]
        last_answer = max((at for at, role in enumerate(roles) if role in ("assistant", "tool")), default=-1)
        threshold = self._threshold
        if threshold is not None and (last_answer < 0 or (await self._counter.count(chat)).tokens <= threshold):
            return
        summary = self._unfinished = _Summary()
        words = _MAX_SUMMARY_WORDS if threshold is None else max(50, min(_MAX_SUMMARY_WORDS, threshold // 4))
        await summary.generate(self._inference, chat, words, lambda: sink.put(self._begin_item()))
        self._unfinished = None
        if threshold is None:
            content = await _build_partial_content(
                self._conversation.window().verbatim_items(), self._conversation, summary.text
            )
        else:
            content = self._build_content(summary.text, len(chat.messages) - 1 - last_answer, threshold)
        token = self._seal(_content_to_json(content))
        self.contents[token] = content
        self.last_usage = summary.usage
        await sink.put(self._close_item(token))

    def _begin_item(self) -> EventBatch:
        self._open_item = opened = _OpenCompactionItem(
            self._output.ids.new_item_id(id_prefix("compaction")), self._output.reserve_index()
        )
        return [
            item_added_event(opened.index, opened.item()),
            item_event("response.compaction.compacting", opened.id, opened.index),
        ]

    def close_open_items(self) -> EventBatch:
        """Return the events that close the open item of a response that ends early."""
        return self._close_item("")

    def take_estimate(self) -> Usage:
        """Return an estimate of the tokens of a summary that the model has not ended, once."""
        summary, self._unfinished = self._unfinished, None
        return Usage() if summary is None else summary.estimate_usage()

    def _close_item(self, token: str) -> EventBatch:
        opened, self._open_item = self._open_item, None
        if opened is None:
            return ()
        item = self._output.items[opened.index] = opened.item(token)
        return [item_done_event(opened.index, item)]

    def _build_content(self, summary: str, pending_count: int, threshold: int) -> CompactionContent:
        """Return a compaction with the newest messages of the user that fit into a quarter of the threshold;
        `pending_count` messages, all after the last answer, are still unanswered."""
        items = output_to_input(self._output.finished_items())
        messages = self._conversation.verbatim_messages(ResponseProgress(items, compactions=self.contents))
        earlier = messages[: len(messages) - pending_count]
        retained: list[Message] = []
        room = threshold  # in characters, about a quarter of the threshold in tokens
        latest = True
        for message in reversed(earlier):
            size = len(message.model_dump_json(exclude_none=True))
            if message.role != "user" or size <= room or (latest and not pending_count):
                retained.append(message)
                room -= size if message.role == "user" else 0
            latest = latest and message.role != "user"
        return CompactionContent(
            summary=summary,
            verbatim_messages=retained[::-1],
            pending_messages=messages[len(messages) - pending_count :],
            replaces_history=True,
        )


class _Summary:
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


async def _build_partial_content(
    retained_items: Sequence[InputMessage], conversation: Conversation, summary: str
) -> CompactionContent:
    """Return a compaction that leaves these messages in the conversation and holds the other messages itself."""
    window = conversation.window()
    if window.compaction is None:  # messages that are left are not rendered to find them among the others
        retained_ids = set(map(id, retained_items))
        others = conversation.render_items([item for item in window.verbatim_items() if id(item) not in retained_ids])
    else:
        retained = conversation.render_items(retained_items)
        await end_pass(retained)
        others = messages_without(conversation.verbatim_messages(), retained)
    await end_pass(retained_items)
    return CompactionContent(summary=summary, verbatim_messages=others, replaces_history=False)


def _content_to_json(content: CompactionContent) -> str:
    return content.model_dump_json(exclude_none=True, by_alias=True)
