"""Mailbox: the input that was sent to a response while it ran, until a response that follows it has read it.

    TENANT/mailbox/ID    the input, in the order in which it came

Input is stored before it is acknowledged. It leaves the store in the write that stores a response which has read it,
or the end of a response that no other one follows. The id of the response that follows by itself is drawn with the
first input, so a worker that takes over from a killed one creates no second one.
"""

from collections.abc import Sequence
from typing import Any, Final, cast

import msgspec
import orjson
from openai.types.responses import Response

from apis.errors import InvalidRequest, SteeringRefused
from apis.responses import CreateResponse, SteerResponse
from apis.steering import Steer
from apis.storage.keys import new_response_id
from apis.storage.kv_store import Entry, KVStore
from apis.storage.records import decode_record
from apis.wire.item_types import ITEM_TYPES, OUTPUT_TYPES
from apis.wire.items import ITEM_LIST_ADAPTER, FunctionCallOutput, InputMessage, Item
from providers.common.state.scan import skipping_damaged
from providers.responses.context.input_items import check_items
from providers.responses.events.ids import ResponseIds

MAX_INPUTS: Final = 16
"""Inputs that may wait for one response."""
MAX_INPUT_BYTES: Final = 8 * 2**20
"""Bytes that all inputs for one response may have together."""


class PostedInput(msgspec.Struct, frozen=True):
    """One input as it came, and the id by which it was acknowledged."""

    id: str
    input: msgspec.Raw


class Mailbox(msgspec.Struct):
    """The input that was sent to one response, and the id of the response that is to follow it by itself."""

    successor_id: str = msgspec.field(default_factory=new_response_id)
    posted: list[PostedInput] = []

    def add(self, request: SteerResponse) -> Steer:
        """Add an input that `check_steering` has accepted. Raises SteeringRefused where too much waits."""
        data = orjson.dumps(request.model_dump(mode="json", by_alias=True, exclude_none=True)["input"])
        if len(self.posted) >= MAX_INPUTS or len(data) + self.size_bytes > MAX_INPUT_BYTES:
            raise SteeringRefused(
                f"A response takes at most {MAX_INPUTS} inputs of {MAX_INPUT_BYTES} bytes together while it runs. "
                "Wait for the response that follows it.",
                param="input",
                code="too_many_pending_steers",
            )
        ids = ResponseIds(self.successor_id, len(self.posted))
        self.posted = [*self.posted, PostedInput(ids.new_item_id("steer"), msgspec.Raw(data))]
        return Steer(self.posted[-1].id, request.previous_response_id, self.successor_id)

    @property
    def size_bytes(self) -> int:
        return sum(len(posted.input) for posted in self.posted)

    def list_posted(self) -> list[tuple[str, Any]]:
        """Return the id of each input, and the input as it came."""
        return [(posted.id, orjson.loads(bytes(posted.input))) for posted in self.posted]

    def read_items(self) -> list[Item]:
        """Return all that was sent as items. Raises ValueError where it is damaged."""
        values = [orjson.loads(bytes(posted.input)) for posted in self.posted]
        return [
            item
            for value in values
            for item in read_input(value if isinstance(value, str) else ITEM_LIST_ADAPTER.validate_python(value))
        ]


def read_mailbox(kv: KVStore, key: str, entry: Entry | None) -> tuple[Mailbox, list[Item]]:
    """Return a stored mailbox and its items; an empty one if there is none, or it is damaged, which is logged and
    counted."""
    if entry is not None:
        with skipping_damaged(kv, key, "Mailbox"):
            mailbox = decode_record(entry, Mailbox)
            return mailbox, mailbox.read_items()
    return Mailbox(), []


def mailbox_key(tenant: str, response_id: str) -> str:
    return f"{tenant}/mailbox/{response_id}"


def read_input(value: str | Sequence[Item] | None) -> Sequence[Item]:
    """Return the input of a request as items."""
    if isinstance(value, str):
        return [InputMessage(type="message", role="user", content=value)]
    return value or ()


def check_input(request: SteerResponse) -> None:
    """Raise SteeringRefused for an input that no response can be steered with."""
    if isinstance(request.input, str):
        return
    try:
        if not request.input:
            raise InvalidRequest("Steering input is a text or at least one item.", param="input")
        for index, item in enumerate(request.input):
            is_message = isinstance(item, InputMessage) and item.role == "user"
            if not is_message and not isinstance(item, FunctionCallOutput):
                message = "Steering input has messages of the role 'user' and outputs of functions."
                raise InvalidRequest(message, param=f"input[{index}]")
        check_items(request.input)
    except InvalidRequest as exc:
        raise SteeringRefused(exc.message, param=exc.param, code="invalid_input") from None


def check_steering(request: CreateResponse) -> None:
    """Raise SteeringRefused for a response that no other one could follow by itself."""
    fields = {"conversation": request.conversation_id, "context_management": request.context_management}
    for name in (name for name, value in fields.items() if value):
        raise SteeringRefused(f"A response with `{name}` cannot be steered.", param=name, code="steering_not_supported")


def not_active_error(response: Response) -> SteeringRefused:
    """Return the error for input to a response that has ended."""
    code = "response_already_completed" if response.status == "completed" else "response_not_active"
    message = f"The response '{response.id}' has ended ({response.status}): continue it with a request of its own."
    return SteeringRefused(message, param="previous_response_id", code=code)


def list_required_input(response: Response, answered_ids: frozenset[str] = frozenset()) -> list[dict[str, Any]]:
    """Return what the client owes to a response that has ended before another one can follow it: an object for each
    output of a call, or approval, without its result. `answered_ids` are the calls whose outputs are there."""
    if response.status != "completed":
        return []
    items = cast("Sequence[Any]", response.output)
    answered = answered_ids | {
        item.call_id for item in items if item.type in OUTPUT_TYPES and getattr(item, "call_id", None)
    }
    required: list[dict[str, Any]] = []
    for item in items:
        row = ITEM_TYPES[item.type]
        if row.call == "approval":
            required.append({"type": row.answer_type, "approval_request_id": item.id})
        elif row.call == "client" and item.call_id not in answered and not _runs_elsewhere(item):
            fields = {name: getattr(item, name) for name in row.output_fields}
            required.append({"type": row.answer_type, "call_id": item.call_id, **fields})
    return required


def _runs_elsewhere(item: Any) -> bool:
    """Return True for a call whose output the response does not wait for: the model went on, or the server ran it."""
    is_async = getattr(item, "async_", None) is True or getattr(item, "async", None) is True
    return is_async or getattr(item, "execution", None) == "server"


def answered_calls(items: Sequence[Item]) -> frozenset[str]:
    """Return the ids of the calls whose outputs are among the items."""
    return frozenset(item.call_id for item in items if isinstance(item, FunctionCallOutput) and item.call_id)
