"""ResponsePreparer: from a request to a PendingResponse; every refusal of a request is raised here.

    request -> history and mail -> items, sorted once -> conversation -> tools -> chat -> AgentLoop -> PendingResponse

`_prepare` has all steps in their order. Each one asks the ItemIndex for the types of items that it is about.
"""

import time
from functools import partial

import msgspec

from apis.accounts.accounts import Caller
from apis.documents.reader import Reader
from apis.responses import CreateResponse
from apis.storage.kv_store import Delete, KVStore, Op
from providers.common.moderated_inference import CountUse
from providers.common.permissions import require_prepared
from providers.responses.context.attachments import Attachments
from providers.responses.context.chat_request import (
    accept_request,
    apply_configuration_updates,
    build_chat,
    check_large_format,
)
from providers.responses.context.compaction import Compactor
from providers.responses.context.conversation import Conversation
from providers.responses.context.conversations import StoredConversations
from providers.responses.context.input_items import (
    HistorySource,
    drop_repeated_outputs,
    ends_with_trigger,
    read_items,
    reads_current_turn_only,
)
from providers.responses.context.prompt_cache.comparison import PromptComparer
from providers.responses.context.replay import rewrite_for_model
from providers.responses.context.request_inference import RequestInferences
from providers.responses.events.ids import ResponseIds
from providers.responses.events.output import ResponseOutput
from providers.responses.item_index import ItemIndex
from providers.responses.run.agent_loop import AgentLoop
from providers.responses.run.checkpoint import AcceptedResponse, ResumePoint
from providers.responses.run.mailbox import mailbox_key, read_input, read_mailbox
from providers.responses.run.pending_response import PendingResponse
from providers.responses.settings import LoopSettings
from providers.responses.store.history_cache import LoadAllowance, LoadedHistory, TurnPosition
from providers.responses.tools.offered import OfferedTools
from providers.responses.tools.request_tools import RequestTools


