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
from providers.responses.context.conversation import Conversation
from providers.responses.events.ids import Ids
from providers.responses.events.output import Output
from providers.responses.events.response_object import Status, begin_response, end_response
from providers.responses.run.agent_loop import Turns
from providers.responses.store.conversation_lock import Floor
from providers.responses.store.history import Finished, History, items_to_json
from providers.responses.store.history_cache import Past


@dataclass(frozen=True, slots=True)
class Making:
    """A response that is being made, and all that it is made of."""

    request: CreateResponse
    tenant: str
    conversation: Conversation
    ids: Ids
    output: Output
    turns: Turns
    created_at: int
    removed: Sequence[InputTransformation] = ()
    floor: Floor | None = None

    @property
    def past(self) -> Past:
        """What it is kept after: a turn of a conversation stands alone."""
        return Past() if self.request.conversation_id is not None else self.conversation.past

    def begin(self, status: Status = "in_progress") -> Response:
        """The response as it began. Made anew where it is needed: held, it would be most of an open stream's memory."""
        begun = begin_response(self.request, self.ids.response, self.created_at, status)
        if self.removed:
            begun.input_transformations = [*self.removed]
        return begun

    def ended(self) -> Response:
        """As it is when the turns came to their end."""
        reason = self.turns.reason
        status: Status = "incomplete" if reason else "completed"
        return end_response(self.begin(), status, self.output.finished(), self.turns.usage, reason=reason)

    def failed(self, error: StackError) -> Response:
        """As it is when an error stopped the turns; what was open has been broken off."""
        failure = error_to_failure(error)
        return end_response(self.begin(), "failed", self.output.finished(), self.turns.usage, error=failure)

    def left(self) -> Response:
        """As it is when nobody wants it any more."""
        self.turns.break_off()
        return end_response(self.begin(), "cancelled", self.output.finished(), self.turns.usage)

    async def keep(
        self, final: Response, history: History, given: bytes | None = None, also: Sequence[Op] = ()
    ) -> bool:
        """Store how it ended, unless the request says otherwise, and `also`, or neither; whether it was stored.
        `given` are the request's items where they have been given their ids before."""
        if self.request.store is False:
            return False
        given = self.conversation.given_json(self.ids) if given is None else given
        kept = Finished(final, given, self.turns.told, [*also, *await self.adds(final, given)])
        done = await history.save(kept, tenant=self.tenant, past=self.past)
        if not done and self.floor is not None:
            raise self.floor.lost()
        return done

    async def adds(self, final: Response, given: bytes) -> Sequence[Op]:
        """What adds it to its conversation, with its floor given up: to be written with the response. One that failed
        or was cancelled adds nothing, so that it can be asked for again."""
        if self.floor is None:
            return ()
        if final.status not in ("completed", "incomplete"):
            await self.floor.release()
            return ()
        told = {**self.conversation.told, **self.turns.told}
        return await self.floor.ending(given, items_to_json(final.output), told)


def in_progress(response: Response) -> ResponseStreamEvent:
    """The event that tells that it is being made."""
    return ResponseInProgressEvent(type="response.in_progress", response=response, sequence_number=0)


def terminal(final: Response) -> ResponseStreamEvent:
    """The event that tells how it ended; there is none for a cancelled one."""
    match final.status:
        case "completed":
            return ResponseCompletedEvent(type="response.completed", response=final, sequence_number=0)
        case "incomplete":
            return ResponseIncompleteEvent(type="response.incomplete", response=final, sequence_number=0)
        case _:
            return ResponseFailedEvent(type="response.failed", response=final, sequence_number=0)


def number_on(events: Sequence[ResponseStreamEvent], number: int) -> int:
    """Give events their numbers, from `number` on; returns the next. The one place where they get them."""
    for event in events:
        vars(event)["sequence_number"] = number  # pydantic's own way takes as long as all else here
        number += 1
    return number
