"""/v1/vector_stores: the stores, the files in them, batches of files, and the search."""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from apis.errors import Unsupported
from apis.vector_stores import (
    AddFile,
    AddFiles,
    CreateVectorStore,
    SearchStores,
    StoreFilesPage,
    StoresPage,
    UpdateFile,
    UpdateVectorStore,
    VectorStores,
)
from stack.build import Stack
from stack.http.answers import deleted_response, model_response, page_response, whole_response
from stack.http.edge import client_gone
from stack.http.streams import ClientGone, while_connected
from stack.http.uploads import read_model, read_query


async def create_store(http: Request, stack: Stack) -> Response:
    request = await read_model(http, stack.config.server.max_body_bytes, CreateVectorStore)
    return model_response(await _stores(stack).create(request, tenant=http.scope["tenant"]))


async def list_stores(http: Request, stack: Stack) -> Response:
    return page_response(await _stores(stack).list(read_query(http, StoresPage), tenant=http.scope["tenant"]))


async def get_store(http: Request, stack: Stack) -> Response:
    return model_response(await _stores(stack).get(http.path_params["store_id"], tenant=http.scope["tenant"]))


async def update_store(http: Request, stack: Stack) -> Response:
    request = await read_model(http, stack.config.server.max_body_bytes, UpdateVectorStore)
    return model_response(
        await _stores(stack).update(http.path_params["store_id"], request, tenant=http.scope["tenant"])
    )


async def delete_store(http: Request, stack: Stack) -> Response:
    store_id = http.path_params["store_id"]
    await _stores(stack).delete(store_id, tenant=http.scope["tenant"])
    return deleted_response(store_id, "vector_store.deleted")


async def search_store(http: Request, stack: Stack) -> Response:
    request = await read_model(http, stack.config.server.max_body_bytes, SearchStores)
    search = _stores(stack).search([http.path_params["store_id"]], request, tenant=http.scope["tenant"])
    try:
        results = await while_connected(http.receive, search)
    except ClientGone:
        return client_gone()
    return whole_response("vector_store.search_results.page", results, search_query=list(request.queries))


async def add_file(http: Request, stack: Stack) -> Response:
    request = await read_model(http, stack.config.server.max_body_bytes, AddFile)
    return model_response(
        await _stores(stack).add_file(http.path_params["store_id"], request, tenant=http.scope["tenant"])
    )


async def list_store_files(http: Request, stack: Stack) -> Response:
    """Of the store, or of a batch where the path names one."""
    page = read_query(http, StoreFilesPage)
    ids = http.path_params
    found = await _stores(stack).list_files(
        ids["store_id"], page, batch_id=ids.get("batch_id"), tenant=http.scope["tenant"]
    )
    return page_response(found)


async def get_store_file(http: Request, stack: Stack) -> Response:
    return model_response(await _stores(stack).get_file(*_file_ids(http), tenant=http.scope["tenant"]))


async def update_store_file(http: Request, stack: Stack) -> Response:
    request = await read_model(http, stack.config.server.max_body_bytes, UpdateFile)
    return model_response(await _stores(stack).update_file(*_file_ids(http), request, tenant=http.scope["tenant"]))


async def delete_store_file(http: Request, stack: Stack) -> Response:
    store_id, file_id = _file_ids(http)
    await _stores(stack).delete_file(store_id, file_id, tenant=http.scope["tenant"])
    return deleted_response(file_id, "vector_store.file.deleted")


async def store_file_content(http: Request, stack: Stack) -> Response:
    pieces = await _stores(stack).file_content(*_file_ids(http), tenant=http.scope["tenant"])
    return whole_response("vector_store.file_content.page", pieces)


async def add_batch(http: Request, stack: Stack) -> Response:
    request = await read_model(http, stack.config.server.max_body_bytes, AddFiles)
    return model_response(
        await _stores(stack).add_files(http.path_params["store_id"], request, tenant=http.scope["tenant"])
    )


async def get_batch(http: Request, stack: Stack) -> Response:
    return model_response(await _stores(stack).get_batch(*_batch_ids(http), tenant=http.scope["tenant"]))


async def cancel_batch(http: Request, stack: Stack) -> Response:
    return model_response(await _stores(stack).cancel_batch(*_batch_ids(http), tenant=http.scope["tenant"]))


_STORE: Final = "/vector_stores/{store_id}"
VECTOR_STORE_ROUTES: Final = (
    ("/vector_stores", "POST", create_store),
    ("/vector_stores", "GET", list_stores),
    (_STORE, "GET", get_store),
    (_STORE, "POST", update_store),
    (_STORE, "DELETE", delete_store),
    (f"{_STORE}/search", "POST", search_store),
    (f"{_STORE}/files", "POST", add_file),
    (f"{_STORE}/files", "GET", list_store_files),
    (f"{_STORE}/files/{{file_id}}", "GET", get_store_file),
    (f"{_STORE}/files/{{file_id}}", "POST", update_store_file),
    (f"{_STORE}/files/{{file_id}}", "DELETE", delete_store_file),
    (f"{_STORE}/files/{{file_id}}/content", "GET", store_file_content),
    (f"{_STORE}/file_batches", "POST", add_batch),
    (f"{_STORE}/file_batches/{{batch_id}}", "GET", get_batch),
    (f"{_STORE}/file_batches/{{batch_id}}/cancel", "POST", cancel_batch),
    (f"{_STORE}/file_batches/{{batch_id}}/files", "GET", list_store_files),
)


def _stores(stack: Stack) -> VectorStores:
    if stack.vector_stores is None:
        raise Unsupported(
            "This server has no vector stores: its config has no section `vector_stores`.", code="not_configured"
        )
    return stack.vector_stores


def _file_ids(http: Request) -> tuple[str, str]:
    return http.path_params["store_id"], http.path_params["file_id"]


def _batch_ids(http: Request) -> tuple[str, str]:
    return http.path_params["store_id"], http.path_params["batch_id"]
