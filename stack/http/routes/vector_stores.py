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
    UpdateFile,
    UpdateVectorStore,
    VectorStoreFileListParams,
    VectorStoreListParams,
    VectorStores,
)
from stack.build import Stack
from stack.http.answers import deleted_response, model_response, page_response, single_page_response
from stack.http.edge import client_disconnected_response
from stack.http.streams import ClientDisconnected, run_while_connected
from stack.http.uploads import read_model, read_query


async def create_store(http: Request, stack: Stack) -> Response:
    request = await read_model(http, stack.config.server.max_body_bytes, CreateVectorStore)
    return model_response(await _require_vector_stores(stack).create(request, tenant=http.scope["tenant"]))


async def list_stores(http: Request, stack: Stack) -> Response:
    return page_response(
        await _require_vector_stores(stack).list(read_query(http, VectorStoreListParams), tenant=http.scope["tenant"])
    )


async def get_store(http: Request, stack: Stack) -> Response:
    return model_response(
        await _require_vector_stores(stack).get(http.path_params["store_id"], tenant=http.scope["tenant"])
    )


async def update_store(http: Request, stack: Stack) -> Response:
    request = await read_model(http, stack.config.server.max_body_bytes, UpdateVectorStore)
    return model_response(
        await _require_vector_stores(stack).update(http.path_params["store_id"], request, tenant=http.scope["tenant"])
    )


async def delete_store(http: Request, stack: Stack) -> Response:
    store_id = http.path_params["store_id"]
    await _require_vector_stores(stack).delete(store_id, tenant=http.scope["tenant"])
    return deleted_response(store_id, "vector_store.deleted")


async def search_store(http: Request, stack: Stack) -> Response:
    request = await read_model(http, stack.config.server.max_body_bytes, SearchStores)
    search = _require_vector_stores(stack).search([http.path_params["store_id"]], request, tenant=http.scope["tenant"])
    try:
        results = await run_while_connected(http.receive, search)
    except ClientDisconnected:
        return client_disconnected_response()
    return single_page_response("vector_store.search_results.page", results, search_query=list(request.queries))


async def add_store_file(http: Request, stack: Stack) -> Response:
    request = await read_model(http, stack.config.server.max_body_bytes, AddFile)
    return model_response(
        await _require_vector_stores(stack).add_file(http.path_params["store_id"], request, tenant=http.scope["tenant"])
    )


async def list_store_files(http: Request, stack: Stack) -> Response:
    """Of the store, or of a batch where the path names one."""
    page = read_query(http, VectorStoreFileListParams)
    ids = http.path_params
    found = await _require_vector_stores(stack).list_files(
        ids["store_id"], page, batch_id=ids.get("batch_id"), tenant=http.scope["tenant"]
    )
    return page_response(found)


async def get_store_file(http: Request, stack: Stack) -> Response:
    return model_response(await _require_vector_stores(stack).get_file(*_file_ids(http), tenant=http.scope["tenant"]))


async def update_store_file(http: Request, stack: Stack) -> Response:
    request = await read_model(http, stack.config.server.max_body_bytes, UpdateFile)
    return model_response(
        await _require_vector_stores(stack).update_file(*_file_ids(http), request, tenant=http.scope["tenant"])
    )


async def delete_store_file(http: Request, stack: Stack) -> Response:
    store_id, file_id = _file_ids(http)
    await _require_vector_stores(stack).delete_file(store_id, file_id, tenant=http.scope["tenant"])
    return deleted_response(file_id, "vector_store.file.deleted")


async def get_store_file_content(http: Request, stack: Stack) -> Response:
    pieces = await _require_vector_stores(stack).file_content(*_file_ids(http), tenant=http.scope["tenant"])
    return single_page_response("vector_store.file_content.page", pieces)


async def add_batch(http: Request, stack: Stack) -> Response:
    request = await read_model(http, stack.config.server.max_body_bytes, AddFiles)
    return model_response(
        await _require_vector_stores(stack).add_files(
            http.path_params["store_id"], request, tenant=http.scope["tenant"]
        )
    )


async def get_batch(http: Request, stack: Stack) -> Response:
    return model_response(await _require_vector_stores(stack).get_batch(*_batch_ids(http), tenant=http.scope["tenant"]))


async def cancel_batch(http: Request, stack: Stack) -> Response:
    return model_response(
        await _require_vector_stores(stack).cancel_batch(*_batch_ids(http), tenant=http.scope["tenant"])
    )


_STORE_PATH: Final = "/vector_stores/{store_id}"
VECTOR_STORE_ROUTES: Final = (
    ("/vector_stores", "POST", create_store),
    ("/vector_stores", "GET", list_stores),
    (_STORE_PATH, "GET", get_store),
    (_STORE_PATH, "POST", update_store),
    (_STORE_PATH, "DELETE", delete_store),
    (f"{_STORE_PATH}/search", "POST", search_store),
    (f"{_STORE_PATH}/files", "POST", add_store_file),
    (f"{_STORE_PATH}/files", "GET", list_store_files),
    (f"{_STORE_PATH}/files/{{file_id}}", "GET", get_store_file),
    (f"{_STORE_PATH}/files/{{file_id}}", "POST", update_store_file),
    (f"{_STORE_PATH}/files/{{file_id}}", "DELETE", delete_store_file),
    (f"{_STORE_PATH}/files/{{file_id}}/content", "GET", get_store_file_content),
    (f"{_STORE_PATH}/file_batches", "POST", add_batch),
    (f"{_STORE_PATH}/file_batches/{{batch_id}}", "GET", get_batch),
    (f"{_STORE_PATH}/file_batches/{{batch_id}}/cancel", "POST", cancel_batch),
    (f"{_STORE_PATH}/file_batches/{{batch_id}}/files", "GET", list_store_files),
)


def _require_vector_stores(stack: Stack) -> VectorStores:
    if stack.vector_stores is None:
        raise Unsupported(
            "This server has no vector stores: its config has no section `vector_stores`.", code="not_configured"
        )
    return stack.vector_stores


def _file_ids(http: Request) -> tuple[str, str]:
    return http.path_params["store_id"], http.path_params["file_id"]


def _batch_ids(http: Request) -> tuple[str, str]:
    return http.path_params["store_id"], http.path_params["batch_id"]
