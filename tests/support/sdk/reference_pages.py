"""Renders the generated pages of the documents: `python -m tests.support.sdk.reference_pages` writes them."""

import ast
import inspect
import os
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Final

from apis import errors
from apis.errors import StackError
from apis.wire.field_rows import FIELD_ROWS, UNSUPPORTED_TYPES, FieldRow
from stack.http.routes.server import METRICS_ROUTE, SERVER_ROUTES
from stack.http.routes.table import API_ROUTES, EXTENSION_ROUTES
from stack.provider_list import provider_lines
from tests.support.laws.source_trees import ROOT, files_with, nodes, python_files
from tests.support.sdk.openapi_document import render_document

_COMMAND: Final = "`python -m tests.support.sdk.reference_pages` writes this page."
_APIS = {"CreateChatCompletion": "chat: ", "ChatStreamOptions": "chat: ", "Message": "chat: ", "TextPart": "chat: "}
_COMPACT = {
    "CompactConversation": "compact: ",
    "SearchStores": "vector store search: ",
    "CreateDecision": "decisions: ",
    "CreateImage": "images: ",
    "CreateTranscription": "transcriptions: ",
    "EditImage": "image edits: ",
    "DecisionText": "decisions: ",
    "EmbeddingRequest": "embeddings: ",
    "CreateBatch": "batches: ",
    "CreateProject": "project: ",
    "UpdateRateLimit": "rate limit: ",
    "UsageQuery": "usage: ",
    "ImagesUsageQuery": "usage.images: ",
    "WebSearchUsageQuery": "usage.web_search_calls: ",
    "FileSearchUsageQuery": "usage.file_search_calls: ",
    "UpdateServiceAccount": "service account: ",
    "UpdateDataRetention": "data retention: ",
    "UpdateServiceTierSettings": "service tiers: ",
}


def render_field_table() -> str:
    """Return the rows as a table in Markdown, those with one reason together."""
    lines = ["| field | handling | reason |", "|---|---|---|"]
    for (handling, note), rows in groupby(FIELD_ROWS, lambda row: (row.handling, row.note)):
        fields = ", ".join(dict.fromkeys(f"`{_field(row)}`" for row in rows))
        lines.append(f"| {fields} | {handling} | {f'it is now `{note}`' if handling == 'moved' else note} |")
    for note, types in groupby(UNSUPPORTED_TYPES.items(), lambda entry: entry[1]):
        lines.append(f"| {', '.join(f'type `{name}`' for name, _ in types)} | refused | {note} |")
    return "\n".join(lines)


def _field(row: FieldRow) -> str:
    api = next(_prefixes(row), "")
    if row.value is not None:
        return f"{api}{row.path} = {row.value}"
    return f"{api}{row.path}, but {' or '.join(map(str, row.accepted))}" if _has_accepted(row) else f"{api}{row.path}"


def _has_accepted(row: FieldRow) -> bool:
    return row.handling == "refused" and bool(row.accepted)


def _prefixes(row: FieldRow) -> Iterator[str]:
    prefixes = {**_APIS, **_COMPACT}
    return (prefixes[model] for model in row.models if model in prefixes and "CreateResponse" not in row.models)


def render_pages() -> dict[str, str]:
    """Return the text of each generated page by its path."""
    return {
        "apis/docs/errors.md": _page("Errors", _ERRORS, _error_table(), _CODES, _code_table()),
        "apis/docs/fields.md": _page("Fields that do not work", _FIELDS, render_field_table()),
        "apis/docs/routes.md": _page("Routes", _ROUTES, _route_table()),
        "providers/docs/fields.md": _page("Fields of the providers", _PROVIDERS, *_provider_sections()),
        "stack/http/openapi.json": render_document(),
    }


