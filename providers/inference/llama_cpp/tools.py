"""Tool calls for models that cannot write them reliably: decide, then fill.

First the model may only write one of the choices, to answer or a tool's name; then it writes the answer, or the input
under the tool's own schema or grammar. A request's constraints on its tools thus hold with any model.
"""

import json
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from apis.chat import ChatAllowedTools, ChatCustomTool, ChatFunctionTool, ChatRequest, NamedCustomTool, NamedFunction
from apis.deltas import Delta, DeltaBatch, Finish, TextDelta, ToolArgumentsDelta, ToolCallStart, Usage
from apis.errors import InvalidRequest, UpstreamError
from providers.inference.chat_completions.custom_tools import PlainTool, require_plain_tools
from providers.inference.llama_cpp.client import (
    LOOP_PENALTIES,
    Constraint,
    EngineClient,
    lark_to_constraint,
    regex_to_constraint,
    schema_to_constraint,
)
from providers.inference.llama_cpp.prompts import (
    answer_choice_name,
    build_answer_messages,
    build_argument_messages,
    build_decision_messages,
    calls_since_user,
    normalize_json,
    render_choice,
)

MAX_DECISION_TOKENS: Final = 128
RESET_SAMPLING: Final[dict[str, None]] = dict.fromkeys(
    (
        *("stop", "logit_bias", "logprobs", "top_logprobs", "presence_penalty", "frequency_penalty"),
        *("repetition_penalty", "top_p", "top_k", "min_p"),
    )
)


@dataclass(frozen=True, slots=True)
class ToolChoices:
    """The choices of a turn: call one of `tools`, or answer if `may_answer`."""

    tools: Sequence[PlainTool]
    may_answer: bool


def request_to_choices(request: ChatRequest) -> ToolChoices:
    """Return the choices of a request. Raises InvalidRequest for a tool choice that names none of its tools."""
    tools, choice = require_plain_tools(request.tools), request.tool_choice
    match choice:
        case "none":
            return ToolChoices((), may_answer=True)
        case "required":
            chosen = ToolChoices(tools, may_answer=False)
        case NamedFunction() | NamedCustomTool():
            chosen = ToolChoices(_filter_named_tools(tools, [choice]), may_answer=False)
        case ChatAllowedTools():
            allowed = choice.allowed_tools
            chosen = ToolChoices(_filter_named_tools(tools, allowed.tools), may_answer=allowed.mode == "auto")
        case _:
            return ToolChoices(tools, may_answer=True)
    if not chosen.tools:
        raise InvalidRequest("tool_choice demands a tool that is not among the tools.", param="tool_choice")
    return chosen


def _filter_named_tools(
    tools: Sequence[PlainTool], choices: Sequence[NamedFunction | NamedCustomTool]
) -> list[PlainTool]:
    names = {one.name for one in choices}
    if missing := names - {tool.name for tool in tools}:
        missing_names = ", ".join(sorted(missing))
        raise InvalidRequest(
            f"tool_choice names tools that the request does not have: {missing_names}.", param="tool_choice"
        )
    return [tool for tool in tools if tool.name in names]


def tool_to_constraint(tool: PlainTool, param: str) -> Constraint | None:
    """Return the constraint on the tool's input; None for free text."""
    if isinstance(tool, ChatFunctionTool):
        function = tool.function
        return schema_to_constraint(
            _object_schema(tool),
            f"{param}.parameters",
            strict=bool(function.strict),
            code="invalid_function_parameters",
            tool=tool.name,
        )
    form = tool.custom.format
    if form is None or form.type == "text":
        return None
    convert = lark_to_constraint if form.grammar.syntax == "lark" else regex_to_constraint
    return convert(form.grammar.definition, f"{param}.format.definition")


def _object_schema(tool: ChatFunctionTool) -> dict[str, Any]:
    return {"type": "object", "properties": {}, **(tool.function.parameters or {})}


