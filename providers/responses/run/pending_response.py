"""Making: one response while it is made, and the ways in which it can end."""

from collections.abc import Sequence
from dataclasses import dataclass

from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseFailedEvent,
    ResponseIncompleteEvent,
    ResponseInProgressEvent,
    ResponseStreamEvent,
)
from openai.types.responses.response import InputTransformation

from apis.errors import StackError, error_to_failure
from apis.responses import CreateResponse
from apis.storage.kv_store import Op
from apis.wire.items import items_to_json
from providers.responses.context.conversation import Conversation
from providers.responses.events.ids import ResponseIds
from providers.responses.events.output import ResponseOutput
from providers.responses.events.response_object import ResponseStatus, begin_response, end_response
from providers.responses.run.agent_loop import AgentLoop
from providers.responses.store.conversation_lock import ConversationLock
from providers.responses.store.history import FinishedResponse, History
from providers.responses.store.history_cache import LoadedHistory


@dataclass(frozen=True, slots=True)
class PendingResponse:
    """A response that is being made, and all that it is made of."""

    request: CreateResponse
    tenant: str
    conversation: Conversation
    ids: ResponseIds
    output: ResponseOutput
    agent_loop: AgentLoop
    created_at: int
    input_transformations: Sequence[InputTransformation] = ()
    lock: ConversationLock | None = None

    @property
    def previous_history(self) -> LoadedHistory:
        """What it is kept after: a turn of a conversation stands alone."""
        return LoadedHistory() if self.request.conversation_id is not None else self.conversation.history

    def build_initial_response(self, status: ResponseStatus = "in_progress") -> Response:
        """The response as it began. Made anew where it is needed: held, it would be most of an open stream's memory."""
        begun = begin_response(self.request, self.ids.response_id, self.created_at, status)
        if self.input_transformations:
            begun.input_transformations = [*self.input_transformations]
        return begun

    def build_final_response(self) -> Response:
        """As it is when the turns came to their end."""
        reason = self.agent_loop.incomplete_reason
        status: ResponseStatus = "incomplete" if reason else "completed"
        return end_response(
            self.build_initial_response(), status, self.output.finished_items(), self.agent_loop.usage, reason=reason
        )

    def build_failed_response(self, error: StackError) -> Response:
        """As it is when an error stopped the turns; what was open has been broken off."""
        failure = error_to_failure(error)
        return end_response(
            self.build_initial_response(), "failed", self.output.finished_items(), self.agent_loop.usage, error=failure
        )

    def build_cancelled_response(self) -> Response:
        """As it is when nobody wants it any more."""
        self.agent_loop.close_open_items()
        return end_response(
            self.build_initial_response(), "cancelled", self.output.finished_items(), self.agent_loop.usage
        )

    async def store(
        self, response: Response, history: History, input_json: bytes | None = None, extra_ops: Sequence[Op] = ()
    ) -> bool:
        """Store how it ended, unless the request says otherwise, and `also`, or neither; whether it was stored.
        `given` are the request's items where they have been given their ids before."""
        if self.request.store is False:
            return False
        input_json = self.conversation.input_items_to_json(self.ids) if input_json is None else input_json
        kept = FinishedResponse(
            response,
            input_json,
            self.agent_loop.tool_results,
            [*extra_ops, *await self.build_conversation_ops(response, input_json)],
        )
        done = await history.save(kept, tenant=self.tenant, history=self.previous_history)
        if not done and self.lock is not None:
            raise self.lock.lost_error()
        return done

    async def build_conversation_ops(self, response: Response, input_json: bytes) -> Sequence[Op]:
        """What adds it to its conversation, with its floor given up: to be written with the response. One that failed
        or was cancelled adds nothing, so that it can be asked for again."""
        if self.lock is None:
            return ()
        if response.status not in ("completed", "incomplete"):
            await self.lock.release()
            return ()
        told = {**self.conversation.tool_results, **self.agent_loop.tool_results}
        return await self.lock.build_append_and_release_ops(input_json, items_to_json(response.output), told)


def in_progress_event(response: Response) -> ResponseStreamEvent:
    """The event that tells that it is being made."""
    return ResponseInProgressEvent(type="response.in_progress", response=response, sequence_number=0)


def terminal_event(response: Response) -> ResponseStreamEvent:
    """The event that tells how it ended; there is none for a cancelled one."""
    match response.status:
        case "completed":
            return ResponseCompletedEvent(type="response.completed", response=response, sequence_number=0)
        case "incomplete":
            return ResponseIncompleteEvent(type="response.incomplete", response=response, sequence_number=0)
        case _:
            return ResponseFailedEvent(type="response.failed", response=response, sequence_number=0)


def assign_sequence_numbers(events: Sequence[ResponseStreamEvent], next_number: int) -> int:
    """Give events their numbers, from `number` on; returns the next. The one place where they get them."""
    for event in events:
        vars(event)["sequence_number"] = next_number  # pydantic's own way takes as long as all else here
        next_number += 1
    return next_number
