"""The tools that one request offers the model, and the tool that each called name stands for."""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final

from apis.chat import (
    AllowedToolSet,
    ChatAllowedTools,
    ChatCustomTool,
    ChatFunctionTool,
    ChatGrammarFormat,
    ChatTool,
    ChatToolChoice,
    ChatToolName,
    CustomToolDefinition,
    FunctionDefinition,
    NamedCustomTool,
    NamedFunction,
    NamedTool,
    NativeTool,
)
from apis.errors import InvalidRequest, UpstreamError
from apis.responses import CreateResponse
from apis.wire.base import ToolWire
from apis.wire.text_format import Grammar, TextFormatInput
from apis.wire.tool_choice import AllowedTools, ChosenCustomTool, ChosenFunction, ChosenHostedTool, ChosenMcpTool
from apis.wire.tool_items import ToolSearchOutput
from apis.wire.tools import (
    CustomTool,
    FunctionTool,
    GrammarFormat,
    McpTool,
    NamespaceTool,
    Tool,
    ToolSearchTool,
)
from providers.common.grammars.schema_values import SchemaObject
from providers.common.grammars.schemas import check_parameters
from providers.responses.item_index import NO_ITEMS, ItemIndex
from providers.responses.tools.call import TypedTool
from providers.responses.tools.choice_policy import ToolChoicePolicy
from providers.responses.tools.functions import ClientToolName
from providers.responses.tools.input_tools import collect_additional_tools
from providers.responses.tools.names import model_namespace, qualified_name
from providers.responses.tools.registry import ToolBinding

_MAX_TOOLS: Final = 128
"""Maximum tools offered to the model; more are an InvalidRequest."""


@dataclass(frozen=True, slots=True)
class _ClientToolDeclaration:
    """A function or custom tool of the client's, and the field that declares it."""

    tool: FunctionTool | CustomTool
    param: str
    namespace: str | None = None


