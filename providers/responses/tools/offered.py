"""Toolbox: all that one request offers the model, and what each name stands for that the model calls."""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final

from apis.chat import (
    AllowedTools,
    AllowedToolSet,
    Custom,
    CustomTool,
    Function,
    FunctionTool,
    GrammarFormat,
    NamedCustom,
    NamedFunction,
    NamedTool,
    NativeTool,
    Tool,
    ToolChoice,
    ToolName,
)
from apis.errors import InvalidRequest, UpstreamError
from apis.responses import CreateResponse
from apis.wire.base import Wire
from apis.wire.items import Item
from apis.wire.text_format import Grammar, TextFormatInput
from apis.wire.tool_choice import AllowedTools as AllowedToolsOption
from apis.wire.tool_choice import ChosenCustom, ChosenFunction, ChosenHosted, ChosenMcp
from apis.wire.tool_items import ToolSearchOutput
from apis.wire.tools import CustomTool as DeclaredCustom
from apis.wire.tools import FunctionTool as DeclaredFunction
from apis.wire.tools import GrammarFormat as DeclaredGrammar
from apis.wire.tools import McpTool, NamespaceTool, ToolSearchTool
from apis.wire.tools import Tool as DeclaredTool
from apis.wire.tools import WebSearchTool as DeclaredSearch
from providers.responses.tools.call import TypedTool
from providers.responses.tools.choice_policy import Demand
from providers.responses.tools.input_tools import added_tools
from providers.responses.tools.names import called_name, group_of
from providers.responses.tools.registry import Made
from providers.responses.tools.schemas import check_parameters

_MAX_TOOLS: Final = 128


@dataclass(frozen=True, slots=True)
class ClientName:
    """A function or custom tool of the client's, by its own name."""

    name: str
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class _Declared:
    """A function or custom tool of the client's, and where it was declared."""

    tool: DeclaredFunction | DeclaredCustom
    param: str
    namespace: str | None = None


