"""Toolbox: all that one request offers the model, and what each name stands for that the model calls."""

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
from apis.wire.base import Wire
from apis.wire.items import Item
from apis.wire.text_format import Grammar, TextFormatInput
from apis.wire.tool_choice import AllowedTools as AllowedToolsOption
from apis.wire.tool_choice import ChosenCustomTool, ChosenFunction, ChosenHostedTool, ChosenMcpTool
from apis.wire.tool_items import ToolSearchOutput
from apis.wire.tools import CustomTool as DeclaredCustom
from apis.wire.tools import FunctionTool as DeclaredFunction
from apis.wire.tools import GrammarFormat as DeclaredGrammar
from apis.wire.tools import McpTool, NamespaceTool, ToolSearchTool
from apis.wire.tools import Tool as DeclaredTool
from apis.wire.tools import WebSearchTool as DeclaredSearch
from providers.responses.tools.call import TypedTool
from providers.responses.tools.choice_policy import ToolChoicePolicy
from providers.responses.tools.input_tools import collect_additional_tools
from providers.responses.tools.names import model_namespace, qualified_name
from providers.responses.tools.registry import ToolBinding
from providers.responses.tools.schemas import check_parameters

_MAX_TOOLS: Final = 128


@dataclass(frozen=True, slots=True)
class ClientToolName:
    """A function or custom tool of the client's, by its own name."""

    name: str
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class _ClientToolDeclaration:
    """A function or custom tool of the client's, and where it was declared."""

    tool: DeclaredFunction | DeclaredCustom
    param: str
    namespace: str | None = None


class OfferedTools:
    """`made` are the tools with typed items, `items` the conversation, where a tool search may have found more.
    Raises InvalidRequest where two tools are called alike, or a schema is none."""

    def __init__(
        self,
        request: CreateResponse,
        bindings: Sequence[ToolBinding] = (),
        items: Sequence[Item] = (),
        *,
        supports_namespaces: bool = False,
    ) -> None:
        self.typed_tools: Sequence[TypedTool] = [each.tool for each in bindings]
        self._request = request
        self._bindings = bindings
        self.supports_namespaces = supports_namespaces
        self._client_tools: list[ChatTool] = []
        self._tools_by_name: dict[str, TypedTool | ClientToolName] = {}
        self.refresh_names()
        found = {self._qualified_name(each): each for each in _searched_declarations(items)}
        later = {
            self._qualified_name(each): each for each in _client_declarations(collect_additional_tools(items))
        } | found
        searches = any(isinstance(each.declaration, ToolSearchTool) for each in bindings)
        declared = [*_request_declarations(request)]
        keys = {self._qualified_name(each) for each in declared}
        declared += (each for key, each in later.items() if key not in keys)
        _check_schemas(declared)
        for each in declared:
            waits = bool(each.tool.defer_loading) and searches and self._qualified_name(each) not in found
            self._add_client_tool(each, should_offer=not waits)
        self.refresh_names()

    @property
    def parallel_tool_calls(self) -> bool | None:
        """Whether the model may make several calls at a time, as the request says it."""
        return self._request.parallel_tool_calls

    def refresh_names(self) -> None:
        """Take note of the names that typed tools have now. Raises InvalidRequest where they are too many together."""
        for tool in self.typed_tools:
            for name in tool.call_names:
                self._tools_by_name.setdefault(name, tool)
        if (count := len(self.offered_tools())) > _MAX_TOOLS:
            raise InvalidRequest(
                f"The model can be offered {_MAX_TOOLS} tools at most, and here are {count}. "
                "Name those of an MCP server that are needed in its `allowed_tools`.",
                param="tools",
                code="array_above_max_length",
            )

    def offered_tools(self, *, include_hosted: bool = True) -> list[ChatTool]:
        """What the model is given: the client's tools, then the typed ones; without `hosted`, none that runs here."""
        typed = [
            each for tool in self.typed_tools if include_hosted or not tool.is_hosted for each in tool.offered_tools
        ]
        return [*self._client_tools, *typed]

    def find_tool(self, name: str) -> TypedTool | ClientToolName | None:
        """What a called name stands for. gpt-oss now and then says `functions.` before a name that is in no such
        namespace."""
        return self._tools_by_name.get(name) or self._tools_by_name.get(name.removeprefix("functions."))

    def tool_choice(
        self, *, is_final: bool = True, listing_errors: Mapping[str, str] | None = None
    ) -> ChatToolChoice | None:
        """The request's tool choice in chat completions' terms. Until it is `final`, tools may still be unlisted;
        `failed` says why servers' could not be, by label. Raises UpstreamError where that leaves nothing to call."""
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
            case AllowedToolsOption(mode=mode, tools=allowed):
                there = [each for each in allowed if not _names_server_in(each, listing_errors)]
                named = [name for each in there for name in self._resolve_choice(each, are_all_listed=listed)]
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
        """The same once a forced choice has been obeyed, which would never let the model answer: what is left of it is
        which tools may be called at all."""
        if not offered_tools:
            return None
        match self._request.tool_choice:
            case "none":
                return "none"
            case AllowedToolsOption(tools=allowed):
                names = {tool.name for tool in offered_tools}
                named = [
                    one
                    for each in allowed
                    for one in self._resolve_choice(each, are_all_listed=False)
                    if one.name in names
                ]
                return ChatAllowedTools(allowed_tools=AllowedToolSet(mode="auto", tools=named)) if named else "none"
            case _:
                return "auto"

    def choice_policy(self, choice: ChatToolChoice | None) -> ToolChoicePolicy:
        """What a turn with that choice has to be held to."""
        match choice:
            case None | "auto":
                return ToolChoicePolicy()
            case "none":
                return ToolChoicePolicy(frozenset())
            case "required":
                return ToolChoicePolicy(requires_call=True)
            case ChatAllowedTools(allowed_tools=allowed):
                return ToolChoicePolicy(
                    self._expand_call_names({each.name for each in allowed.tools}), allowed.mode == "required"
                )
            case _:
                return ToolChoicePolicy(self._expand_call_names({choice.name}), requires_call=True)

    def _expand_call_names(self, names: Set[str]) -> frozenset[str]:
        """What calls of tools of these names are named: a native tool's have names of their own."""
        native = {
            each.name for tool in self.typed_tools for each in tool.offered_tools if isinstance(each, NativeTool)
        } & names
        known = (name for tool in self.typed_tools if native for name in tool.call_names)
        return frozenset(names) | {name for name in known if name.partition(".")[0] in native}

    def _resolve_choice(
        self, choice: ChosenFunction | ChosenCustomTool | ChosenMcpTool | ChosenHostedTool, *, are_all_listed: bool
    ) -> list[NamedTool]:
        if isinstance(choice, ChosenFunction | ChosenCustomTool):
            return [self._resolve_client_choice(choice)]
        tools = [each.tool for each in self._bindings if _matches_choice(each.declaration, choice)]
        names = [name for tool in tools for name in tool.names_for_choice(choice)]
        custom = {each.name for tool in tools for each in tool.offered_tools if isinstance(each, ChatCustomTool)}
        if not tools and any(_matches_choice(each, choice) for each in self._request.tools or ()):
            return []  # declared, and left out silently: so is the choice of it
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
        own = [
            tool.name
            for tool in self._client_tools
            if tool.type == choice.type
            and isinstance(known := self._tools_by_name.get(tool.name), ClientToolName)
            and known.name == choice.name
        ]
        typed = [tool.name for each in self.typed_tools for tool in each.offered_tools if tool.name == choice.name]
        name = next(iter((*own, *typed)), None)
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
        self._tools_by_name[name] = ClientToolName(client_tool.tool.name, client_tool.namespace)
        if not should_offer:
            return
        if isinstance(client_tool.tool, DeclaredCustom):
            self._client_tools.append(ChatCustomTool(custom=_build_custom(client_tool.tool, name)))
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
        self._client_tools.append(ChatFunctionTool(function=function))

    def _qualified_name(self, client_tool: _ClientToolDeclaration) -> str:
        if isinstance(client_tool.tool, DeclaredCustom):  # a namespace holds functions only, as models know it
            return qualified_name(client_tool.namespace, client_tool.tool.name, supports_namespaces=False)
        return qualified_name(
            client_tool.namespace, client_tool.tool.name, supports_namespaces=self.supports_namespaces
        )


