"""The part of the Open Responses schema that describes what a server sends, without prose, as the page carries it.

`python -m tests.console.open_responses` writes it from the published schema.
"""

import json
from pathlib import Path
from typing import Any, Final, cast

from stack.http.routes.console.page import FOLDER

SOURCE: Final = Path(__file__).parents[1] / "spec" / "responses" / "openresponses-2026-04-24.json"
TARGET: Final = FOLDER / "schema" / "open_responses.json"
PROSE: Final = {"description", "title", "example", "default", "discriminator"}
PREFIX: Final = "#/components/schemas/"


def compact_schema() -> dict[str, Any]:
    """Return {"version", "events": name of the schema by type of event, "schemas": by name}."""
    spec = json.loads(SOURCE.read_bytes())
    schemas: dict[str, Any] = {}

    def visit(name: str) -> None:
        if name not in schemas:
            schemas[name] = None
            schemas[name] = compact(spec["components"]["schemas"][name])

    def compact(node: Any, *, names_fields: bool = False) -> Any:
        if isinstance(node, list):
            return [compact(each) for each in cast(list[Any], node)]
        if not isinstance(node, dict):
            return node
        fields = cast(dict[str, Any], node)
        if names_fields:
            return {name: compact(child) for name, child in fields.items()}
        fields = {name: child for name, child in fields.items() if name not in PROSE and not name.startswith("x-")}
        if "$ref" in fields:
            name = fields["$ref"].removeprefix(PREFIX)
            visit(name)
            return {"$ref": f"#/{name}"}
        if set(fields) == {"allOf"}:
            parts = [part for each in fields["allOf"] if (part := compact(each))]
            return parts[0] if len(parts) == 1 else {"allOf": parts}
        return {name: compact(child, names_fields=name == "properties") for name, child in fields.items()}

    stream = spec["paths"]["/responses"]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"]
    events: dict[str, str] = {}
    for choice in stream["oneOf"]:
        name = choice["$ref"].removeprefix(PREFIX)
        visit(name)
        events |= dict.fromkeys(schemas[name]["properties"]["type"]["enum"], name)
    visit("ResponseResource")
    return {"version": SOURCE.stem.removeprefix("openresponses-"), "events": events, "schemas": schemas}


def as_text(schema: dict[str, Any]) -> str:
    return json.dumps(schema, separators=(",", ":"), sort_keys=True) + "\n"


if __name__ == "__main__":
    TARGET.write_text(as_text(compact_schema()))
