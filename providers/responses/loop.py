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
    InputItemsPage,
    ItemList,
    Responses,
    Session,
)
from apis.storage.kv_store import KVStore
from apis.tool_runtime import ToolRuntime
from apis.vector_stores import VectorStores
from apis.wire.tools import CustomTool, FunctionTool
from providers.responses.background.background import Background
from providers.responses.background.webhook_queue import Outbox
from providers.responses.background.webhooks import Webhook
from providers.responses.background.workers import BackgroundConfig
from providers.responses.context.attachments import Attachments
from providers.responses.context.chat_request import build_chat, refuse_unsupported
from providers.responses.context.compaction import Compactions
from providers.responses.context.configuration import with_updates
from providers.responses.context.conversation import Conversation, Known, read_conversation
from providers.responses.context.conversations import StoredConversations
from providers.responses.context.sealed_reasoning import KeptReasoning
from providers.responses.context.sealed_results import KeptCalls
from providers.responses.context.truncation import fitting
from providers.responses.context.url_files import as_given
from providers.responses.events.ids import Ids
from providers.responses.events.output import Output
from providers.responses.run.agent_loop import Limits, Turns
from providers.responses.run.checkpoint import SoFar
from providers.responses.run.first_events import beginning, head_start
from providers.responses.run.pending_response import Making, number_on, terminal
from providers.responses.session import LoopSession
from providers.responses.store.conversation_items import find_item
from providers.responses.store.conversation_lock import with_floor
from providers.responses.store.history import History
from providers.responses.store.history_cache import Recents
from providers.responses.tools.input_tools import added_tools, blaming_items, with_typed
from providers.responses.tools.models import Natives
from providers.responses.tools.offered import Toolbox
from providers.responses.tools.registry import ASKS_FOR_NATIVE, checked_tools
from providers.responses.tools.tool_context import Setting

_log = logging.getLogger(__name__)

