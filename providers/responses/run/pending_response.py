"""PendingResponse: one response between its request and its end, and the response objects of each way to end."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec
from openai.types.responses import Response, ResponseError
from openai.types.responses.response import InputTransformation
from openai.types.responses.response import Moderation as ModerationResults

from apis.accounts.charges import Charge, Use
from apis.accounts.usage import count_response
from apis.chat import ChatRequest
from apis.deltas import Usage
from apis.errors import Overloaded, StackError, UpstreamTimeout, internal_error
from apis.responses import CreateResponse
from apis.storage.kv_store import Op
from apis.telemetry import Span, SpanType, open_span
from apis.wire.items import items_to_json
from providers.common.moderated_inference import RequestModeration
from providers.common.tracebacks import without_traceback
from providers.responses.context.conversation import Conversation
from providers.responses.context.prompt_cache.comparison import PromptComparison
from providers.responses.events.ids import ResponseIds
from providers.responses.events.output import ResponseOutput
from providers.responses.events.response_object import (
    IncompleteReason,
    ResponseStatus,
    begin_response,
    end_response,
    error_to_failure,
)
from providers.responses.events.unvalidated import add_extra
from providers.responses.run.agent_loop import AgentLoop
from providers.responses.run.checkpoint import Checkpoint
from providers.responses.run.open_mailbox import OpenMailbox
from providers.responses.store.conversation_lock import ConversationLock
from providers.responses.store.history import History
from providers.responses.store.history_cache import LoadedHistory
from providers.responses.store.turn_writer import FinishedResponse
from providers.responses.tools.registry import sum_tool_usage

_log = logging.getLogger(__name__)


class PendingResponse(msgspec.Struct, frozen=True):
    """A response that is prepared and not at its end. `lock` is held on the conversation that it adds to;
    `input_transformations` are the items of its input that no model sees; `comparison` is that of its prompt with the
    one of an earlier response, where the request names one; `prefill` lets the model's engine cache the prompt of a
    chat, and returns its tokens; `charge` is what its request has reserved, and `key_id` the key that sent it, where
    that can be looked at again later. `moderation` is what the request asks for; `mailbox_ops` delete the mailbox whose
    input is in that of the response, and `mailbox` is its own, if it can be steered in this process."""

    request: CreateResponse
    tenant: str
    conversation: Conversation
    ids: ResponseIds
    output: ResponseOutput
    agent_loop: AgentLoop
    created_at: int
    input_transformations: Sequence[InputTransformation] = ()
    lock: ConversationLock | None = None
    comparison: PromptComparison | None = None
    prefill: Callable[[ChatRequest], Awaitable[Usage]] | None = None
    charge: Charge | None = None
    key_id: str = ""
    moderation: RequestModeration | None = None
    mailbox_ops: Sequence[Op] = ()
    mailbox: OpenMailbox | None = None

    def charged_to(self, charge: Charge | None, key_id: str = "") -> "PendingResponse":
        """Return the response with the charge that its end is counted under, and the key of its request."""
        if charge is None and not key_id:
            return self
        return msgspec.structs.replace(self, charge=charge, key_id=key_id)

    @property
    def previous_history(self) -> LoadedHistory:
        """History that the response is stored after: none for a turn of a conversation, which stores its items
        itself."""
        return LoadedHistory() if self.request.conversation_id is not None else self.conversation.history

    def add_scores(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint with the scores of the output so far, where that is moderated."""
        if self.moderation is None:
            return checkpoint
        return msgspec.structs.replace(checkpoint, judged_output=self.moderation.output_scores)

    def build_initial_response(self, status: ResponseStatus = "in_progress") -> Response:
        """Return the response as it began. It is built for each use: stored here, it would be most of the memory of an
        open stream."""
        response = begin_response(self.request, self.ids.response_id, self.created_at, status)
        if self.input_transformations:
            response.input_transformations = [*self.input_transformations]
        if self.comparison is not None:
            response.prompt_cache_diagnostics = self.comparison.diagnostics
        return response

    def build_final_response(self) -> Response:
        """Return the response after its last turn."""
        reason = self.agent_loop.incomplete_reason
        response = self._end("incomplete" if reason else "completed", reason=reason)
        if (stop_sequence := self.agent_loop.stop_sequence) is not None:
            add_extra(response, {**(response.model_extra or {}), "stop_sequence": stop_sequence})
        return response

    def build_failed_response(self, error: StackError) -> Response:
        """Return the response as an error ended it. The open items must have been closed."""
        return self._end("failed", error=error_to_failure(error))

    def build_cancelled_response(self) -> Response:
        """Close the open items and return the response as its client left it."""
        self.agent_loop.close_open_items()
        return self._end("cancelled")

    def _end(
        self, status: ResponseStatus, *, reason: IncompleteReason | None = None, error: ResponseError | None = None
    ) -> Response:
        state = self.agent_loop.state
        initial = self.build_initial_response()
        if self.comparison is not None:
            initial.prompt_cache_diagnostics = self.comparison.with_usage(state.usage)
        if self.moderation is not None:
            initial.moderation = ModerationResults.model_validate(self.moderation.build_results())
        items = self.output.finished_items()
        tool_usage = sum_tool_usage(items, state.tool_results)
        return end_response(initial, status, items, state.usage, reason=reason, error=error, tool_usage=tool_usage)

    async def store(self, response: Response, history: History) -> bool:
        """Store the final response unless the request forbids it; return whether it was stored. Raises the lock's
        error where the conversation's lock was lost."""
        if self.request.store is False:
            if self.mailbox is not None:
                await self.mailbox.close()
            await history.write(self.mailbox_ops)
            return False
        input_json = await self.conversation.store_input_items(self.ids)
        conversation_ops = await self.build_conversation_ops(response, input_json)
        charge, versions = self.charge, None
        charge_ops = charge.end_ops(use_of_response(response)) if charge is not None else ()
        finished = FinishedResponse(
            response,
            input_json,
            self.agent_loop.state.tool_results,
            [*conversation_ops, *charge_ops, *self.mailbox_ops],
            self.conversation.root,
        )
        if self.mailbox is not None:
            finished = await self.mailbox.complete(finished)
        try:
            with store_span():
                versions = await history.save(finished, tenant=self.tenant, history=self.previous_history)
        finally:
            if charge is not None:
                charge.confirm(versions and versions[len(conversation_ops) :])
        if versions is None and self.lock is not None:
            raise await self.lock.lost_error()
        return versions is not None

    async def build_conversation_ops(self, response: Response, input_json: bytes) -> Sequence[Op]:
        """Return the writes that add the response to its conversation and release the lock; they belong in the write
        of the response. A failed or cancelled response adds nothing, so that the client can repeat it."""
        if self.lock is None:
            return ()
        if response.status not in ("completed", "incomplete"):
            await self.lock.release()
            return ()
        tool_results = {**self.conversation.tool_results, **self.agent_loop.state.tool_results}
        return await self.lock.build_append_and_release_ops(input_json, items_to_json(response.output), tool_results)


