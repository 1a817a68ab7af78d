"""ResponsesLoop: the Responses API over a chat model, whose turns alternate with tools that this server runs.

The methods of the API, nothing else: `prepare.py` builds a response, `run/` runs and streams it, `background/` runs
those that outlive their request, `store/` stores them.
"""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, nullcontext, suppress
from functools import partial
from typing import Any

import msgspec
from openai.types.responses import Response

from apis.accounts.accounts import Accounts, Caller
from apis.documents.reader import Reader
from apis.documents.vector_stores import VectorStores
from apis.errors import InvalidRequest, NotFound, StackError
from apis.events import ResponseEvent, ResponseEventBatch
from apis.fair_share import ONE_TENANT, Tenants
from apis.image_generator import ImageGenerator
from apis.inference import Inference
from apis.moderation import Moderation
from apis.responses import (
    Charge,
    CompactConversation,
    CompactedConversation,
    CreateResponse,
    DeliverySummary,
    HostedTool,
    InputItemListParams,
    InputTokenCount,
    ResponseListParams,
    Responses,
    ResponseTreeParams,
    Session,
    SpareCapacity,
    Steer,
    SteerResponse,
)
from apis.sink import Sink
from apis.storage.kv_store import Delete, Eviction, KVStore
from apis.storage.pages import Page
from apis.storage.records import reading_stored
from apis.tool_runtime import ToolRuntime
from apis.tool_servers import ToolServers
from apis.vaults.vaults import Vaults
from apis.webhooks import Webhooks
from providers.common.supervision import supervise
from providers.responses.background.background import BackgroundMetrics, BackgroundResponses
from providers.responses.background.observation import BackgroundObservation
from providers.responses.context.conversations import StoredConversations, page_input_items
from providers.responses.context.request_inference import RequestInferences
from providers.responses.events.ids import ResponseIds
from providers.responses.prepare import ResponsePreparer
from providers.responses.run.response_runner import ResponseRunner
from providers.responses.session import LoopSession, SessionHistory
from providers.responses.settings import LoopSettings
from providers.responses.store.history_cache import HistoryCache
from providers.responses.store.response_record import EVICTABLE_KINDS, LINE_KIND
from providers.responses.tools.request_tools import RequestTools

_log = logging.getLogger(__name__)


