"""From the bytes of a request to a checked model, or to an InvalidRequest that names the fault and its place."""

import json
import re
from typing import Any, Final, TypeVar, cast

import orjson
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.types import Scope

from apis.errors import InvalidRequest, Unsupported
from apis.wire.base import REFUSED_FIELD
from apis.wire.field_rows import OTHER_TYPE_NAMES, UNSUPPORTED_TYPES, FieldRow, find_refused_value, refusal_message
from providers.common.fair_turns import calculate
from stack.http.unknown_fields import refuse_misspelt_field

ModelT = TypeVar("ModelT", bound=BaseModel)
Body = bytes | bytearray
"""The bytes of a body: a large one stays in the buffer that it was received into, because a copy would double it."""
_HEADERS_KEY: Final = "stack.headers"
_MAX_DEPTH: Final = 64
_MAX_VALUES: Final = 100_000
"""Values in one body. Each costs microseconds in which no other code runs, even in a thread; text parses fast."""
_LONGEST_INTEGER: Final = len(str(-(2**63)))
"""Characters of the longest integers of 64 bits."""
_LARGE_BYTES: Final = 256 * 1024
_SMALL_BYTES: Final = 16 * 1024
_MANY_OBJECTS: Final = 500

_INDEX: Final = re.compile(r"\[\d+\]")
_EXPECTED_TYPES: Final = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "int_parsing": "an integer",
    "float_parsing": "a number",
    "bool_parsing": "a boolean",
    "float_type": "a number",
    "bool_type": "a boolean",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
_JSON_TYPE_NAMES: Final = {str: "a string", int: "an integer", float: "a number", bool: "a boolean", list: "an array"}


def is_large(body: Body) -> bool:
    """Return true if a body is to be parsed in a thread, in the tenant's turn, because it would hold up other streams:
    one that is long, or that has many objects, of which each is checked by itself."""
    size = len(body)
    return size > _SMALL_BYTES and (size > _LARGE_BYTES or body.count(b"{") > _MANY_OBJECTS)


async def read_request(body: Body, model: type[ModelT]) -> ModelT:
    """Parse and validate a body. Raises InvalidRequest."""
    if is_large(body):
        return await calculate(_parse_request, body, model)
    return _parse_request(body, model)


async def read_object(body: Body) -> dict[str, Any]:
    """Return `parse_object(body)`, computed in a thread if the body is large."""
    return await calculate(parse_object, body) if is_large(body) else parse_object(body)


def find_header(scope: Scope, name: bytes) -> str | None:
    """Return the first value of a header by its name in lower case; None where the request does not have it. The
    headers of a request are sorted by name once."""
    headers: dict[bytes, bytes] | None = scope.get(_HEADERS_KEY)
    if headers is None:
        headers = scope[_HEADERS_KEY] = dict(reversed(scope["headers"]))
    value = headers.get(name)
    return None if value is None else value.decode("latin-1")


def _parse_request(body: Body, model: type[ModelT]) -> ModelT:
    return validate_request(parse_object(body), model)


def validate_request(fields: dict[str, Any], model: type[ModelT]) -> ModelT:
    """Validate a parsed body. Raises InvalidRequest."""
    try:
        request = model.model_validate(fields)
    except ValidationError as exc:
        raise to_invalid_request(exc.errors(include_url=False)[0], fields) from None
    refuse_misspelt_field(fields, request)
    return request


def parse_object(body: Body) -> dict[str, Any]:
    """Return the one JSON object of a body in UTF-8, without duplicate keys, NaN, infinities or lone surrogates."""
    if not body:
        raise InvalidRequest("The body is empty; it must be a JSON object.")
    if _has_too_many_values(body):
        raise InvalidRequest(f"The body holds more than {_MAX_VALUES} values.", code="array_above_max_length")
    try:
        orjson.loads(body)
        value: Any = _decoder.decode(body.decode())
    except (ValueError, RecursionError) as exc:
        if isinstance(exc, _DuplicateKey):
            raise InvalidRequest(str(exc)) from None
        where = f" (line {exc.lineno}, column {exc.colno})" if isinstance(exc, json.JSONDecodeError) else ""
        raise InvalidRequest(f"We could not parse the JSON body of your request{where}.") from None
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object.", code="invalid_type")
    if body.count(b"{") + body.count(b"[") > _MAX_DEPTH and _is_nested_deeper(value, _MAX_DEPTH):
        raise InvalidRequest(f"The body is nested more than {_MAX_DEPTH} levels deep.", code="invalid_value")
    return cast(dict[str, Any], value)