def _request_declarations(request: CreateResponse) -> Iterator[_ClientToolDeclaration]:
    for index, tool in enumerate(request.tools or ()):
        param = f"tools[{index}]"
        if isinstance(tool, DeclaredFunction | DeclaredCustom):
            yield _ClientToolDeclaration(tool, param)
        elif isinstance(tool, NamespaceTool):
            yield from (
                _ClientToolDeclaration(each, f"{param}.tools[{at}]", tool.name) for at, each in enumerate(tool.tools)
            )


def _searched_declarations(items: Sequence[Item]) -> Iterator[_ClientToolDeclaration]:
    """What tool searches have found. A server among it is listed, as a declared one is."""
    return _client_declarations(tool for item in items if isinstance(item, ToolSearchOutput) for tool in item.tools)


def _client_declarations(tools: Iterable[DeclaredTool]) -> Iterator[_ClientToolDeclaration]:
    """The client's own among tools of the input."""
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            yield from (_ClientToolDeclaration(each, "input", tool.name) for each in tool.tools)
        elif isinstance(tool, DeclaredFunction | DeclaredCustom):
            yield _ClientToolDeclaration(tool, "input")


def _check_schemas(declarations: Sequence[_ClientToolDeclaration]) -> None:
    check_parameters(
        [
            (f"{each.param}.parameters", each.tool.name, each.tool.parameters, each.tool.strict is True)
            for each in declarations
            if isinstance(each.tool, DeclaredFunction) and each.tool.parameters is not None
        ]
    )


def _build_custom(tool: DeclaredCustom, name: str) -> CustomToolDefinition:
    form = tool.format
    if isinstance(form, DeclaredGrammar):
        grammar = Grammar(syntax=form.syntax, definition=form.definition)
        return CustomToolDefinition(name=name, description=tool.description, format=ChatGrammarFormat(grammar=grammar))
    return CustomToolDefinition(name=name, description=tool.description, format=TextFormatInput())


def _matches_choice(declaration: Wire, choice: ChosenMcpTool | ChosenHostedTool) -> bool:
    if isinstance(choice, ChosenMcpTool):
        return isinstance(declaration, McpTool) and declaration.server_label == choice.server_label
    if isinstance(declaration, DeclaredSearch):
        return choice.type.startswith("web_search")
    return getattr(declaration, "type", None) == choice.type


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
