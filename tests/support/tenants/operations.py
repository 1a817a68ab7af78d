"""Every operation of the API that names an object, by the kind of the object that it names."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

Ids = Sequence[str]
Way = Literal["json", "form", "socket"]
Body = Callable[[Ids, str], dict[str, Any]]


@dataclass(frozen=True)
class Operation:
    """`path` and `body` are made of the ids named and of a text of the tenant's own; `kind` says which ids."""

    kind: str
    method: str
    path: str
    body: Body | None = None
    way: Way = "json"

    def __str__(self) -> str:
        return f"{self.method} {self.path} by {self.kind}{'' if self.way == 'json' else f' ({self.way})'}"


PROBES: Final = {
    "response": "/responses/{0}",
    "conversation": "/conversations/{0}",
    "conversation_item": "/conversations/{0}/items/{1}",
    "file": "/files/{0}",
    "store": "/vector_stores/{0}",
    "store_file": "/vector_stores/{0}/files/{1}",
    "batch": "/vector_stores/{0}/file_batches/{1}",
    "container": "/containers/{0}",
    "container_file": "/containers/{0}/files/{1}",
}
"""Where one who may see an object sees it."""


SAID: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"stream": True},
    {"background": True},
    {"background": True, "stream": True},
    {"store": False},
)
"""The ways to ask for a response."""


def ask(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "scripted", "input": text, **fields}


def reference(item: str, text: str) -> list[dict[str, Any]]:
    return [{"type": "item_reference", "id": item}, {"role": "user", "content": text}]


def _responses() -> list[Operation]:
    """All the ways to make a response that stands on the object."""
    bodies: dict[str, Body] = {
        "response": lambda ids, text: ask(text, previous_response_id=ids[0]),
        "item": lambda ids, text: ask(text, input=reference(ids[0], text)),
        "conversation": lambda ids, text: ask(text, conversation=ids[0]),
        "file": lambda ids, text: ask(
            text, input=[{"role": "user", "content": [{"type": "input_file", "file_id": ids[0]}]}]
        ),
        "store": lambda ids, text: ask(
            f"{text} search!", tools=[{"type": "file_search", "vector_store_ids": [ids[0]]}], include=SEEN
        ),
        "container": lambda ids, text: ask(text, tools=[{"type": "code_interpreter", "container": ids[0]}]),
    }
    operations: list[Operation] = []
    for kind, body in bodies.items():
        operations += [Operation(kind, "POST", "/responses", _with(body, each)) for each in SAID]
        operations.append(Operation(kind, "WS", "/responses", body, "socket"))
        operations.append(Operation(kind, "POST", "/responses/input_tokens", body))
    return operations


SEEN: Final = ["file_search_call.results"]


def _with(body: Body, more: dict[str, Any]) -> Body:
    return lambda ids, text: {**body(ids, text), **more}


def _json(kind: str, method: str, path: str, body: Body | None = None) -> Operation:
    return Operation(kind, method, path, body)


_ATTRIBUTES: Final[Body] = lambda _, text: {"attributes": {"a": text[:64]}}  # noqa: E731 - one of many
_METADATA: Final[Body] = lambda _, text: {"metadata": {"a": text[:64]}}  # noqa: E731 - one of many

OPERATIONS: Final = (
    *_responses(),
    *(_json(kind, "GET", path) for kind, path in PROBES.items()),
    *(_json(kind, "DELETE", path) for kind, path in PROBES.items() if kind != "batch"),
    _json("response", "GET", "/responses/{0}?stream=true"),
    _json("response", "GET", "/responses/{0}?stream=true&starting_after=2"),
    _json("response", "GET", "/responses/{0}/input_items"),
    _json("response", "GET", "/responses/{0}/events"),
    _json("response", "GET", "/responses/{0}/tree"),
    _json("response", "GET", "/responses/{0}/webhook_deliveries"),
    _json("response", "POST", "/responses/{0}/cancel", lambda _, __: {}),
    _json(
        "response", "POST", "/responses/compact", lambda ids, _: {"model": "scripted", "previous_response_id": ids[0]}
    ),
    _json("item", "POST", "/conversations", lambda ids, _: {"items": [{"type": "item_reference", "id": ids[0]}]}),
    _json("response_item", "GET", "/responses/{0}/input_items?after={1}"),
    _json("conversation", "POST", "/conversations/{0}", _METADATA),
    _json("conversation", "GET", "/conversations/{0}/items"),
    _json(
        "conversation",
        "POST",
        "/conversations/{0}/items",
        lambda _, text: {"items": [{"role": "user", "content": text}]},
    ),
    _json("conversation_item", "GET", "/conversations/{0}/items?after={1}"),
    _json(
        "conversation_item",
        "POST",
        "/conversations/{0}/items",
        lambda ids, _: {"items": [{"type": "item_reference", "id": ids[1]}]},
    ),
    _json("file", "GET", "/files/{0}/content"),
    _json("file", "GET", "/files?after={0}"),
    _json("file", "POST", "/vector_stores", lambda ids, text: {"name": text, "file_ids": [ids[0]]}),
    _json("file", "POST", "/containers", lambda ids, text: {"name": text, "file_ids": [ids[0]]}),
    _json("store", "POST", "/vector_stores/{0}", lambda _, text: {"name": text}),
    _json("store", "GET", "/vector_stores?after={0}"),
    _json("store", "GET", "/vector_stores/{0}/files"),
    _json("store", "POST", "/vector_stores/{0}/search", lambda _, text: {"query": text}),
    _json("store_file", "POST", "/vector_stores/{0}/files", lambda ids, _: {"file_id": ids[1]}),
    _json("store_file", "POST", "/vector_stores/{0}/file_batches", lambda ids, _: {"file_ids": [ids[1]]}),
    _json("store_file", "POST", "/vector_stores/{0}/files/{1}", _ATTRIBUTES),
    _json("store_file", "GET", "/vector_stores/{0}/files/{1}/content"),
    _json("store_file", "GET", "/vector_stores/{0}/files?after={1}"),
    _json("batch", "GET", "/vector_stores/{0}/file_batches/{1}/files"),
    _json("batch", "POST", "/vector_stores/{0}/file_batches/{1}/cancel", lambda _, __: {}),
    _json("container", "GET", "/containers?after={0}"),
    _json("container", "GET", "/containers/{0}/files"),
    Operation("container", "POST", "/containers/{0}/files", lambda _, text: {"file": text}, "form"),
    _json("container_and_file", "POST", "/containers/{0}/files", lambda ids, _: {"file_id": ids[1]}),
    _json("container_file", "GET", "/containers/{0}/files/{1}/content"),
    _json("container_file", "GET", "/containers/{0}/files?after={1}"),
)
PAIRS: Final = {
    "response_item": ("response", "item"),
    "conversation_item": ("conversation", "item"),
    "store_file": ("store", "file"),
    "batch": ("store", "batch"),
    "container_file": ("container", "container_file"),
    "container_and_file": ("container", "file"),
}
"""Kinds of two ids: the first may be one's own, and the second another's."""
