"""NewRun: a response that is to run in the background, as it is added to the store."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from openai.types.responses import Response, ResponseQueuedEvent

from apis.responses import CreateResponse
from apis.storage.kv_store import Op, Put
from providers.common.fair_turns import calculate
from providers.responses.background.event_log import EventLog, encode_event_line
from providers.responses.background.ranks import Rank, request_rank
from providers.responses.background.runs import ResponseRef, StoredRequest
from providers.responses.events.response_events import assign_sequence_numbers, created_event, queued_event
from providers.responses.events.response_object import begin_response
from providers.responses.run.pending_response import PendingResponse

_MANY_ITEMS: Final = 256
"""Items of a request that is encoded in a thread."""


@dataclass(frozen=True, slots=True)
class NewRun:
    """The rank and the stored request of a response, its queued event, the write of its first events, and those that
    hand its charge over. One that is not `is_portable` holds what is not stored."""

    ref: ResponseRef
    rank: Rank
    stored_request: StoredRequest
    queued_event: ResponseQueuedEvent
    log_op: Put
    charge_ops: Sequence[Op]
    is_portable: bool


async def build_new_run(pending: PendingResponse, event_log: EventLog) -> NewRun:
    """Return the run of a prepared response; a large one takes several turns of the event loop."""
    ref, request = ResponseRef(pending.tenant, pending.ids.response_id), pending.request
    if len(pending.conversation.input_items) > _MANY_ITEMS:
        request_json, is_portable = await calculate(_encode_request, request)
    else:
        request_json, is_portable = _encode_request(request)
    stored_request = StoredRequest(
        msgspec.Raw(request_json),
        msgspec.Raw(await pending.conversation.store_input_items(pending.ids)),
        pending.ids.item_id_count,
        pending.created_at,
        charge=None if pending.charge is None else pending.charge.record,
        previous=pending.previous_history.position,
        key_id=pending.key_id,
        judged_input=None if pending.moderation is None else pending.moderation.input_scores,
    )
    queued, log_op = _build_first_events(pending.build_initial_response("queued"), ref, request, event_log)
    return NewRun(
        ref,
        request_rank(request),
        stored_request,
        queued,
        log_op,
        () if pending.charge is None else pending.charge.adopt_ops(ref.run_key),
        is_portable,
    )


def _encode_request(request: CreateResponse) -> tuple[bytes, bool]:
    """Return the request as JSON, and whether it is the same after it was stored so."""
    request_json = request.model_dump_json(by_alias=True, exclude_none=True).encode()
    return request_json, is_storable(request, request_json)


def build_log_op(request: CreateResponse, ref: ResponseRef, created_at: int, event_log: EventLog) -> Put:
    """Return the write of the first events of a response that is queued."""
    response = begin_response(request, ref.id, created_at, "queued")
    return _build_first_events(response, ref, request, event_log)[1]


def is_storable(request: CreateResponse, request_json: bytes) -> bool:
    """Return True if a request is the same after it was stored as JSON."""
    stored = CreateResponse.model_validate_json(request_json)
    return all(getattr(stored, name) == getattr(request, name) for name in CreateResponse.model_fields)


def _build_first_events(
    response: Response, ref: ResponseRef, request: CreateResponse, event_log: EventLog
) -> tuple[ResponseQueuedEvent, Put]:
    queued = queued_event(response)
    first_events = [created_event(response), queued]
    assign_sequence_numbers(first_events, 0)
    log_op = event_log.batch_op(ref.tenant, ref.id, 0, [encode_event_line(event) for event in first_events])
    # the events after them come when the run has begun, at the end of its window at the latest
    return queued, msgspec.structs.replace(log_op, ttl_s=event_log.ttl_s + request.window_s)