class Toolbox:
    """`made` are the tools with typed items, `items` the conversation, where a tool search may have found more.
    Raises InvalidRequest where two tools are called alike, or a schema is none."""

    def __init__(
        self, request: CreateResponse, made: Sequence[Made] = (), items: Sequence[Item] = (), *, grouped: bool = False
    ) -> None:
        self.typed: Sequence[TypedTool] = [each.tool for each in made]
        self._request = request
        self._made = made
        self.grouped = grouped
        self._own: list[Tool] = []
        self._names: dict[str, TypedTool | ClientName] = {}
        self.refresh()
        found = {self._key(each): each for each in _found(items)}
        later = {self._key(each): each for each in _clients(added_tools(items))} | found
        searches = any(isinstance(each.declared, ToolSearchTool) for each in made)
        declared = [*_declared(request)]
        keys = {self._key(each) for each in declared}
        declared += (each for key, each in later.items() if key not in keys)
        _check_schemas(declared)
        for each in declared:
            waits = bool(each.tool.defer_loading) and searches and self._key(each) not in found
            self._add(each, offer=not waits)
        self.refresh()

    @property
    def parallel(self) -> bool | None:
        """Whether the model may make several calls at a time, as the request says it."""
        return self._request.parallel_tool_calls

    def refresh(self) -> None:
        """Take note of the names that typed tools have now. Raises InvalidRequest where they are too many together."""
        for tool in self.typed:
            for name in tool.names:
                self._names.setdefault(name, tool)
        if (count := len(self.offered())) > _MAX_TOOLS:
            raise InvalidRequest(
                f"The model can be offered {_MAX_TOOLS} tools at most, and here are {count}. "
                "Name those of an MCP server that are needed in its `allowed_tools`.",
                param="tools",
                code="array_above_max_length",
            )

    def offered(self, *, hosted: bool = True) -> list[Tool]:
        """What the model is given: the client's tools, then the typed ones; without `hosted`, none that runs here."""
        typed = [each for tool in self.typed if hosted or not tool.hosted for each in tool.offered]
        return [*self._own, *typed]

    def find(self, name: str) -> TypedTool | ClientName | None:
        """What a called name stands for. gpt-oss now and then says `functions.` before a name that is in no such
        namespace."""
        return self._names.get(name) or self._names.get(name.removeprefix("functions."))

    def choice(self, *, final: bool = True, failed: Mapping[str, str] | None = None) -> ToolChoice | None:
        """The request's tool choice in chat completions' terms. Until it is `final`, tools may still be unlisted;
        `failed` says why servers' could not be, by label. Raises UpstreamError where that leaves nothing to call."""
        choice = self._request.tool_choice
        tools, failed = self.offered(), failed or {}
        listed = final or all(tool.offered for tool in self.typed)
        match choice:
            case None | "auto":
                return "auto" if tools else None
            case "none":
                return "none" if tools else None
            case "required":
                if not tools and failed:
                    raise _unlisted(failed)
                if not tools and listed:
                    raise _wrong_choice("Tool choice 'required' needs tools.")
                return "required" if tools else None
            case AllowedToolsOption(mode=mode, tools=allowed):
                there = [each for each in allowed if not _is_of_server(each, failed)]
                named = [name for each in there for name in self._named(each, listed=listed)]
                if not named and (mode == "auto" or not failed):
                    return "none" if tools else None
            case _:
                mode, named = "required", [] if _is_of_server(choice, failed) else self._named(choice, listed=listed)
                if len(named) == 1:
                    return named[0]
        if not named and failed:
            raise _unlisted(failed)
        return AllowedTools(allowed_tools=AllowedToolSet(mode=mode, tools=named)) if named else None

    def later_choice(self, offered: Sequence[Tool]) -> ToolChoice | None:
        """The same once a forced choice has been obeyed, which would never let the model answer: what is left of it is
        which tools may be called at all."""
        if not offered:
            return None
        match self._request.tool_choice:
            case "none":
                return "none"
            case AllowedToolsOption(tools=allowed):
                names = {tool.name for tool in offered}
                named = [one for each in allowed for one in self._named(each, listed=False) if one.name in names]
                return AllowedTools(allowed_tools=AllowedToolSet(mode="auto", tools=named)) if named else "none"
            case _:
                return "auto"

    def demand(self, choice: ToolChoice | None) -> Demand:
        """What a turn with that choice has to be held to."""
        match choice:
            case None | "auto":
                return Demand()
            case "none":
                return Demand(frozenset())
            case "required":
                return Demand(forced=True)
            case AllowedTools(allowed_tools=allowed):
                return Demand(self._called({each.name for each in allowed.tools}), allowed.mode == "required")
            case _:
                return Demand(self._called({choice.name}), forced=True)

    def _called(self, names: Set[str]) -> frozenset[str]:
        """What calls of tools of these names are named: a native tool's have names of their own."""
        native = {each.name for tool in self.typed for each in tool.offered if isinstance(each, NativeTool)} & names
        known = (name for tool in self.typed if native for name in tool.names)
        return frozenset(names) | {name for name in known if name.partition(".")[0] in native}

    def _named(
        self, choice: ChosenFunction | ChosenCustom | ChosenMcp | ChosenHosted, *, listed: bool
    ) -> list[NamedTool]:
        if isinstance(choice, ChosenFunction | ChosenCustom):
            return [self._own_named(choice)]
        tools = [each.tool for each in self._made if _is_meant(each.declared, choice)]
        names = [name for tool in tools for name in tool.chosen(choice)]
        custom = {each.name for tool in tools for each in tool.offered if isinstance(each, CustomTool)}
        if not tools and any(_is_meant(each, choice) for each in self._request.tools or ()):
            return []  # declared, and left out silently: so is the choice of it
        if not names and (listed or not tools):
            label = choice.name or choice.server_label if isinstance(choice, ChosenMcp) else choice.type
            raise _wrong_choice(f"Tool choice '{label}' not found in 'tools'.")
        return [
            NamedCustom(custom=ToolName(name=name)) if name in custom else NamedFunction(function=ToolName(name=name))
            for name in names
        ]

    def _own_named(self, choice: ChosenFunction | ChosenCustom) -> NamedTool:
        own = [
            tool.name
            for tool in self._own
            if tool.type == choice.type
            and isinstance(known := self._names.get(tool.name), ClientName)
            and known.name == choice.name
        ]
        typed = [tool.name for each in self.typed for tool in each.offered if tool.name == choice.name]
        name = next(iter((*own, *typed)), None)
        if name is None:
            raise _wrong_choice(f"Tool choice '{choice.name}' not found in 'tools'.")
        if isinstance(choice, ChosenCustom):
            return NamedCustom(custom=ToolName(name=name))
        return NamedFunction(function=ToolName(name=name))

    def _add(self, each: _Declared, *, offer: bool) -> None:
        name = self._key(each)
        if name in self._names:
            raise InvalidRequest(
                f"Two tools are named '{each.tool.name}'.", param=f"{each.param}.name", code="invalid_value"
            )
        self._names[name] = ClientName(each.tool.name, each.namespace)
        if not offer:
            return
        if isinstance(each.tool, DeclaredCustom):
            self._own.append(CustomTool(custom=_custom(each.tool, name)))
            return
        group = group_of(each.namespace, grouped=self.grouped) if each.namespace else None
        function = Function(
            name=each.tool.name if group else name,
            description=each.tool.description,
            parameters=each.tool.parameters,
            strict=each.tool.strict,
            namespace=group,
        )
        self._own.append(FunctionTool(function=function))

    def _key(self, each: _Declared) -> str:
        if isinstance(each.tool, DeclaredCustom):  # a namespace holds functions only, as models know it
            return called_name(each.namespace, each.tool.name, grouped=False)
        return called_name(each.namespace, each.tool.name, grouped=self.grouped)


