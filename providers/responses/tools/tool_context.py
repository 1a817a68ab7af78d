"""ToolContext: the request and the conversation that a tool is declared in."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from apis.chat import NativeToolName
from apis.documents.reader import Reader
from apis.documents.vector_stores import VectorStores
from apis.errors import Unsupported
from apis.image_generator import ImageGenerator
from apis.inference import Modality
from apis.responses import CreateResponse
from apis.tool_runtime import ToolRuntime, ToolSpec
from apis.tool_servers import ToolServers
from apis.vaults.vaults import Vaults
from providers.responses.events.tool_result import ToolResultRecord
from providers.responses.item_index import NO_ITEMS, ItemIndex


@dataclass(frozen=True, slots=True)
class ToolContext:
    """The facts that a tool is built from.

    `items` is the whole conversation before this response, `tool_results` the results of its hosted calls by item id,
    oldest first; `param` is the field of the request that declares the tool.
    """

    request: CreateResponse
    tenant: str = ""
    response_id: str = ""
    runtime: ToolRuntime | None = None
    tool_results: Mapping[str, ToolResultRecord] = field(default_factory=dict[str, ToolResultRecord])
    items: ItemIndex = NO_ITEMS
    native_tools: frozenset[NativeToolName] = frozenset()
    param: str = "tools"
    vector_stores: VectorStores | None = None
    tool_servers: ToolServers | None = None
    image_generator: ImageGenerator | None = None
    reader: Reader | None = None
    vaults: Vaults | None = None
    modalities: frozenset[Modality] | None = None
    """The model's kinds of input besides text; None where they are unknown, or matter to no tool."""
    loaded_servers: set[str] = field(default_factory=set[str])
    """The labels of the deferred MCP servers that a search has found since the response began."""

    @property
    def supports_namespaces(self) -> bool:
        """True for models with native tools, which also group functions in namespaces."""
        return bool(self.native_tools)

    def find_spec(self, name: str) -> ToolSpec | None:
        """Return the ToolRuntime's tool of this name, or None."""
        specs = self.runtime.tools() if self.runtime else ()
        return next((spec for spec in specs if spec.name == name), None)

    def not_configured_error(self, message: str) -> Unsupported:
        """Return the error for a tool that is not configured here; the message says how to configure it."""
        return Unsupported(message, param=f"{self.param}.type")
