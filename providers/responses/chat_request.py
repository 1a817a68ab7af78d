"""A Responses request -> the chat that answers it: tools, choice, formats and sampling in chat completions' terms."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from apis.errors import InvalidRequest, Unsupported
from apis.inference import (
    AllowedTools,
    AllowedToolSet,
    ChatRequest,
    Custom,
    CustomTool,
    Function,
    FunctionTool,
    Grammar,
    GrammarFormat,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    Message,
    NamedCustom,
    NamedFunction,
    NamedTool,
    ResponseFormat,
    Sampling,
    TextFormatInput,
    Tool,
    ToolChoice,
    ToolName,
)
from apis.responses import UNSUPPORTED, ChosenCustom, ChosenFunction, ChosenHosted, CreateResponse
from apis.responses import AllowedTools as AllowedToolsOption
from apis.responses import CustomTool as DeclaredCustom
from apis.responses import FunctionTool as DeclaredFunction
from apis.responses import GrammarFormat as DeclaredGrammar
from providers.responses.hosted.call import HostedTool
from providers.responses.schemas import check_format, check_parameters

_SAME: Final = ("model", "prompt_cache_key", "cache_salt", "priority", *Sampling.model_fields)
"""Fields that both requests have."""


def refuse_unsupported(request: CreateResponse) -> None:
    """Raise, naming the field, for what the API has and this stack does not offer."""
    for name in UNSUPPORTED:
        if getattr(request, name) is not None:
            raise Unsupported(f"'{name}' is not offered by this server.", param=name)
    if request.background:
        raise Unsupported("'background' is not offered by this server.", param="background")
    if request.truncation == "auto":
        message = "Truncation 'auto' is not offered by this server: use 'disabled'."
        raise Unsupported(message, param="truncation", code="unsupported_value")
    if request.input is None and request.previous_response_id is None:
        raise InvalidRequest("Missing required parameter: 'input'.", param="input", code="missing_required_parameter")


def build_chat(request: CreateResponse, messages: list[Message], hosted: Mapping[str, HostedTool]) -> ChatRequest:
    """The first turn's chat. `hosted` are the server's tools by the names the model calls."""
    if not messages:
        raise InvalidRequest("The input holds nothing to tell a model.", param="input", code="invalid_value")
    tools = _tools(request, hosted)
    wants_logprobs = "message.output_text.logprobs" in (request.include or ()) or bool(request.top_logprobs)
    fields: dict[str, Any] = {name: getattr(request, name) for name in _SAME}
    fields |= {
        "messages": messages,
        "tools": tools or None,
        "tool_choice": _choice(request, hosted, tools),
        "parallel_tool_calls": request.parallel_tool_calls if tools else None,
        "response_format": _format(request),
        "max_completion_tokens": request.max_output_tokens,
        "reasoning_effort": request.reasoning.effort if request.reasoning else None,
        "verbosity": request.text.verbosity if request.text else None,
        "logprobs": True if wants_logprobs else None,
        "top_logprobs": request.top_logprobs if wants_logprobs else None,
    }
    return ChatRequest.model_validate({name: value for name, value in fields.items() if value is not None})


def _tools(request: CreateResponse, hosted: Mapping[str, HostedTool]) -> list[Tool]:
    tools: list[Tool] = []
    check_parameters(
        [
            (f"tools[{index}].parameters", tool.name, tool.parameters, tool.strict is True)
            for index, tool in enumerate(request.tools or ())
            if isinstance(tool, DeclaredFunction) and tool.parameters is not None
        ]
    )
    for index, tool in enumerate(request.tools or ()):
        if isinstance(tool, DeclaredFunction | DeclaredCustom) and (
            tool.name in hosted or any(tool.name == other.name for other in tools)
        ):
            raise InvalidRequest(
                f"Two tools are named '{tool.name}'.", param=f"tools[{index}].name", code="invalid_value"
            )
        match tool:
            case DeclaredFunction():
                function = Function(
                    name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
                )
                tools.append(FunctionTool(function=function))
            case DeclaredCustom():
                tools.append(CustomTool(custom=_custom(tool)))
            case _:
                continue
    offered = {id(tool): tool for tool in hosted.values()}.values()
    return [*tools, *(function for tool in offered for function in tool.functions().values())]


def _custom(tool: DeclaredCustom) -> Custom:
    form = tool.format
    if isinstance(form, DeclaredGrammar):
        grammar = Grammar(syntax=form.syntax, definition=form.definition)
        return Custom(name=tool.name, description=tool.description, format=GrammarFormat(grammar=grammar))
    return Custom(name=tool.name, description=tool.description, format=TextFormatInput())


def _choice(request: CreateResponse, hosted: Mapping[str, HostedTool], tools: Sequence[Tool]) -> ToolChoice | None:
    choice = request.tool_choice
    names = {(tool.type, tool.name) for tool in tools}
    match choice:
        case None | "auto":
            return "auto" if tools else None
        case "none":
            return "none" if tools else None
        case "required":
            if not tools:
                raise InvalidRequest("Tool choice 'required' needs tools.", param="tool_choice", code="invalid_value")
            return "required"
        case AllowedToolsOption(mode=mode, tools=allowed):
            chosen = [_named(each, hosted, names) for each in allowed]
            return AllowedTools(allowed_tools=AllowedToolSet(mode=mode, tools=chosen))
        case _:
            return _named(choice, hosted, names)


def _named(
    choice: ChosenFunction | ChosenCustom | ChosenHosted, hosted: Mapping[str, HostedTool], names: set[tuple[str, str]]
) -> NamedTool:
    if isinstance(choice, ChosenHosted):
        if not hosted:
            raise InvalidRequest(
                f"Tool choice '{choice.type}' not found in 'tools'.", param="tool_choice", code="invalid_value"
            )
        return NamedFunction(function=ToolName(name=next(iter(hosted))))
    if (choice.type, choice.name) not in names:
        raise InvalidRequest(
            f"Tool choice '{choice.name}' not found in 'tools'.", param="tool_choice", code="invalid_value"
        )
    if isinstance(choice, ChosenCustom):
        return NamedCustom(custom=ToolName(name=choice.name))
    return NamedFunction(function=ToolName(name=choice.name))


def _format(request: CreateResponse) -> ResponseFormat | None:
    form = request.text.format if request.text else None
    if isinstance(form, JsonSchema):
        check_format(form.schema_)
        schema = JsonSchema(name=form.name, schema=form.schema_, description=form.description, strict=form.strict)
        return JsonSchemaFormat(json_schema=schema)
    return JsonObjectFormat() if isinstance(form, JsonObjectFormat) else None
