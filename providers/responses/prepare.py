"""ResponsePreparer: from a request to a PendingResponse, in one pass; every refusal of a request is raised here.

    request -> unsealed request -> conversation -> tools -> chat -> output -> AgentLoop -> PendingResponse

Each stage takes the complete result of the one before and returns a complete value.
"""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import msgspec
from openai.types.responses.response import InputTransformation

from apis.accounts.accounts import Caller
from apis.documents.reader import Reader
from apis.responses import CreateResponse
from apis.storage.kv_store import Delete, KVStore, Op
from providers.common.moderated_inference import CountUse, RequestModeration
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
from providers.responses.prompts.library import PromptLibrary
from providers.responses.run.agent_loop import AgentLoop
from providers.responses.run.checkpoint import AcceptedResponse, ResumePoint
from providers.responses.run.mailbox import mailbox_key, read_input, read_mailbox
from providers.responses.run.pending_response import PendingResponse
from providers.responses.settings import LoopSettings
from providers.responses.store.history_cache import LoadAllowance, LoadedHistory
from providers.responses.tools.request_tools import RequestTools


class _Context(NamedTuple):
    """Everything before a response: its request with the options that its items set, the conversation, all items, also
    the output that is resumed, those of the input that no model sees, and the writes that delete the mailbox that was
    read."""

    request: CreateResponse
    conversation: Conversation
    items: ItemIndex
    transformations: Sequence[InputTransformation]
    mailbox_ops: Sequence[Op] = ()


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
        prompts: PromptLibrary,
    ) -> None:
        self._prompts = prompts
        self._config = config
        self._kv = kv_store
        self._inferences = inferences
        self.inference = inferences.inference
        self._request_tools = request_tools
        self._conversations = conversations
        self._attachments = Attachments(reader, request_tools.model_catalog)
        self._prefill = self._inferences.prefill  # bound once for all responses
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
        caller: Caller | None = None,
        count_use: CountUse | None = None,
    ) -> PendingResponse:
        """Return the response, which holds the lock of its conversation, if it adds to one. What it uses besides its
        own turns is counted by `count_use`. Raises StackError for a request that cannot be served, also for a model or
        tool that the `caller` may not use."""
        if request.prompt is None:
            return await self.prepare_again(
                request, tenant, ids, history_source=history_source, caller=caller, count_use=count_use
            )
        with self._prompts.rendering(request) as rendered:
            return await self.prepare_again(
                rendered, tenant, ids, history_source=history_source, caller=caller, count_use=count_use
            )

    async def prepare_again(
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
        """Return what `prepare` returns for a request that has no prompt, or whose prompt was rendered before: that of
        a response which was `accepted` before, also by another worker."""
        request = accept_request(request)
        if request.store is not False and accepted is None:
            await self._kv.require_room(tenant)
        lock = await self._conversations.acquire_lock(request, ids.response_id, tenant=tenant)
        accepted = accepted or AcceptedResponse(int(time.time()))
        source = history_source or self._conversations.history
        try:
            pending = await self._prepare(
                request, tenant, ids, source, accepted=accepted, caller=caller, count_use=count_use
            )
            return pending if lock is None else msgspec.structs.replace(pending, lock=lock)
        except BaseException:
            if lock is not None:
                await lock.release()
            raise

    async def prepare_unlocked(self, request: CreateResponse, tenant: str, caller: Caller | None) -> PendingResponse:
        """Return a response that will not run: to count its tokens, or to compact its conversation. Its input is not
        moderated."""
        with nullcontext(request) if request.prompt is None else self._prompts.rendering(request) as rendered:
            request = accept_request(rendered.model_copy(update={"moderation": None}))
            source, accepted = self._conversations.history, AcceptedResponse(int(time.time()))
            return await self._prepare(request, tenant, ResponseIds(), source, accepted=accepted, caller=caller)

    async def _prepare(
        self,
        request: CreateResponse,
        tenant: str,
        ids: ResponseIds,
        source: HistorySource,
        *,
        accepted: AcceptedResponse,
        caller: Caller | None,
        count_use: CountUse | None = None,
    ) -> PendingResponse:
        resume_point = accepted.resume_point
        before = await self._read_context(request, tenant, ids, source, resume_point)
        request, conversation, index = before.request, before.conversation, before.items
        output_results = resume_point.checkpoint.tool_results if resume_point is not None else {}
        tool_results = {**conversation.tool_results, **output_results}
        if caller is not None and caller.is_restricted:
            await require_prepared(caller, request, index, self._inferences.inference)
        toolbox = await self._request_tools.build(
            request, index, tool_results, tenant=tenant, response_id=ids.response_id
        )
        messages = await conversation.read_messages(supports_namespaces=toolbox.supports_namespaces)
        if request.text is not None:
            await check_large_format(request.text)
        chat = build_chat(request, messages, toolbox, conversation.root)
        output = await self._build_output(request, tenant, ids, resume_point, is_json=chat.response_format is not None)
        moderation = request.moderation and await self._moderate(request, index, accepted, count_use)
        agent_loop = AgentLoop(
            *(self._config, await self._inferences.build(request, toolbox, moderation), chat),
            *(conversation, toolbox, output, None if resume_point is None else resume_point.checkpoint),
            max_calls=request.max_tool_calls or self._config.max_tool_calls,
            compaction=await self.compactor.create_response_compaction(request, conversation, output, tenant),
            # the usage of a chat that was shortened says nothing of the whole one
            record_usage=None if request.truncation == "auto" else self.token_counters.of_tenant(tenant).record_usage,
        )
        request = await self._inferences.with_used_options(request, chat)
        return PendingResponse(
            request,
            tenant,
            conversation,
            ids,
            output,
            agent_loop,
            accepted.created_at,
            before.transformations,
            comparison=await self._comparer.compare(request, chat, conversation, tenant=tenant),
            prefill=self._prefill,
            moderation=moderation,
            mailbox_ops=before.mailbox_ops,
        )

    async def _moderate(
        self, request: CreateResponse, index: ItemIndex, accepted: AcceptedResponse, count_use: CountUse | None
    ) -> RequestModeration | None:
        resume_point = accepted.resume_point
        return await self._inferences.moderate(
            request,
            index.input_items,
            judged_input=accepted.judged_input,
            judged_output=None if resume_point is None else resume_point.checkpoint.judged_output,
            count_use=count_use,
        )

    async def _build_output(
        self,
        request: CreateResponse,
        tenant: str,
        ids: ResponseIds,
        resume_point: ResumePoint | None,
        *,
        is_json: bool,
    ) -> ResponseOutput:
        return ResponseOutput(
            ids,
            self._config.max_tool_output_chars,
            reasoning_sealer=await self._sealed_content.build_reasoning_seal(request, tenant),
            tool_result_sealer=await self._sealed_content.build_result_seal(request, tenant),
            is_json=is_json,
            hides_reasoning=self._conversations.views.hides_reasoning,
            items=resume_point.output_items if resume_point is not None else (),
        )

    async def _read_context(
        self,
        request: CreateResponse,
        tenant: str,
        ids: ResponseIds,
        source: HistorySource,
        resume_point: ResumePoint | None,
    ) -> _Context:
        """Return everything before the response, as the model will read it, and the request with the options that its
        items set."""
        allowance = LoadAllowance(source.max_bytes)
        history, mailbox_ops = LoadedHistory(), list[Op]()
        if request.previous_response_id is not None or request.conversation_id is not None:
            history = await self._load_history(request, tenant, source, allowance)
        if history.has_mailbox or history.sent_items:
            request, mailbox_ops = await self._with_mail(request, history, tenant)
        index, tool_results, hidden = await read_items(
            request, history, source, self._sealed_content, ids, tenant=tenant, allowance=allowance
        )
        is_continuable = request.store is not False or source is not self._conversations.history
        conversation = Conversation(
            history,
            index.input_items,
            tool_results,
            request.instructions,
            current_turn_only=reads_current_turn_only(request),
            must_compact=ends_with_trigger(request),
            root=self._conversations.roots.choose(
                request, tenant, history.root, ids.response_id if is_continuable else None
            ),
        )
        output_items = resume_point.input_items if resume_point is not None else ()
        if index.is_plain_text and not (request.tools or output_items):  # there is nothing to open or to fetch
            return _Context(request, conversation, index, hidden, mailbox_ops)
        request = apply_configuration_updates(request, index)
        tool_results = await self._sealed_content.unseal_tool_results(index, tool_results, tenant)
        tool_results = await rewrite_for_model(index, tool_results, self._models, request.model)
        compactions = await self.compactor.open_latest_compaction(index.followed_by(output_items), tenant)
        sees_images = await self._attachments.sees_generated_images(request, index)
        attachments = await self._attachments.read_files(request, index, tenant=tenant)
        index = drop_repeated_outputs(index)
        conversation = msgspec.structs.replace(
            conversation,
            input_items=index.input_items,
            tool_results=tool_results,
            attachments=attachments,
            compactions=compactions,
            sees_images=sees_images,
        )
        return _Context(request, conversation, index.followed_by(output_items), hidden, mailbox_ops)

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
        self, request: CreateResponse, tenant: str, source: HistorySource, allowance: LoadAllowance
    ) -> LoadedHistory:
        """Return the conversation or the chain that the request follows. Raises NotFound and InvalidRequest."""
        if request.conversation_id is not None:
            history = await self._conversations.load_history(
                request.conversation_id, tenant=tenant, allowance=allowance
            )
            index = ItemIndex(history.items)
            await self._sealed_content.unseal_reasoning(index, request.model, tenant)
            return msgspec.structs.replace(history, items=index.items)
        return await source.load_history(request.previous_response_id or "", tenant=tenant, allowance=allowance)
