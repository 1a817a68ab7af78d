"""The types of items, one row each: everything about a type that is not its wire form or its tool's own code."""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final, Literal


@dataclass(frozen=True, slots=True)
class ItemType:
    """One type of item, by the name that its `type` field has."""

    name: str
    id_prefix: str
    """Begins the ids of such items; empty for a type that is never stored."""
    _: KW_ONLY
    has_status: bool = True
    call: Literal["hosted", "client", "approval"] | None = None
    """Who runs the call that the item stands for: this server, the client, or this server once the client approves."""
    streamed_field: str | None = None
    """The field whose text is streamed, by events named `response.TYPE_FIELD.delta` and `.done`."""
    interrupted_status: Literal["incomplete", "failed"] | None = None
    """The status of an item whose worker died; None where that is the status of its response."""
    has_phases: bool = False
    """True for a type whose beginning and success are also events, `response.TYPE.in_progress` and `.completed`."""
    has_failed_event: bool = False
    """True for a type whose failure is also an event, `response.TYPE.failed`."""
    interrupted_error: Mapping[str, Any] | None = None
    """The `error`, without its message, of an item whose worker died; None where such items show none."""
    included_fields: Mapping[str, Literal["null", "absent"]] = field(default_factory=dict[str, Any])
    """Fields that only a request sees whose `include` names them, as `TYPE.FIELD`, and how the others see them. A name
    that `Includable` lacks is for routes of this server alone."""
    is_counted: Callable[[Any], bool] | None = None
    """Return true for an item that counts as a call of a hosted tool; None where those that this server runs do."""
    is_datastore: bool = False
    """True for the calls of a tool that reads data of the tenant, and no service."""
    result_type: str | None = None
    """The type of the item that holds the result of such a call where this server runs it; None where its own does."""
    has_id_of_call: bool = False
    """True where clients send the id of the call as that of the item."""
    lists_tools: bool = False
    """True for the tools of a server, which are listed before the model can call them."""
    output_fields: tuple[str, ...] = ()
    """Fields that the output of a call of the client's has in common with the call, besides `call_id`."""
    internal_field: str | None = None
    """A field that this server adds to stored items for itself, and that no client sees."""

    def closing_phase(self, status: str) -> str | None:
        """Return the phase whose event goes before the done event of an item that ends with this status, if any."""
        if status == "completed":
            return "completed" if self.has_phases else None
        return "failed" if self.has_failed_event and (status == "failed" or not self.has_status) else None

    def counts(self, item: Any) -> bool:
        """Return true if the item of this type, with the SDK's fields, is counted as a call of a hosted tool."""
        return self.call == "hosted" if self.is_counted is None else self.is_counted(item)

    @property
    def answer_type(self) -> str:
        """The type of the item with which the client answers a call, or a request for its approval."""
        if self.call == "approval":
            return self.name.replace("_request", "_response")
        name = f"{self.name}_output"
        return name if name in ITEM_TYPES else f"{self.name.removesuffix('_call')}_output"

    @property
    def text_event(self) -> str:
        """The name of the streamed text's events, without `.delta` or `.done`."""
        return f"response.{self.name}_{self.streamed_field}"