def _has_too_many_values(body: Body) -> bool:
    if body.count(b",") < _MAX_VALUES:
        return False
    bare = body.replace(rb"\\", b"").replace(rb"\"", b"")
    if bare.count(b'"') > 4 * _MAX_VALUES:
        return True
    # without its escapes, every other part of a body is outside its strings
    return sum(part.count(b",") for part in bare.split(b'"')[::2]) >= _MAX_VALUES


class _DuplicateKey(ValueError):
    pass


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise _DuplicateKey("The JSON body has a duplicate key in one of its objects.")
    return fields


def _parse_integer(digits: str) -> int | float:
    """Return the number as JSON's own libraries do: one beyond 64 bits, which most of them cannot write, is a float."""
    if len(digits) <= _LONGEST_INTEGER and -(2**63) <= (number := int(digits)) < 2**64:
        return number
    return float(digits)


_decoder = json.JSONDecoder(object_pairs_hook=_reject_duplicate_keys, parse_int=_parse_integer)


def _is_nested_deeper(value: Any, max_levels: int) -> bool:
    """Return true if containers nest more than `max_levels` deep; breadth first, without recursion."""
    layer: list[Any] = [value]
    for _ in range(max_levels):
        inner: list[Any] = []
        for container in layer:
            inner += cast(dict[str, Any], container).values() if isinstance(container, dict) else container
        layer = [cast(Any, value) for value in inner if isinstance(value, dict | list)]
        if not layer:
            return False
    return True


def _is_beyond_64_bits(value: Any) -> bool:
    return isinstance(value, float) and abs(value) >= 2**63


def to_invalid_request(error: ErrorDetails, body: dict[str, Any]) -> InvalidRequest:
    """Return a validation error in the API's terms."""
    kind = error["type"]
    if kind == REFUSED_FIELD:
        row: FieldRow = error.get("ctx", {})["row"]
        param = _param_path((*error["loc"], row.field), body, missing=False)
        return Unsupported(refusal_message(row, param), param=param)
    param = _param_path(error["loc"], body, missing=kind == "missing")
    limits = error.get("ctx", {})
    value = error["input"]
    if kind == "missing":
        message = f"Missing required parameter: '{param}'."
        if param.endswith(".name") and isinstance(value, dict) and "function" in value:  # a tool of chat completions
            owner = param.removesuffix(".name")
            message += f" In the Responses API, the fields of '{owner}.function' stand in '{owner}' itself."
        return InvalidRequest(message, param=param, code="missing_required_parameter")
    if kind == "int_type" and _is_beyond_64_bits(value):
        kind = "int_parsing_size"  # it was an integer in the body
    if kind in _EXPECTED_TYPES:
        name = "null" if value is None else _JSON_TYPE_NAMES.get(cast(type[Any], type(value)), "an object")
        message = f"Invalid type for '{param}': expected {_EXPECTED_TYPES[kind]}, but got {name} instead."
        return InvalidRequest(message, param=param, code="invalid_type")
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return _union_tag_error(error, param)
    if kind == "literal_error" and error["loc"][-1] == "type" and (reason := UNSUPPORTED_TYPES.get(value)):
        return Unsupported(f"'{value}' at '{param}' is not offered by this server. {reason}", param=param)
    if kind == "literal_error" and (refused := find_refused_value(_INDEX.sub("[]", param), value)):
        return Unsupported(refusal_message(refused, param), param=param, code="unsupported_value")
    code, violation = _describe_violation(kind, limits, value, error["msg"])
    if not param:  # of the whole body
        return InvalidRequest(f"Invalid request: {violation}.", code=code)
    return InvalidRequest(f"Invalid '{param}': {violation}.", param=param, code=code)