class OfferedTools:
    """The client's tools and the typed tools of one request.

    `bindings` are the typed tools, `items` the conversation, whose items may add tools. Raises InvalidRequest for two
    tools of one name, an invalid schema, and too many tools.
    """

    __slots__ = (
        "_bindings",
        "_client_tools",
        "_deferred_tools",
        "_enforces_grammars",
        "_request",
        "_tools_by_name",
        "supports_namespaces",
        "typed_tools",
    )

    def __init__(
        self,
        request: CreateResponse,
        bindings: Sequence[ToolBinding] = (),
        items: ItemIndex = NO_ITEMS,
        *,
        supports_namespaces: bool = False,
        enforces_grammars: bool = True,
    ) -> None:
        self._enforces_grammars = enforces_grammars
        self.typed_tools: Sequence[TypedTool] = ()
        self._request = request
        self._bindings = bindings
        self.supports_namespaces = supports_namespaces
        self._client_tools: list[ChatTool] = []
        self._deferred_tools: list[ChatTool] = []
        self._tools_by_name: dict[str, TypedTool | ClientToolName] = {}
        if request.tools or bindings or len(items):
            self._add_tools(items)

    def _add_tools(self, items: ItemIndex) -> None:
        """Add the tools of the request, of its typed tools and of the items. Raises InvalidRequest."""
        self.typed_tools = [binding.tool for binding in self._bindings]
        self.refresh_names()
        searched = self._by_name(_searched_declarations(items))
        added = self._by_name(_client_declarations(collect_additional_tools(items))) | searched
        declared = [*_request_declarations(self._request)]
        declared_names = self._by_name(declared).keys()
        declared += (tool for name, tool in added.items() if name not in declared_names)
        _check_schemas(declared)
        has_search = any(isinstance(binding.declaration, ToolSearchTool) for binding in self._bindings)
        for tool in declared:
            is_deferred = bool(tool.tool.defer_loading) and has_search and self._qualified_name(tool) not in searched
            self._add_client_tool(tool, should_offer=not is_deferred)
        self.refresh_names()

    @property
    def parallel_tool_calls(self) -> bool | None:
        """The request's own `parallel_tool_calls`."""
        return self._request.parallel_tool_calls

    def refresh_names(self) -> None:
        """Read the names that typed tools have now. Raises InvalidRequest if there are too many tools together."""
        typed_names = [(name, tool) for tool in self.typed_tools for name in tool.call_names]
        client_tools = {name: tool for name, tool in self._tools_by_name.items() if isinstance(tool, ClientToolName)}
        self._tools_by_name = {**dict(reversed(typed_names)), **client_tools}
        if (count := len(self.offered_tools())) > _MAX_TOOLS:
            raise InvalidRequest(
                f"The model can be offered {_MAX_TOOLS} tools at most, and here are {count}. "
                "Name those of an MCP server that are needed in its `allowed_tools`.",
                param="tools",
                code="array_above_max_length",
            )

    def offered_tools(self, *, include_hosted: bool = True) -> list[ChatTool]:
        """Return the model's tools: the client's, then the typed ones, without those that run here if so requested."""
        if not self.typed_tools:
            return [*self._client_tools]
        typed_tools = (tool for tool in self.typed_tools if include_hosted or not tool.is_hosted)
        loaded = {name for tool in self.typed_tools for name in tool.loaded_names}
        loaded_tools = (tool for tool in self._deferred_tools if tool.name in loaded)
        return [
            *self._client_tools,
            *loaded_tools,
            *(offered for tool in typed_tools for offered in tool.offered_tools),
        ]

    def find_tool(self, name: str) -> TypedTool | ClientToolName | None:
        """Return the tool that a called name stands for. gpt-oss sometimes writes `functions.` before a name that is in
        no such namespace."""
        return self._tools_by_name.get(name) or self._tools_by_name.get(name.removeprefix("functions."))

    @property
    def has_client_tools(self) -> bool:
        """Some of the tools are functions or custom tools of the client's."""
        return bool(self._client_tools or self._deferred_tools)

    def is_client_tool(self, name: str) -> bool:
        """Return true for the name of a function or custom tool of the client's."""
        return isinstance(self.find_tool(name), ClientToolName)

    def tool_choice(
        self, *, is_final: bool = True, listing_errors: Mapping[str, str] | None = None
    ) -> ChatToolChoice | None:
        """Return the request's tool choice in chat completions' terms. Unless `is_final`, tools may still be unlisted;
        `listing_errors` has the messages of MCP servers that failed, by label. Raises UpstreamError if no tool can be
        called because of those, and InvalidRequest if the choice names a tool that is not declared."""
        choice = self._request.tool_choice
        tools, listing_errors = self.offered_tools(), listing_errors or {}
        listed = is_final or all(tool.offered_tools for tool in self.typed_tools)
        match choice:
            case None | "auto":
                return "auto" if tools else None
            case "none":
                return "none" if tools else None
            case "required":
                if not tools and listing_errors:
                    raise _listing_failure(listing_errors)
                if not tools and listed:
                    raise _invalid_choice("Tool choice 'required' needs tools.")
                return "required" if tools else None
            case AllowedTools(mode=mode, tools=allowed):
                listable = [tool for tool in allowed if not _names_server_in(tool, listing_errors)]
                named = [name for tool in listable for name in self._resolve_choice(tool, are_all_listed=listed)]
                if not named and (mode == "auto" or not listing_errors):
                    return "none" if tools else None
            case _:
                mode, named = (
                    "required",
                    []
                    if _names_server_in(choice, listing_errors)
                    else self._resolve_choice(choice, are_all_listed=listed),
                )
                if len(named) == 1:
                    return named[0]
        if not named and listing_errors:
            raise _listing_failure(listing_errors)
        return ChatAllowedTools(allowed_tools=AllowedToolSet(mode=mode, tools=named)) if named else None

    def tool_choice_after_call(self, offered_tools: Sequence[ChatTool]) -> ChatToolChoice | None:
        """Return the choice for the turns after a forced call, which would otherwise never let the model answer: it
        still restricts the tools that may be called."""
        if not offered_tools:
            return None
        match self._request.tool_choice:
            case "none":
                return "none"
            case AllowedTools(tools=allowed):
                names = {tool.name for tool in offered_tools}
                resolved = (tool for choice in allowed for tool in self._resolve_choice(choice, are_all_listed=False))
                named = [tool for tool in resolved if tool.name in names]
                return ChatAllowedTools(allowed_tools=AllowedToolSet(mode="auto", tools=named)) if named else "none"
            case _:
                return "auto"

    def choice_policy(self, choice: ChatToolChoice | None) -> ToolChoicePolicy:
        """Return the policy that enforces the choice in one turn."""
        match choice:
            case None | "auto":
                return ToolChoicePolicy()
            case "none":
                return ToolChoicePolicy(frozenset())
            case "required":
                return ToolChoicePolicy(requires_call=True)
            case ChatAllowedTools(allowed_tools=allowed):
                return ToolChoicePolicy(
                    self._expand_call_names({tool.name for tool in allowed.tools}), allowed.mode == "required"
                )
            case _:
                return ToolChoicePolicy(self._expand_call_names({choice.name}), requires_call=True)

    def _expand_call_names(self, names: Set[str]) -> frozenset[str]:
        """Return the names of the calls of these tools: those of a native tool differ from its own name."""
        offered = (offered for tool in self.typed_tools for offered in tool.offered_tools)
        native = {tool.name for tool in offered if isinstance(tool, NativeTool)} & names
        call_names = (name for tool in self.typed_tools if native for name in tool.call_names)
        return frozenset(names) | {name for name in call_names if name.partition(".")[0] in native}

    def _resolve_choice(
        self, choice: ChosenFunction | ChosenCustomTool | ChosenMcpTool | ChosenHostedTool, *, are_all_listed: bool
    ) -> list[NamedTool]:
        if isinstance(choice, ChosenFunction | ChosenCustomTool):
            return [self._resolve_client_choice(choice)]
        tools = [binding.tool for binding in self._bindings if _matches_choice(binding.declaration, choice)]
        names = [name for tool in tools for name in tool.names_for_choice(choice)]
        offered = (offered for tool in tools for offered in tool.offered_tools)
        custom = {tool.name for tool in offered if isinstance(tool, ChatCustomTool)}
        if not tools and any(_matches_choice(declaration, choice) for declaration in self._request.tools or ()):
            return []  # a tool that is silently ignored: so is its choice
        if not names and (are_all_listed or not tools):
            label = choice.name or choice.server_label if isinstance(choice, ChosenMcpTool) else choice.type
            raise _invalid_choice(f"Tool choice '{label}' not found in 'tools'.")
        return [
            NamedCustomTool(custom=ChatToolName(name=name))
            if name in custom
            else NamedFunction(function=ChatToolName(name=name))
            for name in names
        ]

    def _resolve_client_choice(self, choice: ChosenFunction | ChosenCustomTool) -> NamedTool:
        client = [
            tool.name
            for tool in self._client_tools
            if tool.type == choice.type
            and isinstance(client_name := self._tools_by_name.get(tool.name), ClientToolName)
            and client_name.name == choice.name
        ]
        typed = [tool.name for owner in self.typed_tools for tool in owner.offered_tools if tool.name == choice.name]
        name = next(iter((*client, *typed)), None)
        if name is None:
            raise _invalid_choice(f"Tool choice '{choice.name}' not found in 'tools'.")
        if isinstance(choice, ChosenCustomTool):
            return NamedCustomTool(custom=ChatToolName(name=name))
        return NamedFunction(function=ChatToolName(name=name))

    def _add_client_tool(self, client_tool: _ClientToolDeclaration, *, should_offer: bool) -> None:
        name = self._qualified_name(client_tool)
        if name in self._tools_by_name:
            raise InvalidRequest(
                f"Two tools are named '{client_tool.tool.name}'.",
                param=f"{client_tool.param}.name",
                code="invalid_value",
            )
        form = client_tool.tool.format if isinstance(client_tool.tool, CustomTool) else None
        grammar = _to_grammar(form) if isinstance(form, GrammarFormat) and not self._enforces_grammars else None
        self._tools_by_name[name] = ClientToolName(
            client_tool.tool.name, client_tool.namespace, grammar, is_async=client_tool.tool.is_async is True
        )
        tools = self._client_tools if should_offer else self._deferred_tools
        if isinstance(client_tool.tool, CustomTool):
            tools.append(ChatCustomTool(custom=_build_custom(client_tool.tool, name)))
            return
        group = (
            model_namespace(client_tool.namespace, supports_namespaces=self.supports_namespaces)
            if client_tool.namespace
            else None
        )
        function = FunctionDefinition(
            name=client_tool.tool.name if group else name,
            description=client_tool.tool.description,
            parameters=client_tool.tool.parameters,
            strict=client_tool.tool.strict,
            namespace=group,
        )
        tools.append(ChatFunctionTool(function=function))

    def _by_name(self, declarations: Iterable[_ClientToolDeclaration]) -> dict[str, _ClientToolDeclaration]:
        return {self._qualified_name(declaration): declaration for declaration in declarations}

    def _qualified_name(self, client_tool: _ClientToolDeclaration) -> str:
        if isinstance(client_tool.tool, CustomTool):  # namespaces of models hold functions only
            return qualified_name(client_tool.namespace, client_tool.tool.name, supports_namespaces=False)
        return qualified_name(
            client_tool.namespace, client_tool.tool.name, supports_namespaces=self.supports_namespaces
        )