Events = Sequence[ResponseStreamEvent]


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
        self._natives = Natives(inference)
        self._attachments = Attachments(reader, self._natives)
        retention_s = config.retention_days * 86_400
        self._history = History(
            kv_store,
            retention_s=retention_s,
            max_turns=config.max_turns,
            cache_bytes=config.cache_bytes,
            elsewhere=partial(find_item, kv_store),
        )
        self._outbox = Outbox(kv_store, config.webhooks)
        self._background = Background(
            kv_store, self._history, self._prepare, config.background, retention_s, self._outbox
        )
        self._conversations = StoredConversations(kv_store, self._history, background_s=config.background.longest_s)
        self._unstored = Recents(config.session_bytes, max_age_s=math.inf)
        self._reasoning = KeptReasoning(config.reasoning_keys, kv_store)
        self._kept_calls = KeptCalls(self._reasoning, self._natives)
        self._compactions = Compactions(inference, self._reasoning)
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._sweeper = asyncio.create_task(self._sweep())
        self._background.start()

    async def drain(self) -> None:
        await self._background.drain()

    async def deliver(self, fetcher: Fetcher) -> None:
        await self._outbox.run(fetcher)

    async def close(self) -> None:
        await self._background.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait({self._sweeper})
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=10)

    async def create(
        self, request: CreateResponse, *, tenant: str, response_id: str | None = None
    ) -> AsyncGenerator[Sequence[ResponseStreamEvent | LoggedEvent]]:
        making = await self._prepare(request, tenant, Ids(response_id))
        if request.background:
            async with making.floor or nullcontext(), aclosing(self._background.create(making)) as logged:
                async for some in logged:
                    yield some
            return
        number = 0
        async with aclosing(self._live(making)) as batches:
            async for events in batches:
                number = number_on(events, number)
                yield events

    def session(self, *, tenant: str) -> Session:
        return LoopSession(tenant, self._history, self._unstored, self._prepare, self._live)

    async def get(self, response_id: str, *, tenant: str) -> Response:
        try:
            return await self._history.response(response_id, tenant=tenant)
        except NotFound:
            running = await self._background.get(response_id, tenant=tenant)
            # it may have ended between the two looks
            return running or await self._history.response(response_id, tenant=tenant)

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
        await self._background.forget(response_id, tenant=tenant)

    async def cancel(self, response_id: str, *, tenant: str) -> Response:
        await self._background.cancel(response_id, tenant=tenant)
        response = await self._history.response(response_id, tenant=tenant)
        if not response.background:
            message = "Only a response that was made with `background` can be cancelled."
            raise InvalidRequest(message, param="response_id")
        return response

    async def input_items(self, response_id: str, page: InputItemsPage, *, tenant: str) -> ItemList:
        items = await self._background.given(response_id, tenant=tenant)
        if items is None:
            items = await self._history.given(response_id, tenant=tenant)
        if page.order == "desc":
            items.reverse()
        if page.after is not None:
            ids = [item["id"] for item in items]
            if page.after not in ids:
                raise InvalidRequest(f"No input item has the id '{page.after}'.", param="after", code="invalid_value")
            items = items[ids.index(page.after) + 1 :]
        shown = [as_given(item) for item in items[: page.limit]]
        first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
        return ItemList(data=shown, first_id=first, last_id=last, has_more=len(items) > len(shown))

    async def count_input_tokens(self, request: CreateResponse, *, tenant: str) -> int:
        refuse_unsupported(request)
        making = await self._prepare_turns(request, tenant, Ids())
        return await self._inference.count_tokens(making.turns.chat)

    async def compact(self, request: CompactConversation, *, tenant: str) -> CompactedConversation:
        create = CreateResponse(**dict(request))
        refuse_unsupported(create)
        making = await self._prepare_turns(create, tenant, Ids())
        try:
            async with asyncio.timeout(self._config.response_timeout_s):
                return await self._compactions.compact(making.turns.chat, making.conversation, making.ids, tenant)
        except TimeoutError:
            raise _too_long(self._config.response_timeout_s) from None

    def conversations(self) -> Conversations:
        return self._conversations

    async def _prepare(
        self,
        request: CreateResponse,
        tenant: str,
        ids: Ids,
        known: Known | None = None,
        so_far: SoFar | None = None,
    ) -> Making:
        """Everything that can be refused before a response exists."""
        refuse_unsupported(request)
        floor = await self._conversations.take_floor(request, ids.response, tenant=tenant)
        async with AsyncExitStack() as undo:
            if floor is not None:
                undo.push_async_callback(floor.release)
            making = await self._prepare_turns(request, tenant, ids, known, so_far)
            undo.pop_all()
        return replace(making, floor=floor)

    async def _prepare_turns(
        self,
        request: CreateResponse,
        tenant: str,
        ids: Ids,
        known: Known | None = None,
        so_far: SoFar | None = None,
    ) -> Making:
        request, removed = await self._reasoning.opened(request, tenant)
        kept = await self._conversations.past(request, tenant=tenant)
        if kept is not None:
            kept = await self._reasoning.opened_past(kept, request.model, tenant)
        conversation = await read_conversation(request, known or self._history, ids, tenant=tenant, kept=kept)
        request = with_updates(request, conversation.items)
        await self._kept_calls.recall(conversation, request.model, tenant)
        seen = so_far.seen_after(conversation) if so_far else conversation
        removed = [*removed, *conversation.left_out()]
        if seen.is_compacted():
            removed += await self._compactions.open(seen, tenant)
        conversation = await self._attachments.read(conversation, request.model, tenant=tenant)
        output = Output(ids, self._config.max_tool_output_chars, await self._reasoning.sealing(request, tenant))
        output.seal_told = await self._kept_calls.sealing(request, tenant)
        toolbox = await self._toolbox(request, seen, tenant, ids)
        chat = build_chat(request, conversation.messages(grouped=toolbox.grouped), toolbox)
        output.in_json = chat.response_format is not None
        limits = Limits(
            request.max_tool_calls or self._config.max_tool_calls,
            self._config.parallel_tool_calls,
            self._config.tool_timeout_s,
        )
        turns = Turns(fitting(self._inference, request), chat, conversation, output, toolbox, limits)
        for managed in request.context_management or ():  # one at most
            turns.compacting = await self._compactions.during(managed, request, conversation, output, tenant)
        if conversation.to_compact:
            turns.compacting = await self._compactions.instead(request, conversation, output, tenant)
        if so_far is not None:
            turns.go_on(so_far)
        return Making(request, tenant, conversation, ids, output, turns, int(time.time()), removed)

    async def _toolbox(self, given: CreateResponse, conversation: Conversation, tenant: str, ids: Ids) -> Toolbox:
        added = added_tools(conversation.items)
        tools = [*(given.tools or ()), *added]
        if not added and all(isinstance(tool, FunctionTool | CustomTool) for tool in tools):
            return Toolbox(given)
        asks = any(isinstance(tool, ASKS_FOR_NATIVE) for tool in tools)
        request = with_typed(given, added)
        setting = Setting(
            request,
            tenant,
            ids.response,
            self._tool_runtime,
            conversation.told,
            conversation.items,
            await self._natives.of(request.model) if asks else frozenset(),
            vector_stores=self._vector_stores,
        )
        with blaming_items(given):
            made = await checked_tools(request, setting)
            return Toolbox(request, made, setting.items, grouped=setting.grouped)

    def _live(self, making: Making) -> AsyncGenerator[Events]:
        """The outer generator, but for the numbers."""
        return self._told(making) if making.floor is None else with_floor(making.floor, self._told(making))

    async def _told(self, making: Making) -> AsyncGenerator[Events]:
        deadline = time.monotonic() + self._config.response_timeout_s
        begun = False
        try:
            async with aclosing(making.turns.run(piecemeal=making.request.stream is True)) as batches:
                if making.request.stream:
                    async with head_start(batches) as first:
                        begun = True
                        yield beginning(making.begin())
                        if events := await first:
                            yield events
                    del first
                async for events in batches:
                    begun = True
                    yield events
                    if time.monotonic() > deadline:
                        raise _too_long(self._config.response_timeout_s)
            final = making.ended()
            await making.keep(final, self._history)
            yield [terminal(final)]
        except (GeneratorExit, asyncio.CancelledError):
            if begun:
                # nobody listens any more, and whoever called is being cancelled
                self._keep_later(making, making.left())
            raise
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as exc:  # the stream's outer edge; a native panic is no Exception
            if not begun:
                raise
            error = exc if isinstance(exc, StackError) else _bug(exc, making.ids.response)
            error.repeats_work = bool(making.output.items)
            yield await self._fail(making, error)
            raise error from exc

    async def _fail(self, making: Making, error: StackError) -> Events:
        """The last events of a response that failed: what is open ends incomplete, and the cause is told."""
        events = making.turns.break_off()
        final = making.failed(error)
        if isinstance(error, StoreUnavailable):
            self._keep_later(making, final)  # who has waited for the store in vain is not to wait again
        else:
            await self._keep_quietly(making, final)
        return [*events, terminal(final)]

    def _keep_later(self, making: Making, final: Response) -> None:
        task = asyncio.create_task(self._keep_quietly(making, final))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep_quietly(self, making: Making, final: Response) -> None:
        try:
            await making.keep(final, self._history)
        except StackError as exc:
            _log.warning("a %s response was not stored: %s", final.status, exc.message)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._config.sweep_interval_s)
            try:
                swept = await self._kv.sweep()
                _log.debug("swept %d expired entries", swept)
            except StackError as exc:
                _log.warning("sweeping the store failed: %s", exc.message)


def _too_long(limit_s: float) -> UpstreamTimeout:
    return UpstreamTimeout(f"The response took longer than {limit_s:g} s (`responses.response_timeout_s`).")


def _bug(exc: BaseException, response_id: str) -> StackError:
    _log.error("response %s failed on a bug", response_id, exc_info=exc)
    return internal_error(response_id)