def _declared(request: CreateResponse) -> Iterator[_Declared]:
    for index, tool in enumerate(request.tools or ()):
        param = f"tools[{index}]"
        if isinstance(tool, DeclaredFunction | DeclaredCustom):
            yield _Declared(tool, param)
        elif isinstance(tool, NamespaceTool):
            yield from (_Declared(each, f"{param}.tools[{at}]", tool.name) for at, each in enumerate(tool.tools))


def _found(items: Sequence[Item]) -> Iterator[_Declared]:
    """What tool searches have found. A server among it is listed, as a declared one is."""
    return _clients(tool for item in items if isinstance(item, ToolSearchOutput) for tool in item.tools)


def _clients(tools: Iterable[DeclaredTool]) -> Iterator[_Declared]:
    """The client's own among tools of the input."""
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            yield from (_Declared(each, "input", tool.name) for each in tool.tools)
        elif isinstance(tool, DeclaredFunction | DeclaredCustom):
            yield _Declared(tool, "input")


def _check_schemas(declared: Sequence[_Declared]) -> None:
    check_parameters(
        [
            (f"{each.param}.parameters", each.tool.name, each.tool.parameters, each.tool.strict is True)
            for each in declared
            if isinstance(each.tool, DeclaredFunction) and each.tool.parameters is not None
        ]
    )


def _custom(tool: DeclaredCustom, name: str) -> Custom:
    form = tool.format
    if isinstance(form, DeclaredGrammar):
        grammar = Grammar(syntax=form.syntax, definition=form.definition)
        return Custom(name=name, description=tool.description, format=GrammarFormat(grammar=grammar))
    return Custom(name=name, description=tool.description, format=TextFormatInput())


def _is_meant(declared: Wire, choice: ChosenMcp | ChosenHosted) -> bool:
    if isinstance(choice, ChosenMcp):
        return isinstance(declared, McpTool) and declared.server_label == choice.server_label
    if isinstance(declared, DeclaredSearch):
        return choice.type.startswith("web_search")
    return getattr(declared, "type", None) == choice.type


def _is_of_server(choice: ChosenFunction | ChosenCustom | ChosenMcp | ChosenHosted, labels: Container[str]) -> bool:
    return isinstance(choice, ChosenMcp) and choice.server_label in labels


def _wrong_choice(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="tool_choice", code="invalid_value")


def _unlisted(failed: Mapping[str, str]) -> UpstreamError:
    why = " ".join(f"The tools of MCP server '{label}' could not be listed: {error}" for label, error in failed.items())
    return UpstreamError(f"What `tool_choice` demands is not there to be called. {why}")
