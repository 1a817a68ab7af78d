"""Tools as Harmony shows them to the model: TypeScript-like types in namespaces, exactly as openai-harmony writes them.

The text differs from openai-harmony's only where a text could break out of its comment, string or name: every line of a
description is a comment, and strings and unusual names are quoted.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import cast

from openai_harmony import (  # pyright: ignore[reportMissingTypeStubs] - typed in its source, without the marker file
    ToolDescription,
    ToolNamespaceConfig,
)
from pydantic import JsonValue

from apis.chat import (
    ChatCustomTool,
    ChatFunctionTool,
    ChatGrammarFormat,
    ChatTool,
    CustomToolDefinition,
    FunctionDefinition,
    NativeTool,
    NativeToolName,
)

_JsonSchema = Mapping[str, JsonValue]

MAX_TYPE_DEPTH = 64
LINE_BREAK = re.compile(r"\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
UNQUOTED_NAME = re.compile(r"[\w$.@-]+")
ESCAPED_CHARS = re.compile(r"[\x7f-\x9f\u2028\u2029]")
TYPE_NAMES = {
    "integer": "number",
    **{name: name for name in ("number", "string", "boolean", "null", "object", "array")},
}


def declared_tools_to_text(tools: Iterable[ChatTool]) -> str:
    """Return the developer message's `# Tools` section: functions and custom tools by namespace; empty without
    tools."""
    namespaces: dict[str, list[str]] = {}
    for tool in tools:
        match tool:
            case ChatFunctionTool(function=function):
                namespaces.setdefault(function.namespace or "functions", []).append(_render_function(function))
            case ChatCustomTool(custom=custom):
                namespaces.setdefault("functions", []).append(_render_custom(custom))
            case NativeTool():
                pass
    return _render_section([_render_namespace(name, "", namespaces[name]) for name in sorted(namespaces)])


def native_tools_to_text(native: Iterable[NativeToolName]) -> str:
    """Return the system message's `# Tools` section, in the exact words that the model was trained on."""
    return _render_section([_render_native_namespace(name) for name in sorted(native)])


def _render_section(namespaces: Sequence[str]) -> str:
    return "\n\n".join(["# Tools", *namespaces]) if namespaces else ""


def _get_parameters(tool: ToolDescription) -> _JsonSchema | None:
    return tool.parameters  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType] - a bare dict there


@cache
def _render_native_namespace(name: NativeToolName) -> str:
    config = ToolNamespaceConfig.browser() if name == "browser" else ToolNamespaceConfig.python()
    types = [_render_type(tool.name, tool.description, _get_parameters(tool)) for tool in config.tools]
    return _render_namespace(name, config.description or "", types)


def _render_namespace(name: str, description: str, types: Sequence[str]) -> str:
    lines = [f"## {name}\n"]
    if types:
        lines += [f"// {line}" for line in _split_lines(description)]
        lines += [f"namespace {name} {{\n", *types, f"}} // namespace {name}"]
    else:
        lines += _split_lines(description)
    return "\n".join(lines)


def _render_function(function: FunctionDefinition) -> str:
    return _render_type(function.name, function.description or "", function.parameters)


def _render_type(name: str, description: str, parameters: _JsonSchema | None) -> str:
    argument = "" if parameters is None else f"_: {schema_to_typescript(parameters)}"
    return f"{_render_comment(description)}type {name} = ({argument}) => any;\n"


def _render_custom(custom: CustomToolDefinition) -> str:
    """Render a free-text tool. openai-harmony has no type for it: the comment describes the input."""
    about = "The input is free text, sent as it is, not JSON."
    if isinstance(custom.format, ChatGrammarFormat):
        grammar = custom.format.grammar
        about += f" It must match this {grammar.syntax} grammar:\n{grammar.definition}"
    return (
        f"{_render_comment(custom.description or '')}{_render_comment(about)}type {custom.name} = (FREEFORM) => any;\n"
    )


def schema_to_typescript(schema: JsonValue | _JsonSchema, indent: str = "", depth: int = 0) -> str:
    """Return a JSON schema as a type. Keywords that openai-harmony cannot express (`anyOf`, `$ref`) are `any` here
    too."""
    if not isinstance(schema, Mapping) or depth > MAX_TYPE_DEPTH:
        return "any"
    variants = schema.get("oneOf")
    if isinstance(variants, list):
        return "".join(_render_top_variant(variant, indent, depth) for variant in variants)
    kind = schema.get("type")
    if isinstance(kind, list):
        names = [TYPE_NAMES.get(name, "any") for name in kind if isinstance(name, str)]
        return " | ".join(names) or "any"
    match kind:
        case "object":
            return _render_object(schema, indent, depth)
        case "string":
            return " | ".join(_quote(value) for value in _enum_values(schema) if isinstance(value, str)) or "string"
        case "number" | "integer" | "boolean":
            return TYPE_NAMES[kind]
        case "array" if "items" in schema:
            return f"{schema_to_typescript(schema['items'], indent, depth + 1)}[]"
        case "array":
            return "Array<any>"
        case _:
            return "any"


