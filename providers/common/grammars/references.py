"""References within a schema: pointers from its root, and names that the schema gives to its places."""

from urllib.parse import unquote, urljoin

from pydantic import JsonValue

from providers.common.grammars.schema_values import InvalidSchema, SchemaObject


class References:
    """Resolves the references of a schema. Names of schemas (`$id`, `$anchor`) count only where `has_names`."""

    def __init__(self, root: SchemaObject, *, has_names: bool = True) -> None:
        self._root = root
        self._has_names = has_names
        self._base = _name_of(root) or ""
        self._named: dict[str, SchemaObject] | None = None

    def find_resource(self, schema: SchemaObject, resource: SchemaObject) -> SchemaObject:
        """Return the schema in which the pointers of this one begin; `resource` is that of the schema around it."""
        return schema if self._has_names and _name_of(schema) is not None else resource

    def resolve(self, reference: JsonValue, resource: SchemaObject) -> SchemaObject:
        """Return the schema at a reference. Raises InvalidSchema where there is none in the schema itself."""
        if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
            return _follow_pointer(resource, reference)
        if not isinstance(reference, str) or not self._has_names:
            raise InvalidSchema("a reference must lead to a place in the schema itself, such as '#/$defs/NAME'.")
        name, _, fragment = reference.partition("#")
        named = self._find_named()
        here = named.get(urljoin(self._base, name)) if name else resource
        if here is not None and fragment:
            here = _follow_pointer(here, f"#{fragment}") if fragment[0] == "/" else named.get(f"#{fragment}")
        if here is None:
            raise InvalidSchema("a reference must lead to a place in the schema itself, such as '#/$defs/NAME'.")
        return here

    def _find_named(self) -> dict[str, SchemaObject]:
        """Return the schemas with names: by their addresses, and by their anchors with a `#`."""
        if self._named is None:
            self._named = {}
            waiting: list[JsonValue] = [self._root]
            while waiting:
                value = waiting.pop()
                if isinstance(value, dict):
                    if (name := _name_of(value)) is not None:
                        self._named.setdefault(urljoin(self._base, name), value)
                    anchors = (value.get(keyword) for keyword in ("$anchor", "$dynamicAnchor"))
                    for anchor in (anchor for anchor in anchors if isinstance(anchor, str)):
                        self._named.setdefault(f"#{anchor}", value)
                    waiting += value.values()
                elif isinstance(value, list):
                    waiting += value
        return self._named


def _name_of(schema: SchemaObject) -> str | None:
    name = schema.get("$id")
    return name if isinstance(name, str) and not name.startswith("#") else None


def _follow_pointer(resource: SchemaObject, reference: str) -> SchemaObject:
    here: JsonValue = resource
    for step in unquote(reference[1:]).split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(here, dict):
            here = here.get(key)
        elif isinstance(here, list) and key.isascii() and key.isdigit() and len(key) < 7 and int(key) < len(here):
            here = here[int(key)]
        else:
            here = None
    if not isinstance(here, dict):
        raise InvalidSchema(f"there is no schema at the reference '{reference[:100]}'.")
    return here