def _request_declarations(request: CreateResponse) -> Iterator[_ClientToolDeclaration]:
    for index, tool in enumerate(request.tools or ()):
        param = f"tools[{index}]"
        if isinstance(tool, FunctionTool | CustomTool):
            yield _ClientToolDeclaration(tool, param)
        elif isinstance(tool, NamespaceTool):
            yield from (
                _ClientToolDeclaration(inner, f"{param}.tools[{at}]", tool.name) for at, inner in enumerate(tool.tools)
            )


def _searched_declarations(items: ItemIndex) -> Iterator[_ClientToolDeclaration]:
    """Yield the client's tools that tool searches returned. MCP servers among them are bindings."""
    return _client_declarations(tool for item in items.of(ToolSearchOutput) for tool in item.tools)


def _client_declarations(tools: Iterable[Tool]) -> Iterator[_ClientToolDeclaration]:
    """Yield the client's tools among those of the input."""
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            yield from (_ClientToolDeclaration(inner, "input", tool.name) for inner in tool.tools)
        elif isinstance(tool, FunctionTool | CustomTool):
            yield _ClientToolDeclaration(tool, "input")


def _check_schemas(declarations: Sequence[_ClientToolDeclaration]) -> None:
    check_parameters(
        [
            (f"{declaration.param}.parameters", tool.name, tool.parameters, tool.strict is True)
            for declaration in declarations
            if isinstance(tool := declaration.tool, FunctionTool) and tool.parameters is not None
        ]
    )