class ToolTurn:
    """One turn of a request with tools. `constraints` are those of all its tools by name, checked by the caller."""

    def __init__(
        self,
        client: EngineClient,
        request: ChatRequest,
        choices: ToolChoices,
        constraints: dict[str, Constraint | None],
    ) -> None:
        self._client = client
        self._request = request
        self._choices = choices
        self._constraints = constraints
        self._usage = Usage()

    async def generate(self, answer_constraint: Constraint | None) -> AsyncGenerator[DeltaBatch]:
        """See `Inference.chat`. The usage covers everything that was generated for the turn."""
        tool: PlainTool | None = self._choices.tools[0]
        if self._choices.may_answer or len(self._choices.tools) > 1:
            decided = await self._choose_tool()
            if decided is None:
                yield (Finish("length", self._usage),)
                return
            tool = decided[0]
        if tool is not None:
            async with aclosing(self._generate_call(tool)) as batches:
                async for batch in batches:
                    yield batch
                    if isinstance(batch[-1], Finish):
                        return
        async with aclosing(self._generate_answer(answer_constraint)) as batches:
            async for batch in batches:
                yield batch

    async def _choose_tool(self) -> tuple[PlainTool | None] | None:
        """Return the chosen tool in a tuple, or `(None,)` to answer; None when the token limit came first."""
        by_text = {render_choice(tool.name): tool for tool in self._choices.tools}
        texts = list(by_text)
        if self._choices.may_answer:
            texts.insert(0, render_choice(answer_choice_name(self._choices.tools)))
        rules = "start: " + " | ".join(json.dumps(text) for text in texts)
        messages = build_decision_messages(
            self._request.messages, self._choices.tools, may_answer=self._choices.may_answer
        )
        remaining_tokens = self._remaining_tokens()
        request = self._request.model_copy(
            update={
                **RESET_SAMPLING,
                "messages": messages,
                "temperature": 0.0,
                "max_completion_tokens": min(remaining_tokens or MAX_DECISION_TOKENS, MAX_DECISION_TOKENS),
            }
        )
        text, reason = "", ""
        async with aclosing(self._client.chat(request, Constraint(rules, "tools", "invalid_value"))) as batches:
            async for batch in batches:
                text += "".join(delta.text for delta in batch if isinstance(delta, TextDelta))
                if isinstance(finish := batch[-1], Finish):
                    self._usage = self._usage.plus(finish.usage)
                    reason = finish.reason
        if text in texts:
            return (by_text.get(text),)
        if reason == "length":
            return None
        raise UpstreamError("The local engine (llama.cpp) did not keep to the choices it was given.")

    async def _generate_call(self, tool: PlainTool) -> AsyncGenerator[DeltaBatch]:
        """Generate a call. Ends without a Finish, and without a batch, if it would repeat the previous call."""
        name, constraint = tool.name, self._constraints[tool.name]
        schema = _object_schema(tool) if isinstance(tool, ChatFunctionTool) else None
        request = self._request.model_copy(
            update={
                "messages": build_argument_messages(self._request.messages, tool, schema),
                "temperature": self._request.temperature or 0.0,
                "logprobs": None,
                "top_logprobs": None,
                "stop": None,
                "max_completion_tokens": self._remaining_tokens(),
            }
        )
        previous_calls = calls_since_user(self._request.messages) if self._choices.may_answer else []
        call_id = f"call_{secrets.token_hex(12)}"
        buffered: list[Delta] = [ToolCallStart(call_id, name, custom=isinstance(tool, ChatCustomTool))]
        # A tool that was just called may only be called again with other input; otherwise small models repeat it
        # forever.
        is_possible_repeat = name in (called for called, _ in previous_calls)
        if self._is_limit_reached():
            yield (Finish("length", self._usage),)
            return
        async with aclosing(self._client.chat(request, constraint, **LOOP_PENALTIES)) as batches:
            async for batch in batches:
                for delta in batch:
                    if isinstance(delta, TextDelta) and delta.text:
                        buffered.append(ToolArgumentsDelta(call_id, delta.text))
                    elif isinstance(delta, Finish):
                        self._usage = self._usage.plus(delta.usage)
                        text = "".join(one.text for one in buffered if isinstance(one, ToolArgumentsDelta))
                        if is_possible_repeat and (name, normalize_json(text)) in previous_calls:
                            return
                        is_possible_repeat = False
                        buffered.append(Finish("tool_calls" if delta.reason == "stop" else delta.reason, self._usage))
                if buffered and not is_possible_repeat:
                    yield buffered
                    buffered = []

    async def _generate_answer(self, constraint: Constraint | None) -> AsyncGenerator[DeltaBatch]:
        if self._is_limit_reached():
            yield (Finish("length", self._usage),)
            return
        request = self._request.model_copy(
            update={
                "messages": build_answer_messages(self._request.messages),
                "max_completion_tokens": self._remaining_tokens(),
            }
        )
        async with aclosing(self._client.chat(request, constraint)) as batches:
            async for batch in batches:
                if isinstance(finish := batch[-1], Finish):
                    self._usage = self._usage.plus(finish.usage)
                    yield [*batch[:-1], msgspec.structs.replace(finish, usage=self._usage)]
                else:
                    yield batch

    def _remaining_tokens(self) -> int | None:
        """Return the number of tokens that may still be generated; None without a limit."""
        bound = self._request.max_completion_tokens
        return None if bound is None else max(bound - self._usage.output_tokens, 1)

    def _is_limit_reached(self) -> bool:
        bound = self._request.max_completion_tokens
        return bound is not None and self._usage.output_tokens >= bound
