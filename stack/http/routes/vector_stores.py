"""/v1/vector_stores: the stores, the files in them, batches of files, and the search."""

from functools import partial
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from apis.documents.vector_store_requests import (
    AddFile,
    AddFiles,
    CreateVectorStore,
    SearchStores,
    UpdateFile,
    UpdateVectorStore,
    VectorStoreFileListParams,
    VectorStoreListParams,
)
from apis.documents.vector_stores import VectorStores
from stack.http.answers import build_single_page, value_response
from stack.http.context import HttpContext, Services, require_section
from stack.http.request_body import read_counted, read_query
from stack.http.route import FILES, Route
from stack.http.routes.calls import ApiCalls
from stack.http.streams import run_while_connected


async def create_store(http: Request, context: HttpContext, services: Services) -> Response:
    request = await read_counted(http, CreateVectorStore)
    store = await _require_vector_stores(services).create(request, tenant=context.tenant)
    context.created_id = store.id
    return value_response(store)


async def search_store(http: Request, context: HttpContext, services: Services) -> Response:
    request = await read_counted(http, SearchStores, embeds=True)
    search = _require_vector_stores(services).search([http.path_params["store_id"]], request, tenant=context.tenant)
    results = await run_while_connected(http, search)
    return value_response(
        build_single_page("vector_store.search_results.page", results, search_query=list(request.queries))
    )


async def add_store_file(http: Request, context: HttpContext, services: Services) -> Response:
    request = await read_counted(http, AddFile)
    return value_response(
        await _require_vector_stores(services).add_file(http.path_params["store_id"], request, tenant=context.tenant)
    )


async def list_store_files(http: Request, context: HttpContext, services: Services) -> Response:
    """List the files of the store, or of a batch where the path names one."""
    page = read_query(http, VectorStoreFileListParams)
    ids = http.path_params
    files = await _require_vector_stores(services).list_files(
        ids["store_id"], page, batch_id=ids.get("batch_id"), tenant=context.tenant
    )
    return value_response(files)


async def add_batch(http: Request, context: HttpContext, services: Services) -> Response:
    request = await read_counted(http, AddFiles)
    return value_response(
        await _require_vector_stores(services).add_files(http.path_params["store_id"], request, tenant=context.tenant)
    )


_STORE_PATH: Final = "/vector_stores/{store_id}"


def _require_vector_stores(services: Services) -> VectorStores:
    return require_section(services.stack.vector_stores, "has no vector stores", "vector_stores")


_stores = ApiCalls(_require_vector_stores)
list_stores = _stores.calling("list_stores", lambda stores: stores.list)
get_store = _stores.calling("get_store", lambda stores: stores.get)
update_store = _stores.calling("update_store", lambda stores: stores.update)
delete_store = _stores.deleting("delete_store", lambda stores: stores.delete, "vector_store.deleted")
get_store_file = _stores.calling("get_store_file", lambda stores: stores.get_file)
_contents = ApiCalls(_require_vector_stores, partial(build_single_page, "vector_store.file_content.page"))
get_store_file_content = _contents.calling("get_store_file_content", lambda stores: stores.file_content)
update_store_file = _stores.calling("update_store_file", lambda stores: stores.update_file)
delete_store_file = _stores.deleting(
    "delete_store_file", lambda stores: stores.delete_file, "vector_store.file.deleted"
)
get_batch = _stores.calling("get_batch", lambda stores: stores.get_batch)
cancel_batch = _stores.calling("cancel_batch", lambda stores: stores.cancel_batch)

VECTOR_STORE_ROUTES: Final = (
    Route("POST", "/vector_stores", FILES, create_store, body=CreateVectorStore, stores=True, keyed=True),
    Route("GET", "/vector_stores", FILES, list_stores, query=VectorStoreListParams),
    Route("GET", _STORE_PATH, FILES, get_store),
    Route("POST", _STORE_PATH, FILES, update_store, body=UpdateVectorStore, stores=True),
    Route("DELETE", _STORE_PATH, FILES, delete_store, keyed=True),
    Route("POST", f"{_STORE_PATH}/search", FILES, search_store, body=SearchStores, stores=False, tool="file_search"),
    Route("POST", f"{_STORE_PATH}/files", FILES, add_store_file, body=AddFile, stores=True),
    Route("GET", f"{_STORE_PATH}/files", FILES, list_store_files, query=VectorStoreFileListParams),
    Route("GET", f"{_STORE_PATH}/files/{{file_id}}", FILES, get_store_file),
    Route("POST", f"{_STORE_PATH}/files/{{file_id}}", FILES, update_store_file, body=UpdateFile, stores=True),
    Route("DELETE", f"{_STORE_PATH}/files/{{file_id}}", FILES, delete_store_file),
    Route("GET", f"{_STORE_PATH}/files/{{file_id}}/content", FILES, get_store_file_content),
    Route("POST", f"{_STORE_PATH}/file_batches", FILES, add_batch, body=AddFiles, stores=True),
    Route("GET", f"{_STORE_PATH}/file_batches/{{batch_id}}", FILES, get_batch),
    Route("POST", f"{_STORE_PATH}/file_batches/{{batch_id}}/cancel", FILES, cancel_batch, stores=False),
    Route(
        "GET",
        f"{_STORE_PATH}/file_batches/{{batch_id}}/files",
        FILES,
        list_store_files,
        query=VectorStoreFileListParams,
    ),
)