def _render_object(schema: _JsonSchema, indent: str, depth: int) -> str:
    out = [_render_schema_comment(schema, "description", indent), "{\n"]
    properties = schema.get("properties")
    required = schema.get("required")
    if isinstance(properties, dict):
        for name, value in properties.items():
            prop = value if isinstance(value, dict) else {}
            label = name if UNQUOTED_NAME.fullmatch(name) else _quote(name)
            if not (isinstance(required, list) and name in required):
                label += "?"
            out.append(_render_property(label, prop, indent, depth + 1))
    return "".join(out) + indent + "}"


def _render_property(name: str, prop: _JsonSchema, indent: str, depth: int) -> str:
    out = _render_schema_comment(prop, "title", indent)
    if out:
        out += f"{indent}//\n"
    if "oneOf" not in prop:
        out += _render_schema_comment(prop, "description", indent)
    examples = prop.get("examples")
    if isinstance(examples, list) and examples:
        out += f"{indent}// Examples:\n"
        out += "".join(f"{indent}// - {_quote(value)}\n" for value in examples if isinstance(value, str))
    if isinstance(prop.get("oneOf"), list):
        return out + _render_property_variants(name, prop, indent, depth)
    out += f"{indent}{name}: {_render_nullable(prop, f'{indent}    ', depth)},"
    if "oneOf" not in prop and "default" in prop:
        out += f" // {_render_default(prop)}"
    return out + "\n"


def _render_property_variants(name: str, prop: _JsonSchema, indent: str, depth: int) -> str:
    variants = cast("list[JsonValue]", prop["oneOf"])
    described = [variant.get("description") if isinstance(variant, dict) else None for variant in variants]
    description = prop.get("description")
    above = isinstance(description, str) and described[:1] != [description]
    out = _render_schema_comment(prop, "description", indent) if above else ""
    if "default" in prop:
        out += f"{indent}// {_render_default(prop)}\n"
    out += f"{indent}{name}:\n"
    for index, variant in enumerate(variants):
        schema = variant if isinstance(variant, dict) else {}
        own = described[index]
        notes = [_join_lines(own)] if isinstance(own, str) and own != description and not (above and index == 0) else []
        notes += [_render_default(schema)] if "default" in schema else []
        out += f"{indent} | {_render_nullable(schema, f'{indent}   ', depth)}{_render_trailing_notes(notes)}\n"
    return f"{out}{indent},\n"


def _render_top_variant(variant: JsonValue, indent: str, depth: int) -> str:
    schema = variant if isinstance(variant, dict) else {}
    description = schema.get("description")
    notes = [_join_lines(description)] if isinstance(description, str) else []
    notes += [f"default: {_to_json(schema['default'])}"] if "default" in schema else []
    return f"\n{indent} | {_render_nullable(schema, f'{indent}   ', depth + 1)}{_render_trailing_notes(notes)}"


def _render_nullable(schema: _JsonSchema, indent: str, depth: int) -> str:
    written = schema_to_typescript(schema, indent, depth)
    return f"{written} | null" if schema.get("nullable") is True and "null" not in written else written


def _render_default(schema: _JsonSchema) -> str:
    value = schema["default"]
    if isinstance(value, str) and _enum_values(schema):
        return f"default: {_join_lines(value)}"
    return f"default: {_to_json(value)}"


def _enum_values(schema: _JsonSchema) -> list[JsonValue]:
    values = schema.get("enum")
    return values if isinstance(values, list) else []


def _render_trailing_notes(notes: Sequence[str]) -> str:
    return f" // {' '.join(notes)}" if notes else ""


def _render_schema_comment(schema: _JsonSchema, key: str, indent: str) -> str:
    text = schema.get(key)
    return (_render_comment(text, indent) or f"{indent}// \n") if isinstance(text, str) else ""


def _render_comment(text: str, indent: str = "") -> str:
    return "".join(f"{indent}// {line}\n" for line in _split_lines(text))


def _split_lines(text: str) -> list[str]:
    lines = LINE_BREAK.split(text)
    return lines[:-1] if not lines[-1] else lines


def _join_lines(text: str) -> str:
    return " ".join(LINE_BREAK.split(text))


def _quote(text: str) -> str:
    return ESCAPED_CHARS.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(text, ensure_ascii=False))


def _to_json(value: JsonValue) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return ESCAPED_CHARS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
