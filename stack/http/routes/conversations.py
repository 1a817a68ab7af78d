"""/v1/conversations: conversations, and the items in them."""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from apis.conversations import (
    AddItems,
    Conversations,
    CreateConversation,
    ItemInclude,
    ItemListParams,
    UpdateConversation,
)
from apis.storage.pages import Page
from providers.common.fair_turns import run_long
from stack.http.answers import value_response
from stack.http.context import HttpContext, Services
from stack.http.request_body import read_model, read_query
from stack.http.route import RESPONSES, Route
from stack.http.routes.calls import ApiCalls


async def create_conversation(http: Request, context: HttpContext, services: Services) -> Response:
    request = await read_model(http, CreateConversation)
    conversation = await _conversations(services).create(request, tenant=context.tenant)
    context.created_id = conversation.id
    return value_response(conversation)


async def add_items(http: Request, context: HttpContext, services: Services) -> Response:
    include = read_query(http, ItemInclude).include or ()
    request = await read_model(http, AddItems)
    added = await _conversations(services).add_items(
        http.path_params["conversation_id"], request, include=include, tenant=context.tenant
    )
    return await run_long(value_response, Page(added))  # items may be large


async def list_items(http: Request, context: HttpContext, services: Services) -> Response:
    params = read_query(http, ItemListParams)
    items = await _conversations(services).list_items(
        http.path_params["conversation_id"], params, tenant=context.tenant
    )
    return await run_long(value_response, items)


async def get_item(http: Request, context: HttpContext, services: Services) -> Response:
    include = read_query(http, ItemInclude).include or ()
    item_id = http.path_params["item_id"]
    conversations, conversation_id = _conversations(services), http.path_params["conversation_id"]
    item = await conversations.get_item(conversation_id, item_id, include=include, tenant=context.tenant)
    return await run_long(value_response, item)


_CONVERSATION_PATH: Final = "/conversations/{conversation_id}"


def _conversations(services: Services) -> Conversations:
    return services.stack.responses.conversations()


_calls = ApiCalls(_conversations)
list_conversations = _calls.calling("list_conversations", lambda conversations: conversations.list)
get_conversation = _calls.calling("get_conversation", lambda conversations: conversations.get)
update_conversation = _calls.calling("update_conversation", lambda conversations: conversations.update)
delete_conversation = _calls.deleting(
    "delete_conversation", lambda conversations: conversations.delete, "conversation.deleted"
)
delete_item = _calls.calling("delete_item", lambda conversations: conversations.delete_item)

CONVERSATION_ROUTES: Final = (
    Route("POST", "/conversations", RESPONSES, create_conversation, body=CreateConversation, stores=True, keyed=True),
    Route("GET", _CONVERSATION_PATH, RESPONSES, get_conversation),
    Route("POST", _CONVERSATION_PATH, RESPONSES, update_conversation, body=UpdateConversation, stores=True),
    Route("DELETE", _CONVERSATION_PATH, RESPONSES, delete_conversation, keyed=True),
    Route("POST", f"{_CONVERSATION_PATH}/items", RESPONSES, add_items, body=AddItems, query=ItemInclude, stores=True),
    Route("GET", f"{_CONVERSATION_PATH}/items", RESPONSES, list_items, query=ItemListParams),
    Route("GET", f"{_CONVERSATION_PATH}/items/{{item_id}}", RESPONSES, get_item, query=ItemInclude),
    Route("DELETE", f"{_CONVERSATION_PATH}/items/{{item_id}}", RESPONSES, delete_item),
)