class ResponsesLoop(Responses):
    """The Responses API over one Inference and one KVStore, and over the tools' providers where they exist."""

    class Config(LoopSettings):
        """The fields of `LoopSettings`."""

    def __init__(  # noqa: PLR0913, PLR0917 - every API that it builds on is one argument
        self,
        config: Config,
        inference: Inference,
        kv_store: KVStore,
        reader: Reader,
        webhooks: Webhooks,
        tool_runtime: ToolRuntime | None,
        tool_servers: ToolServers | None,
        vector_stores: VectorStores | None,
        image_generator: ImageGenerator | None,
        moderation: Moderation | None,
        vaults: Vaults | None,
        accounts: Accounts,
        tenants: Tenants = ONE_TENANT,
    ) -> None:
        self._config = config
        self._kv = kv_store
        self._accounts = accounts
        self._webhooks = webhooks
        self._history = config.build_history(kv_store)
        self._conversations = StoredConversations(
            kv_store,
            self._history,
            config.reasoning_keys,
            background_s=config.background.max_duration_s,
            hides_reasoning=config.hide_reasoning,
        )
        self.hides_reasoning = config.hide_reasoning
        self._views = self._conversations.views
        self._request_tools = RequestTools(
            inference, tool_runtime, tool_servers, vector_stores, image_generator, reader, vaults=vaults
        )
        models = self._request_tools.model_catalog
        self._prompts = config.prompt_library()
        inferences = RequestInferences(
            inference, models, config.summary_model, moderation, hides_reasoning=config.hide_reasoning
        )
        self._preparer = ResponsePreparer(
            config, inferences, kv_store, reader, self._request_tools, self._conversations
        )
        self._runner = ResponseRunner(self._history, config.response_timeout_s)
        self._session_cache = HistoryCache(config.session_bytes, max_age_s=math.inf)
        self._background = BackgroundResponses(
            kv_store, self._history, self._preparer, webhooks, config.background, accounts, tenants
        )
        self._observation = BackgroundObservation(
            kv_store, config.background, self._background.event_log, self._background.registry, self._load, self._views
        )
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._prompts.load()
        self._kv.eviction = Eviction(EVICTABLE_KINDS, self._evict)
        self._sweeper = supervise("the sweep of the store", self._sweep)
        self._background.start()

    def machine_bound_state(self) -> str | None:
        if self._prompts.folder is None:
            return None
        return f"prompts are read from {str(self._prompts.folder)!r}; on several machines, copy it to each"

    def execute_deferred_with(self, capacity: SpareCapacity) -> None:
        self._background.execute_deferred_with(capacity)

    async def drain(self, *, at_once: bool = False) -> None:
        await self._background.drain(at_once=at_once)

    def count_running(self) -> int:
        return self._background.metrics().background_running

    def end_running(self) -> None:
        self._runner.end_running()

    async def close(self) -> None:
        await self._background.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait({self._sweeper})
        await self._runner.close()

    def resolve_prompt(self, request: CreateResponse) -> CreateResponse:
        with self._prompts.rendering(request) as rendered:
            return rendered

    async def respond(
        self,
        request: CreateResponse,
        sink: Sink[ResponseEvent],
        *,
        tenant: str,
        response_id: str | None = None,
        charge: Charge | None = None,
        caller: Caller | None = None,
    ) -> None:
        count_use = None if charge is None else charge.count_aside
        with self._prompts.rendering(request) as rendered:
            pending = await self._preparer.prepare(
                rendered, tenant, ResponseIds(response_id), caller=caller, count_use=count_use
            )
        lasting_key = await self._find_key(caller) if request.background else ""
        pending = pending.charged_to(charge, lasting_key)
        view = self._views.of_create(request)
        request = pending.request
        if request.background:
            async with pending.lock or nullcontext(), aclosing(self._background.create(pending)) as logged_batches:
                async for logged_events in logged_batches:
                    await sink.put(view.show_events(logged_events))
            return
        if request.is_prewarm:
            await self._runner.run_input_only(pending, sink, view)
        elif request.store is False:
            await self._runner.run(pending, sink, view)
        else:
            find_key = partial(self._find_key, caller)
            with self._background.steering.create_mailbox(pending, find_key) as mailbox:
                await self._runner.run(msgspec.structs.replace(pending, mailbox=mailbox), sink, view)
            if mailbox.mailbox is not None:
                self._background.steering.wake()

    async def _find_key(self, caller: Caller | None) -> str:
        """Return the id of the key for work that goes on without its request."""
        return "" if caller is None else await self._accounts.find_lasting_key(caller)

    async def find_window(self, model: str) -> int | None:
        return await self._request_tools.model_catalog.find_window(model)

    def open_session(self, *, tenant: str) -> Session:
        mailboxes = self._background.steering.mailboxes
        session_history = SessionHistory(self._history, self._session_cache, tenant)
        return LoopSession(tenant, session_history, self._preparer, self._prompts, self._runner, self._views, mailboxes)

    async def get(self, response_id: str, *, include: Sequence[str] = (), tenant: str) -> Response:
        response = await self._load(response_id, tenant)
        return (await self._views.of_response(include, response, tenant)).show_response(response)

    async def _load(self, response_id: str, tenant: str) -> Response:
        try:
            return await self._history.load_response(response_id, tenant=tenant)
        except NotFound:
            running = await self._background.get(response_id, tenant=tenant)
            # it may have ended between the two reads
            return running or await self._history.load_response(response_id, tenant=tenant)

    async def follow(
        self, response_id: str, starting_after: int, *, include: Sequence[str] = (), tenant: str
    ) -> AsyncGenerator[ResponseEventBatch]:
        begun = self._background.find_begun(response_id, tenant=tenant)
        view = await self._views.of_response(include, begun or await self._load(response_id, tenant), tenant)
        async with aclosing(self._background.follow(response_id, starting_after, tenant=tenant)) as batches:
            async for events in batches:
                yield view.show_events(events)

    async def delete(self, response_id: str, *, tenant: str) -> None:
        was_damaged = await self._background.delete(response_id, tenant=tenant)
        with suppress(NotFound) if was_damaged else nullcontext():
            await self._history.delete(response_id, tenant=tenant)
        await self._background.delete_log(response_id, tenant=tenant)

    async def cancel(self, response_id: str, *, tenant: str) -> Response:
        await self._background.cancel(response_id, tenant=tenant)
        response = await self._history.load_response(response_id, tenant=tenant)
        if not response.background:
            message = "Only a response that was made with `background` can be cancelled."
            raise InvalidRequest(message, param="response_id")
        return (await self._views.of_response((), response, tenant)).show_response(response)

    async def steer(self, request: SteerResponse, *, tenant: str) -> Steer:
        return await self._background.steer(request, tenant=tenant)

    async def end_after_turn(self, response_id: str, *, tenant: str) -> None:
        await self._background.end_after_turn(response_id, tenant=tenant)

    async def list_responses(self, params: ResponseListParams, *, tenant: str) -> Page[dict[str, Any]]:
        page = await self._history.list_responses(params, tenant=tenant)
        running = [] if params.after else await self._background.list_running(params, tenant=tenant)
        return Page([*running, *page.data], page.has_more, page.last_id)

    async def list_tree(self, response_id: str, params: ResponseTreeParams, *, tenant: str) -> Page[dict[str, Any]]:
        response = await self._load(response_id, tenant)
        running = await self._background.list_running(
            ResponseListParams.model_validate({"order": "asc"}), tenant=tenant
        )
        is_running = any(row["id"] == response_id for row in running)
        stored_id = response.previous_response_id if is_running else response_id
        rows, is_complete = list[dict[str, Any]](), True
        if stored_id is not None:
            # the previous response of a running one may have been deleted
            with suppress(NotFound) if is_running else nullcontext():
                tree = await self._history.load_tree(stored_id, tenant=tenant, limit=params.limit)
                rows, is_complete = tree.responses, tree.is_complete
        ids = {row["id"] for row in rows}
        children = [row for row in running if row["id"] == response_id or row["previous_response_id"] in ids]
        data = [*rows, *(row for row in children if row["id"] not in ids)]
        return Page(data, has_more=not is_complete)

    async def list_webhook_deliveries(self, response_id: str, *, tenant: str) -> Sequence[DeliverySummary]:
        await self._load(response_id, tenant)
        return await self._webhooks.list_deliveries(response_id, tenant=tenant)

    async def list_input_items(
        self, response_id: str, params: InputItemListParams, *, tenant: str
    ) -> Page[dict[str, Any]]:
        items = await self._background.load_input_items(response_id, tenant=tenant)
        if items is None:
            items = await self._history.load_input_items(response_id, tenant=tenant)
        with reading_stored(response_id):
            page = await page_input_items(items, params)
        return Page(await self._views.show_items(page.data, params.include or (), tenant), page.has_more)

    async def count_input_tokens(
        self, request: CreateResponse, *, tenant: str, caller: Caller | None = None
    ) -> InputTokenCount:
        with self._prompts.rendering(request) as rendered:
            pending = await self._preparer.prepare_unlocked(rendered, tenant, caller)
        return await self._preparer.token_counters.of_tenant(tenant).count(pending.agent_loop.chat)

    async def compact(
        self, request: CompactConversation, *, tenant: str, caller: Caller | None = None
    ) -> CompactedConversation:
        with self._prompts.rendering(CreateResponse(**dict(request))) as rendered:
            pending = await self._preparer.prepare_unlocked(rendered, tenant, caller)
        chat, compactor = pending.agent_loop.chat, self._preparer.compactor
        return await self._runner.run_in_time(compactor.compact(chat, pending.conversation, pending.ids, tenant))

    def metrics(self) -> BackgroundMetrics:
        return self._background.metrics()

    def describe_tools(self, *, tenant: str) -> Sequence[HostedTool]:
        return self._request_tools.describe(tenant)

    def observation(self) -> BackgroundObservation:
        return self._observation

    def conversations(self) -> StoredConversations:
        return self._conversations

    async def _evict(self, key: str) -> None:
        tenant, kind, name = key.split("/", 2)
        if kind == LINE_KIND:
            await self._kv.write([Delete(key)], durable=False)
        else:
            with suppress(NotFound):
                await self.delete(name, tenant=tenant)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._config.sweep_interval_s)
            try:
                count = await self._kv.sweep()
                _log.debug("swept %d expired entries", count)
            except StackError as exc:
                _log.warning("sweeping the store failed: %s", exc.message)
