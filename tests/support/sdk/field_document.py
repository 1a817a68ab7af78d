"""Renders the table of fields for apis/README.md: `python -m tests.support.sdk.field_document` prints it."""

from collections.abc import Iterator
from itertools import groupby

from apis.wire.field_rows import FIELD_ROWS, UNSUPPORTED_TYPES, FieldRow

_APIS = {"CreateChatCompletion": "chat: ", "ChatStreamOptions": "chat: ", "Message": "chat: ", "TextPart": "chat: "}
_COMPACT = {
    "CompactConversation": "compact: ",
    "SearchStores": "vector store search: ",
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


if __name__ == "__main__":
    print(render_field_table())