class ResponsePreparer:
    """Prepares responses over one stack. `compactor` also serves the compaction of whole conversations."""

    def __init__(
        self,
        config: LoopSettings,
        inferences: RequestInferences,
        kv_store: KVStore,
        reader: Reader,
        request_tools: RequestTools,
        conversations: StoredConversations,
    ) -> None:
        self._config = config
        self._kv = kv_store
        self._inferences = inferences
        self.inference = inferences.inference
        self._request_tools = request_tools
        self._conversations = conversations
        self._attachments = Attachments(reader, request_tools.model_catalog)
        self._prefill = inferences.prefill  # bound once for all responses
        self._models = request_tools.model_catalog
        self._sealed_content = conversations.views.sealed_content
        self.token_counters = self._inferences.token_counters
        self._comparer = PromptComparer(conversations.history, self._sealed_content, self.token_counters)
        self.compactor = Compactor(inferences.inference, self._sealed_content, self.token_counters)

    async def prepare(
        self,
        request: CreateResponse,
        tenant: str,
        ids: ResponseIds,
        *,
        history_source: HistorySource | None = None,
        accepted: AcceptedResponse | None = None,
        caller: Caller | None = None,
        count_use: CountUse | None = None,
    ) -> PendingResponse:
        """Return the response to a request whose prompt was rendered. It holds the lock of its conversation, if it adds
        to one. What it uses besides its own turns is counted by `count_use`. A response that was accepted before, also
        by another worker, has `accepted`. Raises StackError for a request that cannot be served, also for a model
        or tool that the `caller` may not use."""
        request = accept_request(request)
        if request.store is not False and accepted is None:
            await self._kv.require_room(tenant)
        lock = None
        if request.conversation_id is not None and request.store is not False:
            lock = await self._conversations.acquire_lock(request, ids.response_id, tenant=tenant)
        accepted = accepted or AcceptedResponse(int(time.time()))
        source = history_source or self._conversations.history
        try:
            pending = await self._prepare(request, tenant, ids, source, accepted, caller, count_use)
            return pending if lock is None else msgspec.structs.replace(pending, lock=lock)
        except BaseException:
            if lock is not None:
                await lock.release()
            raise

    async def prepare_unlocked(self, request: CreateResponse, tenant: str, caller: Caller | None) -> PendingResponse:
        """Return a response that will not run: to count its tokens, or to compact its conversation. Its prompt was
        rendered, and its input is not moderated."""
        request = accept_request(request.model_copy(update={"moderation": None}))
        source, accepted = self._conversations.history, AcceptedResponse(int(time.time()))
        return await self._prepare(request, tenant, ResponseIds(), source, accepted, caller)

    async def _prepare(
        self,
        request: CreateResponse,
        tenant: str,
        ids: ResponseIds,
        source: HistorySource,
        accepted: AcceptedResponse,
        caller: Caller | None,
        count_use: CountUse | None = None,
    ) -> PendingResponse:
        config, inferences, sealed_content = self._config, self._inferences, self._sealed_content
        resume_point = accepted.resume_point
        checkpoint = None if resume_point is None else resume_point.checkpoint

        # all items before the response, within one allowance of bytes
        allowance = LoadAllowance(source.max_bytes)
        history = await self._load_history(request, tenant, source, allowance, accepted.previous)
        mailbox_ops = list[Op]()
        if history.has_mailbox or history.sent_items:
            request, mailbox_ops = await self._with_mail(request, history, tenant)
        index, tool_results, hidden = await read_items(
            request, history, source, sealed_content, ids, tenant=tenant, allowance=allowance
        )
        conversation = Conversation(
            history,
            index.input_items,
            tool_results,
            request.instructions,
            current_turn_only=reads_current_turn_only(request),
            must_compact=ends_with_trigger(request),
            root=self._choose_root(request, tenant, history, source, ids),
        )

        # what the items set, seal and show; plain text has nothing to open or to fetch
        is_plain = index.is_plain_text and not (request.tools or request.vault_ids or resume_point)
        if not is_plain:
            request, index, conversation = await self._open_items(request, index, conversation, resume_point, tenant)

        # what the key allows, the tools and the chat
        if caller is not None and caller.is_restricted:
            await require_prepared(caller, request, index, self.inference)
        if is_plain:
            toolbox = OfferedTools(request)
        else:
            new_results = {} if checkpoint is None else checkpoint.tool_results
            all_results = {**conversation.tool_results, **new_results}
            toolbox = await self._request_tools.build(request, index, all_results, tenant, ids.response_id)
        messages = await conversation.read_messages(supports_namespaces=toolbox.supports_namespaces)
        if request.text is not None:
            await check_large_format(request.text)
        chat = build_chat(request, messages, toolbox, conversation.root)

        # what the turns run on
        seal_reasoning, seal_result = await sealed_content.build_seals(request, tenant)
        output = ResponseOutput(
            ids,
            config.max_tool_output_chars,
            reasoning_sealer=seal_reasoning,
            tool_result_sealer=seal_result,
            is_json=chat.response_format is not None,
            hides_reasoning=self._conversations.views.hides_reasoning,
            items=() if resume_point is None else resume_point.output_items,
        )
        moderation = None
        if request.moderation is not None:
            moderation = await inferences.moderate(
                request,
                request.moderation,
                index.input_items,
                judged_input=accepted.judged_input,
                judged_output=None if checkpoint is None else checkpoint.judged_output,
                count_use=count_use,
            )
        compaction = None
        if conversation.must_compact or request.context_management:
            compaction = await self.compactor.create_response_compaction(request, conversation, output, tenant)
        agent_loop = AgentLoop(
            config,
            await inferences.build(request, toolbox, moderation),
            chat,
            conversation,
            toolbox,
            output,
            checkpoint,
            max_calls=request.max_tool_calls or config.max_tool_calls,
            compaction=compaction,
            # the usage of a chat that was shortened says nothing of the whole one
            record_usage=None if request.truncation == "auto" else self.token_counters.of_tenant(tenant).record_usage,
        )
        request = await inferences.with_used_options(request, chat)
        comparison = None
        if (cache := request.prompt_cache_options) is not None and cache.comparison_response_id is not None:
            comparison = await self._comparer.compare(
                request, cache.comparison_response_id, chat, conversation, tenant=tenant
            )
        return PendingResponse(
            request,
            tenant,
            conversation,
            ids,
            output,
            agent_loop,
            accepted.created_at,
            hidden,
            comparison=comparison,
            prefill=self._prefill,
            moderation=moderation,
            mailbox_ops=mailbox_ops,
        )

    async def _open_items(
        self,
        request: CreateResponse,
        index: ItemIndex,
        conversation: Conversation,
        resume_point: ResumePoint | None,
        tenant: str,
    ) -> tuple[CreateResponse, ItemIndex, Conversation]:
        """Return the request with the options that its items set, all items, and the conversation with what they seal,
        show and name. After them are those that an earlier attempt, which `resume_point` continues, has made."""
        resumed_items = () if resume_point is None else resume_point.input_items
        request = apply_configuration_updates(request, index)
        tool_results = await self._sealed_content.unseal_tool_results(index, conversation.tool_results, tenant)
        tool_results = await rewrite_for_model(index, tool_results, self._models, request.model)
        compactions = await self.compactor.open_latest_compaction(index.followed_by(resumed_items), tenant)
        tool_state = await self.compactor.read_tool_state(compactions)
        sees_images = await self._attachments.sees_generated_images(request, index)
        attachments = await self._attachments.read_files(request, index, tenant=tenant)
        index = drop_repeated_outputs(index)
        conversation = msgspec.structs.replace(
            conversation,
            input_items=index.input_items,
            tool_results={**tool_state.tool_results, **tool_results},
            attachments=attachments,
            compactions=compactions,
            tool_items=tool_state.items,
            sees_images=sees_images,
        )
        return request, index.followed_by(resumed_items).preceded_by(tool_state.items), conversation

    def _choose_root(
        self, request: CreateResponse, tenant: str, history: LoadedHistory, source: HistorySource, ids: ResponseIds
    ) -> str:
        """Return the root of the response's chain; empty where nothing can continue the response."""
        is_continuable = request.store is not False or source is not self._conversations.history
        new_root = ids.response_id if is_continuable else None
        return self._conversations.roots.choose(request, tenant, history.root, new_root)

    async def _with_mail(
        self, request: CreateResponse, history: LoadedHistory, tenant: str
    ) -> tuple[CreateResponse, list[Op]]:
        """Return the request with the input before its own that was sent to the response which it continues, and the
        write that ends that mailbox."""
        items, ops = [*history.sent_items], list[Op]()
        if history.has_mailbox:
            key = mailbox_key(tenant, request.previous_response_id or "")
            entry = await self._kv.get(key)
            items += read_mailbox(self._kv, key, entry)[1]
            ops += [] if entry is None else [Delete(key)]
        return request.model_copy(update={"input": [*items, *read_input(request.input)]}) if items else request, ops

    async def _load_history(
        self,
        request: CreateResponse,
        tenant: str,
        source: HistorySource,
        allowance: LoadAllowance,
        kept_position: TurnPosition | None,
    ) -> LoadedHistory:
        """Return the conversation or the chain that the request follows, empty where it follows none. A turn at
        `kept_position` is there also after its response was deleted. Raises NotFound and InvalidRequest."""
        if request.conversation_id is not None:
            history = await self._conversations.load_history(
                request.conversation_id,
                tenant=tenant,
                allowance=allowance,
                accepts=partial(self.compactor.suffice, request, tenant),
            )
            index = ItemIndex(history.items)
            await self._sealed_content.unseal_reasoning(index, request.model, tenant)
            return msgspec.structs.replace(history, items=index.items)
        if request.previous_response_id is None:
            return LoadedHistory()
        previous_id = request.previous_response_id
        if kept_position is None:
            return await source.load_history(previous_id, tenant=tenant, allowance=allowance)
        return await self._conversations.history.load_history(
            previous_id, tenant=tenant, allowance=allowance, kept_position=kept_position
        )