_ERRORS: Final = """\
The body of every error is `{"error": {"message", "type", "param", "code"}}`. All four keys are always
present. `param` names the field that is wrong. An error with a known end has `Retry-After`. A failed response has
its code in `error.code`.

An error that is no row of this table is a bug. It is a 500 with the type `server_error`. Its message has the id of the
request, which is in the log."""
_CODES: Final = """## Further codes

An error of the same status may have one of these codes instead of its own:"""
_FIELDS: Final = """\
These are the fields, values and types of the openai SDK that this server does not use. They come from
`apis/wire/field_rows.py`. A test walks the SDK's own types: every other field that it can send works.

- *moved*: the field has another name here, and the error says which one.
- *refused*: the request is a 400 with that reason.
- *echoed*: the response repeats the value, and nothing else happens.
- *ignored*: nothing happens."""
_ROUTES: Final = """\
Each route of OpenAI's API and each extension is available with and without `/v1`.
Those of the server itself have no prefix.
`/responses` is also a WebSocket."""

_PROVIDERS: Final = """\
`stack list` prints these lines: each field with its type and its default. `stack list NAME` prints one provider with
all that its documentation says."""


def _provider_sections() -> Iterator[str]:
    lines = "\n".join(provider_lines())
    for section in lines.strip().split("\n\n"):
        name, _, fields = section.partition("\n")
        yield f"## {name}\n\n```text\n{fields}\n```"


def _page(title: str, *sections: str) -> str:
    return "\n\n".join((f"# {title}", _COMMAND, *sections)) + "\n"


def _error_table() -> str:
    lines = ["| status | `type` | `code` | when |", "|---|---|---|---|"]
    for error in sorted(_subclasses(StackError), key=lambda error: error.status):
        code = f"`{error.code}`" if error.code else "null"
        lines.append(f"| {error.status} | `{error.type}` | {code} | {_first_sentence(error)} |")
    return "\n".join(lines)


def _first_sentence(error: type[StackError]) -> str:
    return inspect.cleandoc(error.__doc__ or "").replace("\n", " ").partition(". ")[0].removesuffix(".") + "."


def _subclasses(error: type[StackError]) -> Iterator[type[StackError]]:
    for each in error.__subclasses__():
        if each.__module__ == errors.__name__:
            yield each
            yield from _subclasses(each)


def _code_table() -> str:
    """Return the codes that the product gives to errors where it raises them, by status."""
    own = {error.code for error in _subclasses(StackError)}
    files = files_with(r"\bcode\s*=", python_files("apis", "providers", "stack"))
    codes = {pair for file in files for pair in _codes_in(file) if pair[1] not in own}
    lines = ["| status | `code` |", "|---|---|"]
    for status, pairs in groupby(sorted(codes), lambda pair: pair[0]):
        lines.append(f"| {status} | {', '.join(f'`{code}`' for _, code in pairs)} |")
    return "\n".join(lines)


def _codes_in(file: Path) -> Iterator[tuple[int, str]]:
    classes = {error.__name__: error for error in _subclasses(StackError)}
    for node in nodes(file):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in classes:
            for keyword in node.keywords:
                if keyword.arg == "code" and isinstance(keyword.value, ast.Constant) and keyword.value.value:
                    yield classes[node.func.id].status, str(keyword.value.value)


def _route_table() -> str:
    lines = ["| route | methods | of |", "|---|---|---|"]
    kinds = (("OpenAI", API_ROUTES), ("extension", EXTENSION_ROUTES), ("the server", (*SERVER_ROUTES, METRICS_ROUTE)))
    rows = [(route.path.replace(":path", ""), route.method, kind) for kind, routes in kinds for route in routes]
    for (path, kind), group in groupby(sorted(rows, key=_by_path), lambda row: (row[0], row[2])):
        lines.append(f"| `{path}` | {', '.join(method for _, method, _ in group)} | {kind} |")
    return "\n".join(lines)


def _by_path(row: tuple[str, str, str]) -> tuple[bool, str, str]:
    return row[2] == "the server", row[0], row[2]


if __name__ == "__main__":
    os.environ["COLUMNS"] = "100"
    for name, text in render_pages().items():
        (ROOT / name).write_text(text)
