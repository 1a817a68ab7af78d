"""A request's constraints on a whole Harmony turn, as one llguidance Lark grammar.

It covers the tokens after `<|start|>assistant`: reasoning and preambles are free, then comes the answer or a call.
Schemas and grammars from clients are separate rules with their own names. Equal requests have equal text. Control
tokens are written as ids, because llama.cpp counts some of them as text and knows no such names.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from math import isfinite
from typing import Final

from pydantic import JsonValue

from apis.chat import (
    ChatAllowedTools,
    ChatCustomTool,
    ChatFunctionTool,
    ChatGrammarFormat,
    ChatJsonSchemaFormat,
    ChatRequest,
    ChatTool,
    NamedCustomTool,
    NamedFunction,
    NativeTool,
)
from apis.errors import InvalidRequest
from apis.wire.text_format import JsonObjectFormat
from providers.common.grammars.depth import LARK_TOKEN
from providers.inference.harmony.header import BROWSER_CALLS
from providers.inference.harmony.token_cache import name_to_recipient
from providers.inference.harmony.vocabulary import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START

MAX_SOURCE_BYTES: Final = 256 * 1024
MAX_SCHEMA_DEPTH: Final = 128
MAX_MINIMUM: Final = 100_000
MAX_MULTIPLE_OF: Final = 10_000
"""Limit of `multipleOf` in units of its last digit: divisibility is an automaton with one state per remainder."""
MAX_FORCED_CHARS: Final = 16_384
MAX_MESSAGES_BEFORE: Final = 8

INVALID_GRAMMAR: Final = "invalid_grammar"
ANY_OBJECT: Final = '%json {"type": "object"}'
NO_PARAMETERS: Final[dict[str, JsonValue]] = {"type": "object", "properties": {}, "additionalProperties": False}
FREE_TEXT: Final = "TEXT"
_MINIMUM_KEYWORDS: Final = frozenset({"minLength", "minItems", "minProperties", "minContains"})
_REPEATING_KEYWORDS: Final = frozenset(
    {"$ref", "$dynamicRef", "pattern", "patternProperties", "minItems", "minProperties"}
)
_FOREIGN_TOKENS: Final = {"token": "a special token", "grammar": "another grammar"}
_COMMON_RULES: Final = f"""\
before: <[{CHANNEL}]> ("analysis" | "commentary") <[{MESSAGE}]> TEXT <[{END}]> <[{START}]> "assistant"
as_json: (" "? <[{CONSTRAIN}]> "json" | " json")?
as_code: (" code" | " "? <[{CONSTRAIN}]> "json" | " json")?
TEXT: /(.|\\n)*/
start: before{{0,{MAX_MESSAGES_BEFORE}}} last
"""


@dataclass(frozen=True, slots=True)
class GrammarPart:
    """Constraint from a client. `rule` is a Lark expression for it, `alone` a complete grammar of it, which is compiled
    before it is used inside another one. `param` is the request field it came from."""

    rule: str
    standalone_grammar: str
    param: str
    code: str
    is_cheap_to_force: bool = False

    @property
    def kind(self) -> str:
        """The word for the constraint in an error message."""
        return "grammar" if self.code == INVALID_GRAMMAR else "schema"


@dataclass(frozen=True, slots=True)
class TurnGrammar:
    """Grammar of a turn as `text`. Its `parts` must be compiled separately first, so that an error names its field."""

    text: str
    parts: Sequence[GrammarPart]

    @property
    def unforced_text(self) -> str:
        """The grammar for an engine whose tokenizer reads the names of control tokens in a text as these tokens: with
        forcing, such a text would have to be written with them."""
        _, _, rules = self.text.partition("\n")
        return f'%llguidance {{"no_forcing": true}}\n{rules}'


def request_to_grammar(request: ChatRequest) -> TurnGrammar | None:
    """Return the grammar; None if every turn is valid. Raises InvalidRequest naming the field that cannot be
    enforced."""
    tools, may_answer = _choose_tools(request)
    bodies = {at: _build_input_rule(tool, f"tools[{at}]") for at, tool in tools.items()}
    answer = _build_answer_rule(request)
    parts = [body for body in (answer, *bodies.values()) if isinstance(body, GrammarPart)]
    if may_answer and answer == FREE_TEXT and not parts and len(tools) == len(request.tools or ()):
        return None
    lasts: list[str] = []
    rules: list[str] = []
    if may_answer:
        lasts.append("answer")
        mark = "" if answer == FREE_TEXT else " as_json"
        rules.append(f'answer: <[{CHANNEL}]> "final"{mark} <[{MESSAGE}]> answer_body <[{RETURN}]>')
        rules.append(f"answer_body: {_rule_text(answer)}")
    for at, tool in tools.items():
        lasts.append(f"call_{at}")
        rules += _build_call_rules(f"call_{at}", tool, _rule_text(bodies[at]))
    options = "{}" if all(part.is_cheap_to_force for part in parts) else '{"no_forcing": true}'
    return TurnGrammar(f"%llguidance {options}\n{_COMMON_RULES}last: {' | '.join(lasts)}\n{_join_lines(rules)}", parts)


def _choose_tools(request: ChatRequest) -> tuple[Mapping[int, ChatTool], bool]:
    """Return the tools that may be called, by index in the request, and true if the model may answer instead."""
    tools, choice = dict(enumerate(request.tools or ())), request.tool_choice
    may_answer = choice in (None, "auto", "none")
    match choice:
        case "none":
            return {}, True
        case "required" if not tools:
            raise InvalidRequest("tool_choice demands a tool, and the request has none.", param="tool_choice")
        case NamedFunction() | NamedCustomTool():
            tools = _filter_named_tools(tools, [choice])
        case ChatAllowedTools(allowed_tools=allowed):
            tools, may_answer = _filter_named_tools(tools, allowed.tools), allowed.mode == "auto"
        case _:
            pass
    return tools, may_answer


def _filter_named_tools(
    tools: Mapping[int, ChatTool], choices: Sequence[NamedFunction | NamedCustomTool]
) -> dict[int, ChatTool]:
    names = {one.name for one in choices}
    if missing := names - {tool.name for tool in tools.values()}:
        names = ", ".join(sorted(missing))
        raise InvalidRequest(f"tool_choice names tools that the request does not have: {names}.", param="tool_choice")
    return {at: tool for at, tool in tools.items() if tool.name in names}


def _build_answer_rule(request: ChatRequest) -> GrammarPart | str:
    match request.response_format:
        case ChatJsonSchemaFormat(json_schema=schema_format):
            return _schema_to_part(
                schema_format.schema_, "text.format.schema", "invalid_json_schema", strict=bool(schema_format.strict)
            )
        case JsonObjectFormat():
            return ANY_OBJECT
        case _:
            return FREE_TEXT


def _build_input_rule(tool: ChatTool, path: str) -> GrammarPart | str:
    match tool:
        case ChatFunctionTool(function=function) if function.strict:
            schema = NO_PARAMETERS if function.parameters is None else function.parameters
            return _schema_to_part(schema, f"{path}.parameters", "invalid_function_parameters", strict=True)
        case ChatFunctionTool():
            return ANY_OBJECT
        case ChatCustomTool(custom=custom) if isinstance(custom.format, ChatGrammarFormat):
            grammar = custom.format.grammar
            convert = _lark_to_part if grammar.syntax == "lark" else _regex_to_part
            return convert(grammar.definition, f"{path}.format.definition")
        case _:
            return FREE_TEXT


def _build_call_rules(rule: str, tool: ChatTool, body: str) -> list[str]:
    """Build the rules of a call. Models name the recipient before the channel, as in the prompt, or after it."""
    match tool:
        case NativeTool(type="browser"):
            names, channel, mark = sorted(BROWSER_CALLS), '("analysis" | "commentary")', " as_code"
        case NativeTool():
            names, channel, mark = [tool.name], '("analysis" | "commentary")', " as_code"
        case ChatFunctionTool():
            names, channel, mark = [name_to_recipient(tool.name, frozenset())], '"commentary"', " as_json"
        case ChatCustomTool():
            names, channel, mark = [name_to_recipient(tool.name, frozenset())], '"commentary"', ""
    to = " | ".join(json.dumps(f" to={name}") for name in names)
    header = f"({rule}_to <[{CHANNEL}]> {channel} | <[{CHANNEL}]> {channel} {rule}_to){mark}"
    return [
        f"{rule}: {header} <[{MESSAGE}]> {rule}_body <[{CALL}]>",
        f"{rule}_to: {to}",
        f"{rule}_body: {body}",
    ]


def _rule_text(body: GrammarPart | str) -> str:
    return body if isinstance(body, str) else body.rule


def _join_lines(rules: Sequence[str]) -> str:
    return "".join(f"{rule}\n" for rule in rules)


# --- constraints from clients ----------------------------------------------------------------------------------------


def _schema_to_part(schema: Mapping[str, JsonValue], param: str, code: str, *, strict: bool) -> GrammarPart:
    """Return a part for compact JSON of the schema. Unless `strict`, keywords that cannot be enforced are ignored."""
    for key, value in _walk_schema(schema, param, code):
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        if key in _MINIMUM_KEYWORDS and value > MAX_MINIMUM:
            raise InvalidRequest(f"'{key}' in {param} is more than {MAX_MINIMUM}.", param=param, code=code)
        if key == "multipleOf" and (not isfinite(value) or _count_last_digit_units(value) > MAX_MULTIPLE_OF):
            raise InvalidRequest(f"'multipleOf' in {param} has too many digits to be enforced.", param=param, code=code)
    options = {"lenient": not strict, "coerce_one_of": not strict, "whitespace_flexible": False}
    text = json.dumps({**schema, "x-guidance": options})
    if len(text) > MAX_SOURCE_BYTES:
        raise InvalidRequest(f"The schema in {param} is larger than {MAX_SOURCE_BYTES} bytes.", param=param, code=code)
    short = len(text) <= MAX_FORCED_CHARS and not any(
        key in _REPEATING_KEYWORDS for key, _ in _walk_schema(schema, param, code)
    )
    options_line = "{}" if short else '{"no_forcing": true}'
    return GrammarPart(f"%json {text}", f"%llguidance {options_line}\nstart: %json {text}\n", param, code, short)


def _walk_schema(schema: Mapping[str, JsonValue], param: str, code: str) -> Iterator[tuple[str, JsonValue]]:
    """Yield every key in the schema, at any depth, with its value."""
    waiting: list[tuple[JsonValue | Mapping[str, JsonValue], int]] = [(schema, 0)]
    while waiting:
        value, depth = waiting.pop()
        if depth > MAX_SCHEMA_DEPTH:
            raise InvalidRequest(f"The schema in {param} is nested too deeply.", param=param, code=code)
        if isinstance(value, Mapping):
            yield from value.items()
            waiting += [(inner, depth + 1) for inner in value.values()]
        elif isinstance(value, list):
            waiting += [(inner, depth + 1) for inner in value]


def _count_last_digit_units(number: float) -> int:
    digits = Decimal(repr(number)).normalize()
    return int(digits.scaleb(-min(int(digits.as_tuple().exponent), 0)))


def _lark_to_part(definition: str, param: str) -> GrammarPart:
    """Return a part for text of the grammar's own `start`. It may neither end the message nor refer to other rules."""
    _check_size(definition, param)
    for token in LARK_TOKEN.finditer(definition):
        if token.lastgroup in _FOREIGN_TOKENS:
            kind = _FOREIGN_TOKENS[token.lastgroup]
            message = f"The grammar in {param} refers to {kind}."
            raise InvalidRequest(message, param=param, code=INVALID_GRAMMAR)
    alone = f'%llguidance {{"no_forcing": true}}\n{definition}\n'
    return GrammarPart(f"%lark {{\n{definition}\n}}", alone, param, INVALID_GRAMMAR)


def _regex_to_part(pattern: str, param: str) -> GrammarPart:
    """Return a part for text that matches the whole pattern."""
    _check_size(pattern, param)
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        message = f"The regular expression in {param} ends in a backslash."
        raise InvalidRequest(message, param=param, code=INVALID_GRAMMAR)
    escapes = {"/": "\\/", "\n": "\\n", "\\\n": "\\n"}
    escaped = re.sub(r"\\.|/|\n", lambda match: escapes.get(match[0], match[0]), pattern, flags=re.DOTALL)
    alone = f'%llguidance {{"no_forcing": true}}\nstart: /{escaped}/\n'
    return GrammarPart(f"%lark {{\nstart: /{escaped}/\n}}", alone, param, INVALID_GRAMMAR)


def _check_size(definition: str, param: str) -> None:
    if len(definition.encode("utf-8", "surrogatepass")) > MAX_SOURCE_BYTES:
        message = f"The grammar in {param} is larger than {MAX_SOURCE_BYTES} bytes."
        raise InvalidRequest(message, param=param, code=INVALID_GRAMMAR)
