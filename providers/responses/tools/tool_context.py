"""Setting: what a tool may know of the request that declared it, and of the conversation that it is in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from apis.chat import NativeToolName
from apis.errors import Unsupported
from apis.responses import CreateResponse
from apis.tool_runtime import ToolRuntime, ToolSpec
from apis.tool_servers import ToolServers
from apis.vector_stores import VectorStores
from apis.wire.items import Item
from providers.responses.events.tool_result import ToolResultRecord


@dataclass(frozen=True, slots=True)
class ToolContext:
    """`param` is the declared tool's place in the request, `items` the whole conversation before this response, `told`
    what its hosted calls gave, by item id, oldest first; `native` are the model's own tools, and where there are any
    it knows namespaces too (`grouped`). `response_id` is that of the response being made."""

    request: CreateResponse
    tenant: str = ""
    response_id: str = ""
    runtime: ToolRuntime | None = None
    tool_results: Mapping[str, ToolResultRecord] = field(default_factory=dict[str, ToolResultRecord])
    items: Sequence[Item] = ()
    native_tools: frozenset[NativeToolName] = frozenset()
    param: str = "tools"
    vector_stores: VectorStores | None = None
    tool_servers: ToolServers | None = None

    @property
    def supports_namespaces(self) -> bool:
        return bool(self.native_tools)

    def find_spec(self, name: str) -> ToolSpec | None:
        """The ToolRuntime's tool of this name, where there is one."""
        specs = self.runtime.tools() if self.runtime else ()
        return next((spec for spec in specs if spec.name == name), None)

    def includes(self, include_value: str) -> bool:
        """Whether the request's `include` names it."""
        return include_value in (self.request.include or ())

    def not_configured_error(self, message: str) -> Unsupported:
        """The refusal of a tool that is not configured here; the message says how it would be."""
        return Unsupported(message, param=f"{self.param}.type")
