"""The tools that the client runs: each is offered to the model as one function, whose arguments become the item."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import orjson
from openai.types.responses import ResponseOutputItem
from pydantic import BaseModel, ConfigDict, ValidationError

from apis.chat import ChatFunctionTool, FunctionDefinition
from apis.deltas import ToolCallStart
from apis.errors import ToolFailed
from providers.responses.events.tool_result import ToolResultRecord
from providers.responses.tools.call import ClientCall, TypedTool


class Arguments(BaseModel):
    """The arguments of a call. Unknown ones are dropped, because models often write more than the schema has."""

    model_config = ConfigDict(extra="ignore", frozen=True)


ArgumentsType = TypeVar("ArgumentsType", bound=Arguments)
BuildItem = Callable[["ClientFunctionCall[Any]", Any, str], ResponseOutputItem]
"""Builds the item of a call from the call, its arguments and a status."""


class ClientTool(TypedTool):
    """One function of the client's and the type of item that its calls become."""

    is_hosted: ClassVar[bool] = False

    def __init__(
        self, function: FunctionDefinition, item_type: str, arguments_type: type[Arguments], build_item: BuildItem
    ) -> None:
        self._function = function
        self._item_type = item_type
        self._arguments_type = arguments_type
        self._build_item = build_item

    @property
    def offered_tools(self) -> Sequence[ChatFunctionTool]:
        return [ChatFunctionTool(function=self._function)]

    def create_call(self, start: ToolCallStart) -> ClientCall:
        return ClientFunctionCall(start, self._item_type, self._arguments_type, self._build_item)


class ClientFunctionCall(ClientCall, Generic[ArgumentsType]):
    """One call of a ClientTool."""

    def __init__(
        self, start: ToolCallStart, item_type: str, arguments_type: type[ArgumentsType], build_item: BuildItem
    ) -> None:
        super().__init__(start)
        self.item_type = item_type
        self._arguments_type = arguments_type
        self._build_item = build_item
        self._validated_arguments: ArgumentsType | None = None

    def validate_arguments(self) -> None:
        arguments = self.parse_arguments()
        try:
            self._validated_arguments = self._arguments_type.model_validate(arguments)
        except ValidationError as exc:
            raise build_argument_error(self.name, exc) from None
        self.record_result("")  # later turns show the model the very text of its arguments

    def item(self, status: str) -> ResponseOutputItem:
        assert self._validated_arguments is not None  # only validated calls are placed
        return self._build_item(self, self._validated_arguments, status)


def build_argument_error(name: str, exc: ValidationError) -> ToolFailed:
    """Return the error that says to the model what is wrong with the arguments of its call."""
    error = exc.errors(include_url=False, include_context=False)[0]
    place = ".".join(map(str, error["loc"]))
    return ToolFailed(f"The arguments of `{name}` are wrong{f' at `{place}`' if place else ''}: {error['msg']}.")


def build_function(
    name: str, description: str, properties: Mapping[str, Any], required: Sequence[str]
) -> FunctionDefinition:
    """Return a function that takes a flat object of arguments."""
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {**properties},
        "required": [*required],
        "additionalProperties": False,
    }
    return FunctionDefinition(name=name, description=description, parameters=schema)


def build_call_record(call_id: str, name: str, arguments: Any) -> ToolResultRecord:
    """Return a client's call, whose output is an item of its own. `arguments` is a JSON value, or JSON text."""
    text = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
    return ToolResultRecord(call_id, name, text, "")