@asynccontextmanager
async def time_limit(limit_s: float, setting: str) -> AsyncGenerator[None]:
    """End the work within the context after `limit_s`. Raises UpstreamTimeout then, which names the setting."""
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            yield
    except TimeoutError as exc:
        if limit.expired():
            raise UpstreamTimeout(f"The response took longer than {limit_s:g} s (`{setting}`).") from exc
        raise


def use_of_response(response: Response) -> Use:
    """Return what a response that has ended has used. One that was cancelled has used at least what it has reserved: a
    model has worked for it, whose tokens are known in part."""
    is_unknown = response.status == "cancelled"
    return Use(response.model, count_response(response), is_unknown, service_tier=response.service_tier or "")


def failure_to_error(exc: BaseException, response_id: str) -> StackError:
    """Return what ended a response as the error that the client gets, without what the response held."""
    return without_traceback(exc) if isinstance(exc, StackError) else bug_to_error(exc, response_id)


def shutdown_error() -> Overloaded:
    """Return the error of a response that the end of the process cut off."""
    return Overloaded("The server was shut down before the response was complete. Send the request again.")


def bug_to_error(exc: BaseException, response_id: str) -> StackError:
    """Log an exception that no provider should raise, and return the error that the client gets."""
    _log.error("response %s failed on a bug", response_id, exc_info=exc)
    without_traceback(exc)
    return internal_error(response_id)


def store_span() -> Span:
    """Return the span of the write of a final response, with all that is stored in the same step."""
    return open_span(SpanType.STORE, "response", {"stack.store.operation": "response"})
