"""Checks the JSON schemas of a request before any model sees them: self-contained, and small with references expanded.

Nothing is fetched or compiled: a reference must point into the same schema, and a pattern is bounded by its length and
by the product of its counted repetitions. `schema_values` checks the values of keywords. Recursion through properties
and items is legal; a schema that is its own definition is not.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from math import prod
from typing import Final, cast

import orjson
from pydantic import JsonValue

from apis.errors import InvalidRequest
from providers.common.fair_turns import calculate
from providers.common.grammars.references import References
from providers.common.grammars.schema_values import (
    MAX_PATTERN_CHARS,
    InvalidSchema,
    SchemaObject,
    check_pattern_syntax,
    check_strict_values,
    check_values,
)
from providers.common.recent import RecentEntries

MAX_SCHEMA_BYTES: Final = 256 * 1024
"""Maximum bytes of one schema, and a quarter of the maximum of all tools together."""

_MAX_SUBSCHEMAS: Final = 20_000
_MAX_REFERENCE_DEPTH: Final = 128
_MAX_COMBINATIONS: Final = 1_000
_MAX_REPETITIONS: Final = 100_000
_MAX_STRICT_DEPTH: Final = 10
"""OpenAI's limit for strict schemas."""

_MAX_CACHED_SCHEMAS: Final = 4_096
_MAX_BYTES_AT_ONCE: Final = 32 * 1024
"""Bytes of schemas that are checked on the event loop: more would take it for over 50 ms."""
_Key = tuple[bytes, bool]
_problems = RecentEntries[_Key, str](_MAX_CACHED_SCHEMAS)
"""The fault of a schema, empty for a valid one, by its hash and strictness: agents send the same tools with every
turn."""
_short_schemas = RecentEntries[bytes, None](_MAX_CACHED_SCHEMAS)
"""Hashes of schemas that do not refer too far."""
_REFERENCE: Final = b'"$ref"'

