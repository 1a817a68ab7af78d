"""Finds the keywords of a schema that a compiler cannot turn into a grammar, and the schema without them."""

from collections.abc import Callable
from typing import Final

from pydantic import JsonValue

from providers.common.grammars.schema_values import SchemaObject

_DEFINITIONS: Final = ("$defs", "definitions")
_MAPS: Final = (*_DEFINITIONS, "properties", "patternProperties", "dependentSchemas")
_LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLES: Final = (
    *("items", "additionalProperties", "additionalItems", "contains", "propertyNames"),
    *("not", "if", "then", "else", "unevaluatedProperties", "unevaluatedItems"),
)


class SchemaRelaxation:
    """Relaxes one schema. `compiles` says of a schema whether it makes a grammar; `left_out` has the place of each
    keyword that does not, as names of properties and keywords."""

    def __init__(self, compiles: Callable[[SchemaObject], bool]) -> None:
        self.left_out: list[list[str]] = []
        self._compiles = compiles
        self._definitions: SchemaObject = {}

    def relax(self, schema: SchemaObject, path: tuple[str, ...] = ()) -> SchemaObject:
        """Return the schema with every keyword that compiles. Each schema within it has to compile by itself; the one
        at `path` comes after those within it."""
        relaxed = {**schema}
        for keyword in dict.fromkeys((*_MAPS, *_LISTS, *_SINGLES)):
            inner, inner_path = schema.get(keyword), (*path, keyword)
            if isinstance(inner, dict) and keyword in _MAPS:
                relaxed[keyword] = {name: self._relax_value(each, (*inner_path, name)) for name, each in inner.items()}
            elif isinstance(inner, dict) and keyword in _SINGLES:
                relaxed[keyword] = self.relax(inner, inner_path)
            elif isinstance(inner, list) and keyword in _LISTS:
                relaxed[keyword] = [self._relax_value(each, inner_path) for each in inner]
            if not path and keyword in _DEFINITIONS and keyword in relaxed:
                self._definitions[keyword] = relaxed[keyword]
        if self._compiles({**self._definitions, **relaxed}):
            return relaxed
        enforced: SchemaObject = {}
        for keyword in sorted(relaxed, key=lambda name: (name not in _DEFINITIONS, name != "type")):
            if self._compiles({**self._definitions, **enforced, keyword: relaxed[keyword]}):
                enforced[keyword] = relaxed[keyword]
            else:
                self.left_out.append([*path, keyword])
        return enforced

    def _relax_value(self, value: JsonValue, path: tuple[str, ...]) -> JsonValue:
        return self.relax(value, path) if isinstance(value, dict) else value
