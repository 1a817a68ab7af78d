"""/v1/conversations: conversations, and the items in them."""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from apis.conversations import AddItems, CreateConversation, ItemInclude, ItemListParams, UpdateConversation
from stack.build import Stack
from stack.http.answers import deleted_response, list_response, model_response, value_response
from stack.http.uploads import read_model, read_query


async def create_conversation(http: Request, stack: Stack) -> Response:
    request = await read_model(http, stack.config.server.max_body_bytes, CreateConversation)
    return model_response(await stack.responses.conversations().create(request, tenant=http.scope["tenant"]))


async def get_conversation(http: Request, stack: Stack) -> Response:
    return model_response(
        await stack.responses.conversations().get(_conversation_id(http), tenant=http.scope["tenant"])
    )


async def update_conversation(http: Request, stack: Stack) -> Response:
    request = await read_model(http, stack.config.server.max_body_bytes, UpdateConversation)
    return model_response(
        await stack.responses.conversations().update(_conversation_id(http), request, tenant=http.scope["tenant"])
    )


async def delete_conversation(http: Request, stack: Stack) -> Response:
    await stack.responses.conversations().delete(_conversation_id(http), tenant=http.scope["tenant"])
    return deleted_response(_conversation_id(http), "conversation.deleted")


async def add_items(http: Request, stack: Stack) -> Response:
    read_query(http, ItemInclude)
    request = await read_model(http, stack.config.server.max_body_bytes, AddItems)
    added = await stack.responses.conversations().add_items(
        _conversation_id(http), request, tenant=http.scope["tenant"]
    )
    return list_response(added, has_more=False)


async def list_items(http: Request, stack: Stack) -> Response:
    page = read_query(http, ItemListParams)
    found = await stack.responses.conversations().list_items(_conversation_id(http), page, tenant=http.scope["tenant"])
    return list_response(found.data, has_more=found.has_more)


async def get_item(http: Request, stack: Stack) -> Response:
    read_query(http, ItemInclude)
    item_id = http.path_params["item_id"]
    return value_response(
        await stack.responses.conversations().get_item(_conversation_id(http), item_id, tenant=http.scope["tenant"])
    )


async def delete_item(http: Request, stack: Stack) -> Response:
    item_id = http.path_params["item_id"]
    deleted = await stack.responses.conversations().delete_item(
        _conversation_id(http), item_id, tenant=http.scope["tenant"]
    )
    return model_response(deleted)


_CONVERSATION_PATH: Final = "/conversations/{conversation_id}"

CONVERSATION_ROUTES: Final = (
    ("/conversations", "POST", create_conversation),
    (_CONVERSATION_PATH, "GET", get_conversation),
    (_CONVERSATION_PATH, "POST", update_conversation),
    (_CONVERSATION_PATH, "DELETE", delete_conversation),
    (f"{_CONVERSATION_PATH}/items", "POST", add_items),
    (f"{_CONVERSATION_PATH}/items", "GET", list_items),
    (f"{_CONVERSATION_PATH}/items/{{item_id}}", "GET", get_item),
    (f"{_CONVERSATION_PATH}/items/{{item_id}}", "DELETE", delete_item),
)


def _conversation_id(http: Request) -> str:
    return http.path_params["conversation_id"]
