"""A client's typed tool: offered to the model as one function, whose good arguments become the item."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from openai.types.responses import ResponseOutputItem
from pydantic import BaseModel, ConfigDict, ValidationError

from apis.chat import Function, FunctionTool
from apis.deltas import ToolCallStart
from apis.errors import ToolFailed
from providers.responses.tools.call import ClientCall, TypedTool


class Arguments(BaseModel):
    """What a model may write as arguments. Models often write more than was asked; what is not known is dropped."""

    model_config = ConfigDict(extra="ignore", frozen=True)


Given = TypeVar("Given", bound=Arguments)
MakeItem = Callable[["FunctionOfClient[Any]", Any, str], ResponseOutputItem]


class ClientTool(TypedTool):
    """One function, and the item that its call makes: `make_item(call, arguments, status)`."""

    hosted: ClassVar[bool] = False

    def __init__(self, function: Function, prefix: str, reads: type[Arguments], make_item: MakeItem) -> None:
        self._function = function
        self._prefix = prefix
        self._reads = reads
        self._make_item = make_item

    @property
    def offered(self) -> Sequence[FunctionTool]:
        return [FunctionTool(function=self._function)]

    def begin(self, start: ToolCallStart) -> ClientCall:
        return FunctionOfClient(start, self._prefix, self._reads, self._make_item)


class FunctionOfClient(ClientCall, Generic[Given]):
    """One call of the client's function."""

    def __init__(self, start: ToolCallStart, prefix: str, reads: type[Given], make_item: MakeItem) -> None:
        super().__init__(start)
        self.prefix = prefix
        self._reads = reads
        self._make_item = make_item
        self._given: Given | None = None

    def take(self) -> None:
        arguments = self.arguments()
        try:
            self._given = self._reads.model_validate(arguments)
        except ValidationError as exc:
            error = exc.errors(include_url=False, include_context=False)[0]
            place = ".".join(map(str, error["loc"]))
            raise ToolFailed(
                f"The arguments of `{self.name}` are wrong{f' at `{place}`' if place else ''}: {error['msg']}."
            ) from None
        self.tell("")  # the arguments as they were written: later turns show the model the very same text

    def item(self, status: str) -> ResponseOutputItem:
        assert self._given is not None  # it is placed only after it was taken
        return self._make_item(self, self._given, status)


def function(name: str, description: str, properties: Mapping[str, Any], required: Sequence[str]) -> Function:
    """A function with a flat object of arguments."""
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {**properties},
        "required": [*required],
        "additionalProperties": False,
    }
    return Function(name=name, description=description, parameters=schema)
