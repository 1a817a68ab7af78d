"""RequestTools: from the tools that a request and its conversation declare to the OfferedTools of the response."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from apis.documents.reader import Reader
from apis.documents.vector_stores import VectorStores
from apis.errors import Unsupported
from apis.image_generator import ImageGenerator
from apis.inference import Inference
from apis.responses import CreateResponse, HostedTool
from apis.tool_runtime import ToolRuntime
from apis.tool_servers import ToolServers
from apis.vaults.vaults import Vaults, check_vaults
from apis.wire.tools import CustomTool, FunctionTool
from providers.common.grammars.checks import check_grammars
from providers.common.grammars.schemas import check_large_schemas
from providers.responses.events.tool_result import ToolResultRecord
from providers.responses.item_index import ItemIndex
from providers.responses.tools.input_tools import (
    add_typed_tools,
    attribute_errors_to_input,
    collect_additional_tools,
)
from providers.responses.tools.models import ModelCatalog
from providers.responses.tools.offered import OfferedTools, declared_grammars, declared_schemas
from providers.responses.tools.registry import (
    MODALITY_DEPENDENT_TOOLS,
    MODEL_DEPENDENT_TOOLS,
    build_checked_tools,
    build_tools,
)
from providers.responses.tools.tool_context import ToolContext

_HOSTED_DECLARATIONS: Final[Sequence[dict[str, Any]]] = (
    {"type": "web_search"},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "shell", "environment": {"type": "container_auto"}},
    {"type": "file_search", "vector_store_ids": ["vs_any"]},
    {"type": "image_generation"},
    {"type": "mcp", "server_label": "any", "server_url": "https://any.example/mcp"},
)
"""The plainest declaration of each tool that a server may run; it is built to learn whether this one does."""


class RequestTools:
    """Builds the tools of each request over the stack's tool providers; `model_catalog` caches what the models of
    `inference` offer themselves."""

    def __init__(
        self,
        inference: Inference,
        tool_runtime: ToolRuntime | None,
        tool_servers: ToolServers | None,
        vector_stores: VectorStores | None,
        image_generator: ImageGenerator | None,
        reader: Reader,
        *,
        vaults: Vaults | None = None,
    ) -> None:
        self.model_catalog = ModelCatalog(inference)
        self._tool_runtime = tool_runtime
        self._tool_servers = tool_servers
        self._vector_stores = vector_stores
        self._image_generator = image_generator
        self._reader = reader
        self._vaults = vaults

    async def build(
        self,
        request: CreateResponse,
        items: ItemIndex,
        tool_results: Mapping[str, ToolResultRecord],
        tenant: str,
        response_id: str,
    ) -> OfferedTools:
        """Return the tools of a request. `items` are the whole conversation, `tool_results` the results of its hosted
        calls by item id, oldest first.

        Raises InvalidRequest, NotFound or Unsupported, naming the tool, for a declaration that cannot be served, and
        for unknown vaults.
        """
        await check_vaults(self._vaults, request.vault_ids, tenant=tenant)
        additional = collect_additional_tools(items)
        declared = [*(request.tools or ()), *additional]
        grammars = declared_grammars(request, items)
        await check_grammars(grammars, tenant)
        await check_large_schemas(declared_schemas(request, items))
        enforces_grammars = not grammars or await self.model_catalog.enforces(request.model, "grammar")
        if not additional and all(isinstance(tool, FunctionTool | CustomTool) for tool in declared):
            return OfferedTools(request, enforces_grammars=enforces_grammars)
        depends_on_model = any(isinstance(tool, MODEL_DEPENDENT_TOOLS) for tool in declared)
        needs_modalities = any(isinstance(tool, MODALITY_DEPENDENT_TOOLS) for tool in declared)
        find_model = partial(self.model_catalog.find, request.model)
        extended = add_typed_tools(request, additional)
        context = replace(
            self._context(extended, tenant),
            response_id=response_id,
            tool_results=tool_results,
            items=items,
            native_tools=(await find_model()).native_tools if depends_on_model else frozenset(),
            modalities=(await find_model()).modalities if needs_modalities else None,
        )
        with attribute_errors_to_input(request):
            bindings = await build_checked_tools(extended, context)
            return OfferedTools(
                extended,
                bindings,
                items,
                supports_namespaces=context.supports_namespaces,
                enforces_grammars=enforces_grammars,
            )

    def describe(self, tenant: str) -> Sequence[HostedTool]:
        """Return the tools that a server may run, with the reason why this one lacks one: the error of a request that
        declares it."""
        tools: list[HostedTool] = []
        for declaration in _HOSTED_DECLARATIONS:
            request = CreateResponse.model_validate({"model": "any", "input": "", "tools": [declaration]})
            servers = self._tool_servers.known_labels(tenant) if self._tool_servers else ()
            try:
                build_tools(request, self._context(request, tenant))
            except Unsupported as exc:
                tools.append(HostedTool(declaration["type"], str(exc)))
            else:
                tools.append(HostedTool(declaration["type"], None, servers if declaration["type"] == "mcp" else ()))
        return tools

    def _context(self, request: CreateResponse, tenant: str) -> ToolContext:
        """Return the facts of a request without a conversation."""
        return ToolContext(
            request,
            tenant,
            runtime=self._tool_runtime,
            vector_stores=self._vector_stores,
            tool_servers=self._tool_servers,
            image_generator=self._image_generator,
            reader=self._reader,
            vaults=self._vaults,
        )
