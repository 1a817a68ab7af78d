"""Compaction: the model summarizes a conversation, and one sealed item replaces it for all later turns."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from openai.types.responses import ResponseCompactionItem

from apis.chat import ChatRequest, Message
from apis.deltas import Usage
from apis.errors import InvalidRequest
from apis.events import EventBatch, ResponseStreamEvent
from apis.inference import Inference
from apis.responses import CompactedConversation, CreateResponse
from apis.sink import Sink
from apis.wire.item_types import id_prefix
from apis.wire.items import CompactionItem, InputMessage, Item, output_to_input
from providers.common.chat_tokens import TokenCounter, TokenCounters
from providers.common.fair_turns import do_in_turns, end_pass
from providers.responses.context.chat_summary import ChatSummary
from providers.responses.context.conversation import (
    ITEM_WORK,
    CompactionContent,
    Conversation,
    ResponseProgress,
    messages_without,
    stored_item,
)
from providers.responses.context.input_items import reads_only
from providers.responses.context.sealed_content import SealedContent
from providers.responses.context.sealing import UnsealError
from providers.responses.context.truncation import TruncatingInference
from providers.responses.events.ids import ResponseIds
from providers.responses.events.open_items import item_added_event, item_done_event
from providers.responses.events.output import ResponseOutput
from providers.responses.events.response_events import item_event
from providers.responses.events.response_object import usage_to_wire
from providers.responses.item_index import ItemIndex
from providers.responses.store.url_files import public_item
from providers.responses.tools.tool_state import NO_TOOL_STATE, ToolState, decode_tool_state, encode_tool_state

Seal = Callable[[str], str]
_NO_PROGRESS: Final = ResponseProgress()
_ANY_MODEL: Final = ""
"""Stands where reasoning is bound to its model: any model may read a summary, which is plain text."""
_MAX_SUMMARY_WORDS: Final = 1500
"""Length that the prompt asks for."""


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
        contents = await self.open_latest_compaction(ItemIndex(items[:1]), tenant)
        return any(
            content.replaces_history and reads_only(request, items, has_tool_state=content.tool_state is not None)
            for content in contents.values()
        )

    async def read_tool_state(self, compactions: Mapping[str, CompactionContent]) -> ToolState:
        """Return the state of tools before the compaction that was opened."""
        for content in compactions.values():
            if content.tool_state is not None:
                return await decode_tool_state(content.tool_state)
        return NO_TOOL_STATE

    async def create_response_compaction(
        self, request: CreateResponse, conversation: Conversation, output: ResponseOutput, tenant: str
    ) -> "ResponseCompaction":
        """Return the compaction of the request's response: instead of an answer where the input ends with a trigger,
        else before a turn, as `context_management` asks for it.

        Raises InvalidRequest where the request has no threshold and the model's context is unknown.
        """
        managed = next(iter(request.context_management or ()), None)  # one at most
        threshold = managed and (managed.compact_threshold or await self._default_threshold(request.model))
        return ResponseCompaction(
            TruncatingInference(self._inference) if request.truncation == "auto" else self._inference,
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
        summary = ChatSummary()
        await summary.generate(self._inference, chat, _MAX_SUMMARY_WORDS)
        users = [item for item in conversation.window().verbatim_items() if item.role == "user"]
        content = _with_tool_state(await _build_partial_content(users, conversation, summary.text), conversation)
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
        self._unfinished: ChatSummary | None = None

    @property
    def is_whole_response(self) -> bool:
        """The response is the compaction, without an answer."""
        return self._threshold is None

    async def run(self, chat: ChatRequest, progress: ResponseProgress, sink: Sink[ResponseStreamEvent]) -> None:
        """Put the events of a compaction into `sink`, if one is needed; `contents` then has it. `progress` has the
        results of the response's calls."""
        self.last_usage = None
        roles = [message.role for message in chat.messages]
        last_answer = max((at for at, role in enumerate(roles) if role in ("assistant", "tool")), default=-1)
        threshold = self._threshold
        if threshold is not None and (last_answer < 0 or (await self._counter.count(chat)).tokens <= threshold):
            return
        summary = self._unfinished = ChatSummary()
        words = _MAX_SUMMARY_WORDS if threshold is None else max(50, min(_MAX_SUMMARY_WORDS, threshold // 4))
        await summary.generate(self._inference, chat, words, lambda: sink.put(self._begin_item()))
        self._unfinished = None
        if threshold is None:
            content = await _build_partial_content(
                self._conversation.window().verbatim_items(), self._conversation, summary.text
            )
        else:
            content = self._build_content(summary.text, len(chat.messages) - 1 - last_answer, threshold)
        items = output_to_input(self._output.finished_items())
        content = _with_tool_state(content, self._conversation, msgspec.structs.replace(progress, items=items))
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


def _with_tool_state(
    content: CompactionContent, conversation: Conversation, progress: ResponseProgress = _NO_PROGRESS
) -> CompactionContent:
    """Return the content with what tools still need of the conversation, and of the response until now."""
    items = [*conversation.tool_items, *conversation.items, *progress.items]
    state = encode_tool_state(items, {**conversation.tool_results, **progress.tool_results})
    return content.model_copy(update={"tool_state": state})


def _content_to_json(content: CompactionContent) -> str:
    return content.model_dump_json(exclude_none=True, by_alias=True)
