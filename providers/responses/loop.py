"""Loop: responses as turns of a chat model with tools run in between.

Two generators. The outer one owns the life of a response: it begins and ends it, numbers its events, keeps it, and
makes a failure of what goes wrong. The inner one (turns.py) runs turns and tools, and knows nothing of that.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing, nullcontext
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Annotated

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import Field, SecretStr

from apis.conversations import Conversations
from apis.errors import InvalidRequest, NotFound, StackError, StoreUnavailable, UpstreamTimeout, internal_error
from apis.events import LoggedEvent
from apis.fetcher import Fetcher
from apis.inference import Inference
from apis.provider import Provider
from apis.reader import Reader
from apis.responses import (
    CompactConversation,
    CompactedConversation,
    CreateResponse,
    InputItemListParams,
    ItemList,
    Responses,
    Session,
)
from apis.storage.kv_store import KVStore
from apis.storage.pages import page_after
from apis.tool_runtime import ToolRuntime
from apis.vector_stores import VectorStores
from apis.wire.tools import CustomTool, FunctionTool
from providers.responses.background.background import BackgroundResponses
from providers.responses.background.webhook_queue import WebhookQueue
from providers.responses.background.webhooks import Webhook
from providers.responses.background.workers import BackgroundConfig
from providers.responses.context.attachments import Attachments
from providers.responses.context.chat_request import build_chat, refuse_unsupported
from providers.responses.context.compaction import Compactor
from providers.responses.context.configuration import apply_configuration_updates
from providers.responses.context.conversation import Conversation, HistorySource, read_conversation
from providers.responses.context.conversations import StoredConversations
from providers.responses.context.sealed_reasoning import SealedReasoning
from providers.responses.context.sealed_results import SealedToolResults
from providers.responses.context.truncation import with_truncation
from providers.responses.context.url_files import public_item
from providers.responses.events.ids import ResponseIds
from providers.responses.events.output import ResponseOutput
from providers.responses.run.agent_loop import AgentLoop, ToolCallLimits
from providers.responses.run.checkpoint import ResumePoint
from providers.responses.run.first_events import build_first_events, peek_first_batch
from providers.responses.run.pending_response import PendingResponse, assign_sequence_numbers, terminal_event
from providers.responses.session import LoopSession
from providers.responses.store.conversation_items import find_conversation_item
from providers.responses.store.conversation_lock import stream_with_lock
from providers.responses.store.history import History
from providers.responses.store.history_cache import HistoryCache
from providers.responses.tools.input_tools import add_typed_tools, attribute_errors_to_input, collect_additional_tools
from providers.responses.tools.models import ModelCatalog
from providers.responses.tools.offered import OfferedTools
from providers.responses.tools.registry import MODEL_DEPENDENT_TOOLS, build_checked_tools
from providers.responses.tools.tool_context import ToolContext

_log = logging.getLogger(__name__)

EventBatch = Sequence[ResponseStreamEvent]


class Loop(Responses):
    """The Responses API over one Inference, one KVStore and, where there is one, a ToolRuntime."""

    class Config(Provider.Config):
        """`retention_days` after their last use, responses are forgotten; `max_turns` bounds a chain;
        `cache_bytes` of the last conversations are kept in memory, as they are stored, and `session_bytes` of those
        that connections go on with and do not store. `max_tool_calls` are run here for one response,
        `parallel_tool_calls` of them at a time, each for `tool_timeout_s`; of what one gives, the model is told
        `max_tool_output_chars`. `reasoning_keys` seal the reasoning that clients keep: the first seals, all open;
        without any, the workers on one store share one that is kept there. `webhooks` are told how background
        responses ended."""

        retention_days: float = Field(30, gt=0)
        sweep_interval_s: float = Field(600, gt=0)
        max_turns: int = Field(1000, ge=1)
        cache_bytes: int = Field(64 * 1024 * 1024, ge=0)
        session_bytes: int = Field(256 * 1024 * 1024, ge=0)
        max_tool_calls: int = Field(32, ge=1)
        parallel_tool_calls: int = Field(8, ge=1, le=64)
        tool_timeout_s: float = Field(60, gt=0)
        max_tool_output_chars: int = Field(100_000, ge=1000)
        response_timeout_s: float = Field(600, gt=0)
        reasoning_keys: tuple[Annotated[SecretStr, Field(min_length=32)], ...] = ()
        background: BackgroundConfig = BackgroundConfig()
        webhooks: list[Webhook] = Field(default_factory=list[Webhook])

    def __init__(
        self,
        config: Config,
        inference: Inference,
        kv_store: KVStore,
        reader: Reader,
        tool_runtime: ToolRuntime | None,
        vector_stores: VectorStores | None,
    ) -> None:
        self._config = config
        self._inference = inference
        self._kv = kv_store
        self._tool_runtime = tool_runtime
        self._vector_stores = vector_stores
        self._model_catalog = ModelCatalog(inference)
        self._attachments = Attachments(reader, self._model_catalog)
        retention_s = config.retention_days * 86_400
        self._history = History(
            kv_store,
            retention_s=retention_s,
            max_turns=config.max_turns,
            cache_bytes=config.cache_bytes,
            find_conversation_item=partial(find_conversation_item, kv_store),
        )
        self._webhook_queue = WebhookQueue(kv_store, config.webhooks)
        self._background = BackgroundResponses(
            kv_store, self._history, self._prepare, config.background, retention_s, self._webhook_queue
        )
        self._conversations = StoredConversations(
            kv_store, self._history, background_s=config.background.max_duration_s
        )
        self._session_cache = HistoryCache(config.session_bytes, max_age_s=math.inf)
        self._sealed_reasoning = SealedReasoning(config.reasoning_keys, kv_store)
        self._sealed_tool_results = SealedToolResults(self._sealed_reasoning, self._model_catalog)
        self._compactions = Compactor(inference, self._sealed_reasoning)
        self._store_tasks: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._sweeper = asyncio.create_task(self._sweep())
        self._background.start()

    async def drain(self) -> None:
        await self._background.drain()

    async def deliver_webhooks(self, fetcher: Fetcher) -> None:
        await self._webhook_queue.run(fetcher)

    async def close(self) -> None:
        await self._background.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait({self._sweeper})
        if self._store_tasks:
            await asyncio.wait(self._store_tasks, timeout=10)

    async def create(
        self, request: CreateResponse, *, tenant: str, response_id: str | None = None
    ) -> AsyncGenerator[Sequence[ResponseStreamEvent | LoggedEvent]]:
        making = await self._prepare(request, tenant, ResponseIds(response_id))
        if request.background:
            async with making.lock or nullcontext(), aclosing(self._background.create(making)) as logged:
                async for some in logged:
                    yield some
            return
        number = 0
        async with aclosing(self._stream_response(making)) as batches:
            async for events in batches:
                number = assign_sequence_numbers(events, number)
                yield events

    def open_session(self, *, tenant: str) -> Session:
        return LoopSession(tenant, self._history, self._session_cache, self._prepare, self._stream_response)

    async def get(self, response_id: str, *, tenant: str) -> Response:
        try:
            return await self._history.load_response(response_id, tenant=tenant)
        except NotFound:
            running = await self._background.get(response_id, tenant=tenant)
            # it may have ended between the two looks
            return running or await self._history.load_response(response_id, tenant=tenant)

    async def follow(
        self, response_id: str, starting_after: int, *, tenant: str
    ) -> AsyncGenerator[Sequence[ResponseStreamEvent | LoggedEvent]]:
        await self.get(response_id, tenant=tenant)
        async with aclosing(self._background.follow(response_id, starting_after, tenant=tenant)) as batches:
            async for events in batches:
                yield events

    async def delete(self, response_id: str, *, tenant: str) -> None:
        await self._background.cancel(response_id, tenant=tenant)
        await self._history.delete(response_id, tenant=tenant)
        await self._background.delete_log(response_id, tenant=tenant)

    async def cancel(self, response_id: str, *, tenant: str) -> Response:
        await self._background.cancel(response_id, tenant=tenant)
        response = await self._history.load_response(response_id, tenant=tenant)
        if not response.background:
            message = "Only a response that was made with `background` can be cancelled."
            raise InvalidRequest(message, param="response_id")
        return response

    async def list_input_items(self, response_id: str, params: InputItemListParams, *, tenant: str) -> ItemList:
        items = await self._background.load_input_items(response_id, tenant=tenant)
        if items is None:
            items = await self._history.load_input_items(response_id, tenant=tenant)
        if params.order == "desc":
            items.reverse()
        page = page_after(items, params, itemgetter("id"), f"No input item has the id '{params.after}'.")
        shown = [public_item(item) for item in page.data]
        first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
        return ItemList(data=shown, first_id=first, last_id=last, has_more=page.has_more)

    async def count_input_tokens(self, request: CreateResponse, *, tenant: str) -> int:
        refuse_unsupported(request)
        making = await self._prepare_unlocked(request, tenant, ResponseIds())
        return await self._inference.count_tokens(making.agent_loop.chat)

    async def compact(self, request: CompactConversation, *, tenant: str) -> CompactedConversation:
        create = CreateResponse(**dict(request))
        refuse_unsupported(create)
        making = await self._prepare_unlocked(create, tenant, ResponseIds())
        try:
            async with asyncio.timeout(self._config.response_timeout_s):
                return await self._compactions.compact(making.agent_loop.chat, making.conversation, making.ids, tenant)
        except TimeoutError:
            raise _timeout_error(self._config.response_timeout_s) from None

    def conversations(self) -> Conversations:
        return self._conversations

    async def _prepare(
        self,
        request: CreateResponse,
        tenant: str,
        ids: ResponseIds,
        history_source: HistorySource | None = None,
        resume_point: ResumePoint | None = None,
    ) -> PendingResponse:
        """Everything that can be refused before a response exists."""
        refuse_unsupported(request)
        floor = await self._conversations.acquire_lock(request, ids.response_id, tenant=tenant)
        async with AsyncExitStack() as undo:
            if floor is not None:
                undo.push_async_callback(floor.release)
            making = await self._prepare_unlocked(request, tenant, ids, history_source, resume_point)
            undo.pop_all()
        return replace(making, lock=floor)

    async def _prepare_unlocked(
        self,
        request: CreateResponse,
        tenant: str,
        ids: ResponseIds,
        history_source: HistorySource | None = None,
        resume_point: ResumePoint | None = None,
    ) -> PendingResponse:
        request, removed = await self._sealed_reasoning.unseal_request(request, tenant)
        kept = await self._conversations.load_history(request, tenant=tenant)
        if kept is not None:
            kept = await self._sealed_reasoning.unseal_history(kept, request.model, tenant)
        conversation = await read_conversation(
            request, history_source or self._history, ids, tenant=tenant, conversation_history=kept
        )
        request = apply_configuration_updates(request, conversation.items)
        await self._sealed_tool_results.restore_tool_results(conversation, request.model, tenant)
        seen = resume_point.extend_conversation(conversation) if resume_point else conversation
        removed = [*removed, *conversation.input_transformations()]
        if seen.is_compacted():
            removed += await self._compactions.open_latest_compaction(seen, tenant)
        conversation = await self._attachments.read_files(conversation, request.model, tenant=tenant)
        output = ResponseOutput(
            ids, self._config.max_tool_output_chars, await self._sealed_reasoning.build_seal(request, tenant)
        )
        output.tool_result_sealer = await self._sealed_tool_results.build_seal(request, tenant)
        toolbox = await self._build_toolbox(request, seen, tenant, ids)
        chat = build_chat(request, conversation.messages(supports_namespaces=toolbox.supports_namespaces), toolbox)
        output.is_json = chat.response_format is not None
        limits = ToolCallLimits(
            request.max_tool_calls or self._config.max_tool_calls,
            self._config.parallel_tool_calls,
            self._config.tool_timeout_s,
        )
        turns = AgentLoop(with_truncation(self._inference, request), chat, conversation, output, toolbox, limits)
        for managed in request.context_management or ():  # one at most
            turns.compaction = await self._compactions.create_automatic_compaction(
                managed, request, conversation, output, tenant
            )
        if conversation.must_compact:
            turns.compaction = await self._compactions.create_triggered_compaction(
                request, conversation, output, tenant
            )
        if resume_point is not None:
            turns.resume(resume_point)
        return PendingResponse(request, tenant, conversation, ids, output, turns, int(time.time()), removed)

    async def _build_toolbox(
        self, original_request: CreateResponse, conversation: Conversation, tenant: str, ids: ResponseIds
    ) -> OfferedTools:
        added = collect_additional_tools(conversation.items)
        tools = [*(original_request.tools or ()), *added]
        if not added and all(isinstance(tool, FunctionTool | CustomTool) for tool in tools):
            return OfferedTools(original_request)
        asks = any(isinstance(tool, MODEL_DEPENDENT_TOOLS) for tool in tools)
        request = add_typed_tools(original_request, added)
        setting = ToolContext(
            request,
            tenant,
            ids.response_id,
            self._tool_runtime,
            conversation.tool_results,
            conversation.items,
            await self._model_catalog.native_tools(request.model) if asks else frozenset(),
            vector_stores=self._vector_stores,
        )
        with attribute_errors_to_input(original_request):
            made = await build_checked_tools(request, setting)
            return OfferedTools(request, made, setting.items, supports_namespaces=setting.supports_namespaces)

    def _stream_response(self, pending: PendingResponse) -> AsyncGenerator[EventBatch]:
        """The outer generator, but for the numbers."""
        return (
            self._stream_events(pending)
            if pending.lock is None
            else stream_with_lock(pending.lock, self._stream_events(pending))
        )

    async def _stream_events(self, pending: PendingResponse) -> AsyncGenerator[EventBatch]:
        deadline = time.monotonic() + self._config.response_timeout_s
        begun = False
        try:
            async with aclosing(pending.agent_loop.run(stream_deltas=pending.request.stream is True)) as batches:
                if pending.request.stream:
                    async with peek_first_batch(batches) as first:
                        begun = True
                        yield build_first_events(pending.build_initial_response())
                        if events := await first:
                            yield events
                    del first
                async for events in batches:
                    begun = True
                    yield events
                    if time.monotonic() > deadline:
                        raise _timeout_error(self._config.response_timeout_s)
            final = pending.build_final_response()
            await pending.store(final, self._history)
            yield [terminal_event(final)]
        except (GeneratorExit, asyncio.CancelledError):
            if begun:
                # nobody listens any more, and whoever called is being cancelled
                self._store_later(pending, pending.build_cancelled_response())
            raise
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as exc:  # the stream's outer edge; a native panic is no Exception
            if not begun:
                raise
            error = exc if isinstance(exc, StackError) else _bug_to_error(exc, pending.ids.response_id)
            error.repeats_work = bool(pending.output.items)
            yield await self._end_with_failure(pending, error)
            raise error from exc

    async def _end_with_failure(self, pending: PendingResponse, error: StackError) -> EventBatch:
        """The last events of a response that failed: what is open ends incomplete, and the cause is told."""
        events = pending.agent_loop.close_open_items()
        final = pending.build_failed_response(error)
        if isinstance(error, StoreUnavailable):
            self._store_later(pending, final)  # who has waited for the store in vain is not to wait again
        else:
            await self._store_or_log(pending, final)
        return [*events, terminal_event(final)]

    def _store_later(self, pending: PendingResponse, response: Response) -> None:
        task = asyncio.create_task(self._store_or_log(pending, response))
        self._store_tasks.add(task)
        task.add_done_callback(self._store_tasks.discard)

    async def _store_or_log(self, pending: PendingResponse, response: Response) -> None:
        try:
            await pending.store(response, self._history)
        except StackError as exc:
            _log.warning("a %s response was not stored: %s", response.status, exc.message)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._config.sweep_interval_s)
            try:
                swept = await self._kv.sweep()
                _log.debug("swept %d expired entries", swept)
            except StackError as exc:
                _log.warning("sweeping the store failed: %s", exc.message)


def _timeout_error(limit_s: float) -> UpstreamTimeout:
    return UpstreamTimeout(f"The response took longer than {limit_s:g} s (`responses.response_timeout_s`).")


def _bug_to_error(exc: BaseException, response_id: str) -> StackError:
    _log.error("response %s failed on a bug", response_id, exc_info=exc)
    return internal_error(response_id)