def _build_custom(tool: CustomTool, name: str) -> CustomToolDefinition:
    form = tool.format
    if isinstance(form, GrammarFormat):
        chat_format = ChatGrammarFormat(grammar=_to_grammar(form))
        return CustomToolDefinition(name=name, description=tool.description, format=chat_format)
    return CustomToolDefinition(name=name, description=tool.description, format=TextFormatInput())


def _to_grammar(form: GrammarFormat) -> Grammar:
    return Grammar(syntax=form.syntax, definition=form.definition)


def declared_grammars(request: CreateResponse, items: ItemIndex = NO_ITEMS) -> list[tuple[str, Grammar]]:
    """Return the grammars of the custom tools that a request and its conversation declare, each with its field."""
    additional = _client_declarations(collect_additional_tools(items))
    return [
        (f"{declaration.param}.format.definition" if declaration.param != "input" else "input", _to_grammar(form))
        for declaration in (*_request_declarations(request), *additional, *_searched_declarations(items))
        if isinstance(declaration.tool, CustomTool) and isinstance(form := declaration.tool.format, GrammarFormat)
    ]


def declared_schemas(request: CreateResponse, items: ItemIndex = NO_ITEMS) -> list[tuple[SchemaObject, bool]]:
    """Return the parameters of the functions that a request and its conversation declare, each with its strictness."""
    additional = _client_declarations(collect_additional_tools(items))
    return [
        (tool.parameters, tool.strict is True)
        for declaration in (*_request_declarations(request), *additional, *_searched_declarations(items))
        if isinstance(tool := declaration.tool, FunctionTool) and tool.parameters is not None
    ]


def _matches_choice(declaration: ToolWire, choice: ChosenMcpTool | ChosenHostedTool) -> bool:
    if isinstance(choice, ChosenMcpTool):
        return isinstance(declaration, McpTool) and declaration.server_label == choice.server_label
    return choice.type in declaration.choice_names()


def _names_server_in(
    choice: ChosenFunction | ChosenCustomTool | ChosenMcpTool | ChosenHostedTool, labels: Container[str]
) -> bool:
    return isinstance(choice, ChosenMcpTool) and choice.server_label in labels


def _invalid_choice(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="tool_choice", code="invalid_value")


def _listing_failure(listing_errors: Mapping[str, str]) -> UpstreamError:
    why = " ".join(
        f"The tools of MCP server '{label}' could not be listed: {error}" for label, error in listing_errors.items()
    )
    return UpstreamError(f"What `tool_choice` demands is not there to be called. {why}")
