"""A client's typed tool: offered to the model as one function, whose good arguments become the item."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from openai.types.responses import ResponseOutputItem
from pydantic import BaseModel, ConfigDict, ValidationError

from apis.chat import ChatFunctionTool, FunctionDefinition
from apis.deltas import ToolCallStart
from apis.errors import ToolFailed
from providers.responses.tools.call import ClientCall, TypedTool


class Arguments(BaseModel):
    """What a model may write as arguments. Models often write more than was asked; what is not known is dropped."""

    model_config = ConfigDict(extra="ignore", frozen=True)


ArgumentsType = TypeVar("ArgumentsType", bound=Arguments)
BuildItem = Callable[["ClientFunctionCall[Any]", Any, str], ResponseOutputItem]


class ClientTool(TypedTool):
    """One function, and the item that its call makes: `make_item(call, arguments, status)`."""

    is_hosted: ClassVar[bool] = False

    def __init__(
        self, function: FunctionDefinition, prefix: str, arguments_type: type[Arguments], build_item: BuildItem
    ) -> None:
        self._function = function
        self._prefix = prefix
        self._arguments_type = arguments_type
        self._build_item = build_item

    @property
    def offered_tools(self) -> Sequence[ChatFunctionTool]:
        return [ChatFunctionTool(function=self._function)]

    def create_call(self, start: ToolCallStart) -> ClientCall:
        return ClientFunctionCall(start, self._prefix, self._arguments_type, self._build_item)


class ClientFunctionCall(ClientCall, Generic[ArgumentsType]):
    """One call of the client's function."""

    def __init__(
        self, start: ToolCallStart, prefix: str, arguments_type: type[ArgumentsType], build_item: BuildItem
    ) -> None:
        super().__init__(start)
        self.prefix = prefix
        self._arguments_type = arguments_type
        self._build_item = build_item
        self._validated_arguments: ArgumentsType | None = None

    def validate_arguments(self) -> None:
        arguments = self.parse_arguments()
        try:
            self._validated_arguments = self._arguments_type.model_validate(arguments)
        except ValidationError as exc:
            error = exc.errors(include_url=False, include_context=False)[0]
            place = ".".join(map(str, error["loc"]))
            raise ToolFailed(
                f"The arguments of `{self.name}` are wrong{f' at `{place}`' if place else ''}: {error['msg']}."
            ) from None
        self.record_result("")  # the arguments as they were written: later turns show the model the very same text

    def item(self, status: str) -> ResponseOutputItem:
        assert self._validated_arguments is not None  # it is placed only after it was taken
        return self._build_item(self, self._validated_arguments, status)


def build_function(
    name: str, description: str, properties: Mapping[str, Any], required: Sequence[str]
) -> FunctionDefinition:
    """A function with a flat object of arguments."""
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {**properties},
        "required": [*required],
        "additionalProperties": False,
    }
    return FunctionDefinition(name=name, description=description, parameters=schema)
