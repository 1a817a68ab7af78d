"""/v1/conversations: conversations, and the items in them."""

from collections.abc import Sequence
from typing import Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import Response

from apis.conversations import AddItems, CreateConversation, ItemInclude, ItemsPage, UpdateConversation
from stack.bodies import read_body, read_query
from stack.build import Stack
from stack.edge import json_response
from stack.files import model_response
from stack.json_gate import Model, read_request


async def create_conversation(http: Request, stack: Stack) -> Response:
    request = await _read(http, stack, CreateConversation)
    return model_response(await stack.responses.conversations().create(request, tenant=http.scope["tenant"]))


async def get_conversation(http: Request, stack: Stack) -> Response:
    return model_response(await stack.responses.conversations().get(_id(http), tenant=http.scope["tenant"]))


async def update_conversation(http: Request, stack: Stack) -> Response:
    request = await _read(http, stack, UpdateConversation)
    return model_response(await stack.responses.conversations().update(_id(http), request, tenant=http.scope["tenant"]))


async def delete_conversation(http: Request, stack: Stack) -> Response:
    await stack.responses.conversations().delete(_id(http), tenant=http.scope["tenant"])
    return _json({"id": _id(http), "object": "conversation.deleted", "deleted": True})


async def add_items(http: Request, stack: Stack) -> Response:
    read_query(http, ItemInclude)
    request = await _read(http, stack, AddItems)
    added = await stack.responses.conversations().add(_id(http), request, tenant=http.scope["tenant"])
    return _page(added, has_more=False)


async def list_items(http: Request, stack: Stack) -> Response:
    page = read_query(http, ItemsPage)
    found = await stack.responses.conversations().list(_id(http), page, tenant=http.scope["tenant"])
    return _page(found.data, has_more=found.has_more)


async def get_item(http: Request, stack: Stack) -> Response:
    read_query(http, ItemInclude)
    item_id = http.path_params["item_id"]
    return _json(await stack.responses.conversations().item(_id(http), item_id, tenant=http.scope["tenant"]))


async def delete_item(http: Request, stack: Stack) -> Response:
    item_id = http.path_params["item_id"]
    deleted = await stack.responses.conversations().delete_item(_id(http), item_id, tenant=http.scope["tenant"])
    return model_response(deleted)


_ONE: Final = "/conversations/{conversation_id}"

CONVERSATION_ROUTES: Final = (
    ("/conversations", "POST", create_conversation),
    (_ONE, "GET", get_conversation),
    (_ONE, "POST", update_conversation),
    (_ONE, "DELETE", delete_conversation),
    (f"{_ONE}/items", "POST", add_items),
    (f"{_ONE}/items", "GET", list_items),
    (f"{_ONE}/items/{{item_id}}", "GET", get_item),
    (f"{_ONE}/items/{{item_id}}", "DELETE", delete_item),
)


async def _read(http: Request, stack: Stack, model: type[Model]) -> Model:
    return await read_request(await read_body(http, stack.config.server.max_body_bytes), model)


def _id(http: Request) -> str:
    return http.path_params["conversation_id"]


def _page(items: Sequence[dict[str, Any]], *, has_more: bool) -> Response:
    first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    page = {"object": "list", "data": [*items], "first_id": first, "last_id": last, "has_more": has_more}
    return _json(page)


def _json(value: Any) -> Response:
    return json_response(orjson.dumps(value))
