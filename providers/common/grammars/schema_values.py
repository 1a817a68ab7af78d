"""Checks the values of a schema's keywords: numbers, names and patterns that no engine could enforce.

A pattern is scanned by its syntax only, in time linear in its length, because the dialects of JSON Schema's users
differ (ECMA-262, Python, Rust): it is refused for faults that all of them share.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Final, TypeGuard

from pydantic import JsonValue

SchemaObject = dict[str, JsonValue]

MAX_PATTERN_CHARS: Final = 4_096
_MAX_MINIMUM: Final = 100_000
# OpenAI's limits for strict schemas
_MAX_STRICT_ENUM: Final = 1_000
_MAX_STRICT_PROPERTIES: Final = 5_000
_MAX_STRICT_NAME_CHARS: Final = 120_000

_MINIMUM_KEYWORDS: Final = ("minLength", "minItems", "minProperties", "minContains")
_MAXIMUM_KEYWORDS: Final = ("maxLength", "maxItems", "maxProperties", "maxContains")
_BOUND_KEYWORDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_RANGES: Final = (*zip(_MINIMUM_KEYWORDS, _MAXIMUM_KEYWORDS, strict=True), ("minimum", "maximum"))
_COMPOSITION_KEYWORDS: Final = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "patternProperties")
_PATTERN_TOKEN: Final = re.compile(
    r"""(?P<back>\\(?:[1-9]|k<))        # a backreference
      | (?P<atom>\\.|[^\\()\[\]{}*+?|]) # one character, also escaped
      | (?P<set>\[\^?\]?(?:\\.|[^\\\]])*+\])
      | (?P<open>\((?:\?(?:[:=!>]|<[=!]|P?<\w{1,64}>|[a-z]{0,8}(?:-[a-z]{1,8})?[:)]))?)
      | (?P<close>\))
      | (?P<count>\{(?P<least>\d{1,9})(?:,(?P<most>\d{0,9}))?\})
      | (?P<repeat>[*+?])
      | (?P<or>\|)
      | (?P<brace>[{}\]])               # a brace that counts nothing stands for itself""",
    re.VERBOSE | re.DOTALL,
)


class InvalidSchema(Exception):
    """A fault of a schema; the message is the end of a sentence."""


def check_values(schema: SchemaObject) -> None:
    """Raise InvalidSchema for a value of this subschema that its keyword cannot have in any engine."""
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise InvalidSchema("'required' must list names of properties.")
    for keyword in (*_MINIMUM_KEYWORDS, *_MAXIMUM_KEYWORDS):
        count = schema.get(keyword, 0)
        if not _is_number(count) or count < 0 or count != count // 1:
            raise InvalidSchema(f"its '{keyword}' must be a whole number of 0 or more.")
        if keyword in _MINIMUM_KEYWORDS and count > _MAX_MINIMUM:
            raise InvalidSchema(f"its '{keyword}' must be a number of at most {_MAX_MINIMUM}.")
    for keyword in _BOUND_KEYWORDS:
        # In JSON Schema's draft 4 the exclusive bounds are booleans.
        if not (_is_number(bound := schema.get(keyword, 0)) or isinstance(bound, bool)):
            raise InvalidSchema(f"its '{keyword}' must be a number.")
    if not _is_number(divisor := schema.get("multipleOf", 1)) or divisor <= 0:
        raise InvalidSchema("its 'multipleOf' must be a number above 0.")
    for least, most in _RANGES:
        if _is_number(low := schema.get(least)) and _is_number(high := schema.get(most)) and low > high:
            raise InvalidSchema(f"its '{least}' is above its '{most}'.")


def check_strict_values(subschemas: Sequence[SchemaObject]) -> None:
    """Raise InvalidSchema where these subschemas of one schema cannot be enforced by a grammar, or have more names and
    values than OpenAI's limits for strict schemas allow."""
    for schema in subschemas:
        if (missing := _find_undeclared_name(schema)) is not None:
            raise InvalidSchema(f"'required' names '{missing[:64]}', which is not among the 'properties'.")
    enums = [values for schema in subschemas if isinstance(values := schema.get("enum"), list)]
    if sum(map(len, enums)) > _MAX_STRICT_ENUM:
        raise InvalidSchema(f"it has more than {_MAX_STRICT_ENUM} enum values.")
    maps = {key: [_names_in(schema, key) for schema in subschemas] for key in ("properties", "$defs", "definitions")}
    if sum(map(len, maps["properties"])) > _MAX_STRICT_PROPERTIES:
        raise InvalidSchema(f"it has more than {_MAX_STRICT_PROPERTIES} properties.")
    constants = [schema.get("const") for schema in subschemas]
    texts = chain(chain.from_iterable(chain.from_iterable(maps.values())), chain.from_iterable(enums), constants)
    if sum(len(text) for text in texts if isinstance(text, str)) > _MAX_STRICT_NAME_CHARS:
        raise InvalidSchema(f"its names and enum values have more than {_MAX_STRICT_NAME_CHARS} characters.")


def check_pattern_syntax(pattern: str, *, strict: bool) -> None:
    """Raise InvalidSchema for a pattern that is no regular expression; with `strict`, also for a backreference, which
    no grammar can express."""
    depth = at = 0
    previous = "or"  # nothing to repeat
    while at < len(pattern):
        token = _PATTERN_TOKEN.match(pattern, at)
        kind = "" if token is None else token.lastgroup or ""
        if token is None or (kind == "close" and depth == 0):
            raise InvalidSchema(f"a pattern is no regular expression: see its character {at + 1}.")
        if kind == "back" and strict:
            raise InvalidSchema("a pattern has a backreference, which cannot be enforced.")
        if kind in ("count", "repeat"):
            is_mode = previous in ("count", "repeat") and token[0] in "?+"  # lazy or possessive
            if previous in ("open", "or", "mode") or (previous in ("count", "repeat") and not is_mode):
                raise InvalidSchema(f"a pattern has nothing to repeat at its character {at + 1}.")
            if token["most"] and int(token["most"]) < int(token["least"]):
                raise InvalidSchema(f"a pattern repeats from {token['least']} to {token['most']} times.")
            kind = "mode" if is_mode else kind
        if kind == "open" and not token[0].endswith(")"):
            depth += 1
        elif kind == "close":
            depth -= 1
        at, previous = token.end(), kind
    if depth:
        raise InvalidSchema("a pattern has a parenthesis that is not closed.")


def _find_undeclared_name(schema: SchemaObject) -> str | None:
    """Return a required name that the object cannot have by its own keywords. One with alternatives, patterns or other
    properties allowed in so many words may have it by these."""
    is_whole = "properties" in schema or schema.get("type") == "object"
    if not is_whole or any(key in schema for key in _COMPOSITION_KEYWORDS):
        return None
    names, required = _names_in(schema, "properties"), schema.get("required")
    if not isinstance(required, list) or schema.get("additionalProperties", False) is not False:
        return None
    return next((name for name in required if isinstance(name, str) and name not in names), None)


def _names_in(schema: SchemaObject, keyword: str) -> Mapping[str, JsonValue]:
    value = schema.get(keyword)
    return value if isinstance(value, dict) else {}


def _is_number(value: JsonValue) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