UNKNOWN_OUTCOME_CODE: Final = -32000
"""A code that JSON-RPC leaves to implementations: the call was not made, or its outcome is unknown."""
_ROWS: Final = (
    ItemType("message", "msg"),
    ItemType("reasoning", "rs"),
    ItemType("function_call", "fc", call="client", streamed_field="arguments", output_fields=("name",)),
    ItemType("function_call_output", "fco"),
    ItemType("custom_tool_call", "ctc", call="client", streamed_field="input"),
    ItemType("custom_tool_call_output", "ctco"),
    ItemType(
        "web_search_call",
        "ws",
        call="hosted",
        has_phases=True,
        interrupted_status="failed",
        included_fields={"results": "absent", "action.sources": "absent"},
    ),
    ItemType(
        "code_interpreter_call",
        "ci",
        call="hosted",
        has_phases=True,
        streamed_field="code",
        included_fields={"outputs": "null", "outcome": "absent", "container_expires_at": "absent"},
    ),
    ItemType(
        "file_search_call",
        "fs",
        call="hosted",
        has_phases=True,
        interrupted_status="failed",
        is_datastore=True,
        included_fields={"results": "null"},
    ),
    ItemType(
        "image_generation_call",
        "ig",
        call="hosted",
        has_phases=True,
        interrupted_status="failed",
        is_counted=lambda item: item.status == "completed",
    ),
    ItemType(
        "mcp_list_tools",
        "mcpl",
        has_status=False,
        has_phases=True,
        has_failed_event=True,
        lists_tools=True,
        internal_field="declaration",
    ),
    ItemType(
        "mcp_call",
        "mcp",
        call="hosted",
        has_phases=True,
        streamed_field="arguments",
        has_failed_event=True,
        interrupted_error={"type": "mcp_protocol_error", "code": UNKNOWN_OUTCOME_CODE},
    ),
    ItemType("mcp_approval_request", "mcpr", has_status=False, call="approval", internal_field="server"),
    ItemType("mcp_approval_response", "mcpa", has_status=False),
    ItemType("local_shell_call", "lsh", call="client"),
    ItemType("local_shell_call_output", "lsho", has_id_of_call=True),
    ItemType(
        "shell_call",
        "sh",
        call="client",
        result_type="shell_call_output",
        interrupted_status="incomplete",
        is_counted=lambda item: item.environment is not None and item.environment.type != "local",
    ),
    ItemType(
        "shell_call_output",
        "sho",
        interrupted_status="incomplete",
        included_fields={"container_expires_at": "absent"},
    ),
    ItemType("apply_patch_call", "apc", call="client"),
    ItemType("apply_patch_call_output", "apco"),
    ItemType("computer_call", "cuc", call="client"),
    ItemType("computer_call_output", "cuo"),
    ItemType("tool_search_call", "tsc", call="client", output_fields=("execution",)),
    ItemType("tool_search_output", "tso"),
    ItemType("additional_tools", "at", has_status=False),
    ItemType("configuration_update", "cu", has_status=False),
    ItemType("compaction", "cmp", has_status=False),
    ItemType("compaction_trigger", "", has_status=False),
    ItemType("item_reference", "", has_status=False),
)
ITEM_TYPES: Final[Mapping[str, ItemType]] = {row.name: row for row in _ROWS}
HOSTED_CALL_TYPES: Final = frozenset(row.name for row in _ROWS if row.call == "hosted")
"""Types of the calls that this server runs. The store may know their output where the item itself does not show it."""
CLIENT_CALL_TYPES: Final = frozenset(row.name for row in _ROWS if row.call == "client")
"""Types of the calls that the client runs, unless this server does; each has a `call_id`."""
OUTPUT_TYPES: Final = frozenset(row.name for row in _ROWS if row.name.endswith("_output"))
"""Types of the outputs of such calls."""
CALLS_WITH_RESULTS: Final = frozenset(row.name for row in _ROWS if row.result_type)
"""Types of the calls whose result is an item of its own where this server runs them."""
SEALED_TYPES: Final = HOSTED_CALL_TYPES | {row.result_type for row in _ROWS if row.result_type}
"""Types of the items that hold the sealed result of a call that this server ran, where the client stores it."""
TYPES_WITH_ID_OF_CALL: Final = frozenset(row.name for row in _ROWS if row.has_id_of_call)
"""Types of the items that clients send with the id of the call that they answer."""
REPLAYED_TYPES: Final = frozenset(row.name for row in _ROWS if row.call in ("hosted", "approval"))
"""Types of the calls that each model names in its own way: they are rewritten for the model of every request."""
LISTING_TYPES: Final = frozenset(row.name for row in _ROWS if row.lists_tools)
"""Types of the items that list the tools of a server."""
INTERNAL_FIELDS: Final[Mapping[str, str]] = {row.name: row.internal_field for row in _ROWS if row.internal_field}
"""The field of each type that has one for this server alone."""
LOOKED_UP_TYPES: Final = REPLAYED_TYPES | INTERNAL_FIELDS.keys()
"""Types of the items of which the store may know more than a client that sends them back."""


def id_prefix(item_type: str) -> str:
    """Return the beginning of the ids of items of this type."""
    return ITEM_TYPES[item_type].id_prefix