def _describe_violation(error_type: str, limits: dict[str, Any], value: Any, text: str) -> tuple[str, str]:
    """Return the code of a violation and its description; `text` is the validator's own."""
    number = "integer" if isinstance(value, int) and isinstance(limits.get("le", limits.get("ge")), int) else "decimal"
    match error_type:
        case "less_than_equal" | "less_than":
            limit = limits.get("le", limits.get("lt"))
            return f"{number}_above_max_value", f"expected a value of at most {limit}"
        case "greater_than_equal" | "greater_than":
            limit = limits.get("ge", limits.get("gt"))
            return f"{number}_below_min_value", f"expected a value of at least {limit}"
        case "int_parsing_size":
            return "integer_above_max_value", "the integer has more than 64 bits"
        case "string_too_long":
            return "string_above_max_length", f"expected at most {limits['max_length']} characters"
        case "string_too_short":
            return "empty_string", f"expected at least {limits['min_length']} character"
        case "too_long":
            return "array_above_max_length", f"expected at most {limits['max_length']} entries"
        case "too_short":
            return "empty_array", f"expected at least {limits['min_length']} entry"
        case "literal_error":
            return "invalid_value", f"expected one of {limits['expected']}"
        case "string_pattern_mismatch":
            return "invalid_value", f"expected text that matches {limits['pattern']}"
        case "value_error":
            return "invalid_value", str(limits["error"])
        case _:
            return "invalid_value", f"{text[:1].lower()}{text[1:]}".rstrip(".")


def _union_tag_error(error: ErrorDetails, param: str) -> InvalidRequest:
    limits = error.get("ctx", {})
    value = error["input"]
    discriminator = str(limits.get("discriminator", ""))
    tag = discriminator.strip("'") if discriminator.startswith("'") else "type"  # a function's name has no quotes
    if not isinstance(value, dict):
        name = _JSON_TYPE_NAMES.get(cast(type[Any], type(value)), "null")
        message = f"Invalid type for '{param}': expected an object, but got {name} instead."
        return InvalidRequest(message, param=param, code="invalid_type")
    fields = cast(dict[str, Any], value)
    if isinstance(fields.get(tag), str):
        if reason := UNSUPPORTED_TYPES.get(fields[tag]):
            message = f"'{fields[tag]}' is not offered by this server. {reason}"
            return Unsupported(message, param=f"{param}.{tag}")
        expected = limits.get("expected_tags", "'message', 'function_call_output', ...").replace(
            "'message:assistant', ", ""
        )
        message = f"Invalid value: '{fields[tag][:64]}' at '{param}.{tag}'. Supported values are: {expected}."
        other_name = OTHER_TYPE_NAMES.get(fields[tag])
        if other_name and f"'{other_name}'" in expected:
            message += f" In this API, '{fields[tag]}' has the name '{other_name}'."
        return InvalidRequest(message, param=f"{param}.{tag}", code="invalid_value")
    message = f"Missing required parameter: '{param}.{tag}'."
    return InvalidRequest(message, param=f"{param}.{tag}", code="missing_required_parameter")


def _param_path(loc: tuple[int | str, ...], body: Any, *, missing: bool) -> str:
    """Return the path in the body. Pydantic's own also names the branches of unions, which are no keys of the body."""
    path = ""
    node: Any = body
    in_branch = False
    for position, step in enumerate(loc):
        if isinstance(step, int):
            path += f"[{step}]"
            node = cast(list[Any], node)[step] if isinstance(node, list) and step < len(cast(list[Any], node)) else None
        elif isinstance(node, dict):
            fields = cast(dict[str, Any], node)
            if not in_branch and step == fields.get("type"):
                in_branch = True  # it names the branch, though there may be a key of that name too
                continue
            if step not in fields and not (missing and position == len(loc) - 1):
                continue
            path += f".{step:.64}" if path else f"{step:.64}"
            node = fields.get(step)
        in_branch = False
    return path