_TYPES: Final = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
_KIND_NAMES: Final[Mapping[str, str]] = {
    **{name: name for name in _TYPES},
    "str": "string",
    "int": "integer",
    "float": "number",
    "double": "number",
    "bool": "boolean",
    "dict": "object",
    "list": "array",
    "none": "null",
}
"""Names of types as servers write them -> those of JSON."""
_VALUE_KEYWORDS: Final = ("default", "const")
"""Keywords that may have the value null."""
_SAME_LEVEL_KEYWORDS: Final = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else")
_NESTED_KEYWORDS: Final = (
    *("items", "prefixItems", "additionalItems", "contains", "additionalProperties", "propertyNames"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
_MAP_KEYWORDS: Final = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_REPETITION: Final = re.compile(r"(\)?)\{(\d+)(?:,(\d*))?\}")


def check_references(schema: SchemaObject) -> None:
    """Raise InvalidSchema for a schema that refers too far for a compiler. Nothing else in it matters."""
    text = orjson.dumps(schema)
    if _REFERENCE not in text or (key := hashlib.sha256(text).digest()) in _short_schemas:
        return
    if _count_references(schema) > _MAX_REFERENCE_DEPTH:
        raise InvalidSchema(f"it has more than {_MAX_REFERENCE_DEPTH} references in a row.")
    _short_schemas[key] = None


async def check_large_schemas(schemas: Iterable[tuple[SchemaObject, bool]]) -> None:
    """Check schemas that are large together, each with its strictness, in a thread. `check_format` and
    `check_parameters`, which raise the errors, then know the results."""
    unknown: dict[_Key, tuple[SchemaObject, bool]] = {}
    total_bytes = unknown_bytes = 0
    for schema, strict in schemas:
        text = orjson.dumps(schema)
        total_bytes += len(text)
        if total_bytes > 4 * MAX_SCHEMA_BYTES or len(text) > MAX_SCHEMA_BYTES:
            break  # refused for its size alone
        if (key := _schema_key(text, strict=strict)) not in _problems and key not in unknown:
            unknown[key] = schema, strict
            unknown_bytes += len(text)
    if unknown_bytes > _MAX_BYTES_AT_ONCE:
        for key, (schema, strict) in unknown.items():
            _problems[key] = await calculate(_find_problem, schema, strict)


def check_format(schema: SchemaObject) -> None:
    """Raise InvalidRequest unless the schema can constrain an answer."""
    try:
        _check_schema(schema, strict=True)
    except InvalidSchema as exc:
        message = f"Invalid schema for the response format: {exc}"
        raise InvalidRequest(message, param="text.format.schema", code="invalid_json_schema") from None


def check_parameters(tools: Sequence[tuple[str, str, SchemaObject, bool]]) -> None:
    """Raise InvalidRequest for the first invalid schema. `tools` has, for each function, the field of the request, the
    name, the parameters and `strict`. Parameters are an object's schema, or `{}` for none."""
    available_bytes = 4 * MAX_SCHEMA_BYTES
    for param, name, schema, strict in tools:
        try:
            if schema and schema.get("type") != "object":
                raise InvalidSchema(f"its type must be 'object', not {str(schema.get('type'))[:64]!r}.")
            available_bytes -= _check_schema(schema, strict=strict)
            if available_bytes < 0:
                raise InvalidSchema(f"the schemas of all tools together are larger than {4 * MAX_SCHEMA_BYTES} bytes.")
        except InvalidSchema as exc:
            message = f"Invalid schema for function '{name}': {exc}"
            raise InvalidRequest(message, param=param, code="invalid_function_parameters") from None


def mend_parameters(schema: SchemaObject) -> SchemaObject:
    """Return the parameters of a function that is not strict, without the keywords and references that make them
    invalid. A schema that stays invalid without them is returned as it is."""
    with suppress(InvalidSchema):
        _check_schema(schema, strict=False)
        return schema
    for references in (References(schema), None):  # of references that lead back, each single one leads somewhere
        mended = _mend(schema, schema, references)
        with suppress(InvalidSchema):
            _check_schema(mended, strict=False)
            return mended
    return schema


def _mend(schema: SchemaObject, root: SchemaObject, references: References | None) -> SchemaObject:
    mended: SchemaObject = {}
    for keyword, value in schema.items():
        part: JsonValue = value
        if keyword in _MAP_KEYWORDS:
            entries = value.items() if isinstance(value, dict) else ()
            part = {name: _mend_entry(entry, root, references) for name, entry in entries}
        elif keyword in _SAME_LEVEL_KEYWORDS or keyword in _NESTED_KEYWORDS:
            part = (
                [_mend_entry(entry, root, references) for entry in value]
                if isinstance(value, list)
                else _mend_entry(value, root, references)
            )
        elif keyword == "type":
            kinds = value if isinstance(value, list) else [value]
            type_names: list[JsonValue] = [name for kind in kinds if (name := _KIND_NAMES.get(str(kind).lower()))]
            part = type_names[0] if len(type_names) == 1 else type_names or None
        elif not _is_valid_keyword(keyword, value, root, references):
            part = None
        if part is not None or keyword in _VALUE_KEYWORDS:
            mended[keyword] = part
    return mended


def _mend_entry(entry: JsonValue, root: SchemaObject, references: References | None) -> JsonValue:
    """Return the place of a subschema mended; what is no schema allows everything."""
    if isinstance(entry, dict):
        return _mend(entry, root, references)
    return entry if isinstance(entry, bool) else {}


def _is_valid_keyword(keyword: str, value: JsonValue, root: SchemaObject, references: References | None) -> bool:
    try:
        if keyword in ("$ref", "$dynamicRef"):
            if references is None:
                return False
            references.resolve(value, root)
        _check_keywords({keyword: value}, strict=False)
    except InvalidSchema:
        return False
    return True


def _check_schema(schema: SchemaObject, *, strict: bool) -> int:
    text = orjson.dumps(schema)
    size = len(text)
    if size > MAX_SCHEMA_BYTES:
        raise InvalidSchema(f"it is larger than {MAX_SCHEMA_BYTES} bytes.")
    key = _schema_key(text, strict=strict)
    problem = _problems.find(key)
    if problem is None:
        problem = _problems[key] = _find_problem(schema, strict)
    if problem:
        raise InvalidSchema(problem)
    return size


def _schema_key(text: bytes, *, strict: bool) -> _Key:
    return hashlib.sha256(text).digest(), strict


def _find_problem(schema: SchemaObject, strict: bool) -> str:  # noqa: FBT001 - `calculate` passes it by position
    try:
        _check_uncached(schema, strict=strict)
    except InvalidSchema as exc:
        return str(exc)
    return ""


def _check_uncached(schema: SchemaObject, *, strict: bool) -> None:
    subschemas = _Subschemas(schema, has_names=not strict)
    for subschema in subschemas.by_id.values():
        _check_keywords(subschema, strict=strict)
    subschemas.check_cycles()
    if subschemas.measure(schema, 0)[0] > _MAX_SUBSCHEMAS:
        raise InvalidSchema(f"with its references written out it has more than {_MAX_SUBSCHEMAS} subschemas.")
    if strict:
        check_strict_values([*subschemas.by_id.values()])
        if _nesting_depth(schema) > _MAX_STRICT_DEPTH:
            raise InvalidSchema(f"its objects and arrays are nested more than {_MAX_STRICT_DEPTH} levels deep.")


class _Subschemas:
    """Every subschema of a schema by identity, with the subschemas of the same and the next level."""

    def __init__(self, root: SchemaObject, *, has_names: bool) -> None:
        self.by_id: dict[int, SchemaObject] = {}
        self.same_level_ids: dict[int, list[int]] = {}
        self._children: dict[int, list[SchemaObject]] = {}
        self._measures: dict[int, tuple[int, int]] = {}
        references = References(root, has_names=has_names)
        waiting = [(root, root)]
        while waiting:
            schema, resource = waiting.pop()
            if id(schema) in self.by_id:
                continue
            resource = references.find_resource(schema, resource)
            if len(self.by_id) + len(waiting) >= _MAX_SUBSCHEMAS:
                raise InvalidSchema(f"it has more than {_MAX_SUBSCHEMAS} subschemas.")
            targets = [references.resolve(schema[key], resource) for key in ("$ref", "$dynamicRef") if key in schema]
            here = [*targets, *_subschemas_at(schema, _SAME_LEVEL_KEYWORDS)]
            below = [*_subschemas_at(schema, _NESTED_KEYWORDS), *_subschemas_in_maps(schema)]
            self.by_id[id(schema)] = schema
            self.same_level_ids[id(schema)] = [id(subschema) for subschema in here]
            self._children[id(schema)] = [*here, *below]
            waiting += ((child, resource) for child in self._children[id(schema)])

    def check_cycles(self) -> None:
        """Raise InvalidSchema for a schema that is its own definition."""
        try:
            TopologicalSorter(self.same_level_ids).prepare()
        except CycleError:
            raise InvalidSchema("a reference leads back to where it stands.") from None

    def measure(self, schema: SchemaObject, depth: int) -> tuple[int, int]:
        """Return the number of subschemas with references expanded, in which a recursive one counts once, and how far
        they lead from one to the next."""
        size, height = self._measures.get(id(schema), (0, 0))
        if depth + height > _MAX_REFERENCE_DEPTH:
            raise InvalidSchema("it is nested too deeply.")
        if not size:
            self._measures[id(schema)] = (1, 0)
            measures = [self.measure(child, depth + 1) for child in self._children[id(schema)]]
            size = 1 + sum(size for size, _ in measures)
            height = 1 + max((height for _, height in measures), default=0)
            self._measures[id(schema)] = (size, height)
        return size, height


def _count_references(root: SchemaObject) -> int:
    """Return the most references that a compiler follows in a row, each object once."""
    references = References(root)
    counts: dict[int, int] = {id(root): 0}
    path = [(root, iter(_find_next_objects(references, root, root)))]
    while path:
        here, targets = path[-1]
        for target in targets:
            if id(target) not in counts:
                if len(counts) >= _MAX_SUBSCHEMAS:
                    raise InvalidSchema(f"it refers to places in more than {_MAX_SUBSCHEMAS} objects.")
                counts[id(target)] = 0
                path.append((target, iter(_find_next_objects(references, root, target))))
                break
            counts[id(here)] = max(counts[id(here)], counts[id(target)])
        else:
            path.pop()
            counts[id(here)] += "$ref" in here
            if path:
                above = id(path[-1][0])
                counts[above] = max(counts[above], counts[id(here)])
    return counts[id(root)]


def _find_next_objects(references: References, root: SchemaObject, here: SchemaObject) -> Iterator[SchemaObject]:
    """Yield the objects within one, and the one that it refers to."""
    waiting = [*here.values()]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield value
        elif isinstance(value, list):
            waiting += value
    if "$ref" in here:
        with suppress(InvalidSchema):
            yield references.resolve(here["$ref"], root)


def _subschemas_at(schema: SchemaObject, keywords: Sequence[str]) -> list[SchemaObject]:
    subschemas: list[SchemaObject] = []
    for keyword in keywords:
        value = schema.get(keyword)
        for entry in value if isinstance(value, list) else (value,):
            if isinstance(entry, dict):
                subschemas.append(entry)
            elif entry is not None and not isinstance(entry, bool):
                raise InvalidSchema(f"its '{keyword}' is not a schema.")
    return subschemas


def _subschemas_in_maps(schema: SchemaObject) -> list[SchemaObject]:
    subschemas: list[SchemaObject] = []
    for keyword in _MAP_KEYWORDS:
        value = schema.get(keyword, {})
        if not isinstance(value, dict):
            raise InvalidSchema(f"its '{keyword}' is not an object.")
        for entry in value.values():
            if isinstance(entry, dict):
                subschemas.append(entry)
            elif not isinstance(entry, bool):
                raise InvalidSchema(f"its '{keyword}' holds what is not a schema.")
    return subschemas


def _check_keywords(schema: SchemaObject, *, strict: bool) -> None:
    kinds = schema.get("type", "object")
    for kind in kinds if isinstance(kinds, list) and kinds else (kinds,):
        if not isinstance(kind, str) or kind not in _TYPES:
            raise InvalidSchema(f"'{str(kind)[:64]}' is not a type of JSON.")
    if "enum" in schema and not (isinstance(schema["enum"], list) and schema["enum"]):
        raise InvalidSchema("an 'enum' must list at least one value.")
    if schema.get("not") in ({}, True):
        raise InvalidSchema("nothing satisfies a 'not' of everything.")
    if strict:
        _check_names(schema)
    check_values(schema)
    branches = [_count_branches(subschema) for subschema in _subschemas_at(schema, ("allOf",))]
    if prod(branches) > _MAX_COMBINATIONS:
        raise InvalidSchema(f"its 'allOf' combines to more than {_MAX_COMBINATIONS} alternatives.")
    patterns = cast(Mapping[str, JsonValue], schema.get("patternProperties", {}))
    for pattern in chain(patterns, [schema["pattern"]] if "pattern" in schema else ()):
        _check_pattern(pattern, strict=strict)


def _check_names(schema: SchemaObject) -> None:
    """Raise InvalidSchema for a name that the compiler of an engine would look up."""
    if not str(schema.get("$schema", "https://json-schema.org/")).startswith(
        ("http://json-schema.org/", "https://json-schema.org/")
    ):
        raise InvalidSchema("its '$schema' must be one of json-schema.org.")
    if re.search(r"[:/\\]", str(schema.get("$id", ""))):
        raise InvalidSchema("an '$id' must be a plain name.")


def _count_branches(schema: SchemaObject) -> int:
    return max(1, len(_subschemas_at(schema, ("anyOf",))), len(_subschemas_at(schema, ("oneOf",))))


def _check_pattern(pattern: JsonValue, *, strict: bool) -> None:
    if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN_CHARS:
        raise InvalidSchema(f"a pattern must be text of at most {MAX_PATTERN_CHARS} characters.")
    counts = [(bool(group), int(most or least)) for group, least, most in _REPETITION.findall(pattern)]
    # nested repetitions multiply; all groups are assumed to be nested
    of_groups = prod(max(1, count) for group, count in counts if group)
    if of_groups * max((count for group, count in counts if not group), default=1) > _MAX_REPETITIONS:
        raise InvalidSchema(f"a pattern repeats more than {_MAX_REPETITIONS} times.")
    check_pattern_syntax(pattern, strict=strict)


def _nesting_depth(root: SchemaObject) -> int:
    """Return the depth of nested objects and arrays as written, without following references."""
    layer, levels = [root], 0
    while layer:
        levels += 1
        same = layer
        while same := [inner for outer in same for inner in _subschemas_at(outer, _SAME_LEVEL_KEYWORDS)]:
            layer = [*layer, *same]
        layer = [
            inner for outer in layer for inner in (*_subschemas_at(outer, _NESTED_KEYWORDS), *_property_schemas(outer))
        ]
    return levels - 1


def _property_schemas(schema: SchemaObject) -> list[SchemaObject]:
    properties = schema.get("properties", {})
    return [entry for entry in properties.values() if isinstance(entry, dict)] if isinstance(properties, dict) else []
