"""/v1/containers: the containers of the code interpreter, and the files in them."""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from apis.containers import ContainerListParams, Containers, CopyFile, CreateContainer
from apis.errors import Unsupported
from stack.build import Stack
from stack.http.answers import deleted_response, model_response, page_response
from stack.http.uploads import open_upload, read_model, read_query

_DOWNLOAD_HEADERS: Final = {"content-disposition": "attachment", "x-content-type-options": "nosniff"}
"""Programs write what they like: no browser is to take it for a page of this server's."""


async def create_container(http: Request, stack: Stack) -> Response:
    containers = _require_containers(stack)
    return model_response(
        await containers.create(
            await read_model(http, stack.config.server.max_body_bytes, CreateContainer), tenant=http.scope["tenant"]
        )
    )


async def list_containers(http: Request, stack: Stack) -> Response:
    return page_response(
        await _require_containers(stack).list(read_query(http, ContainerListParams), tenant=http.scope["tenant"])
    )


async def get_container(http: Request, stack: Stack) -> Response:
    return model_response(await _require_containers(stack).get(_container_id(http), tenant=http.scope["tenant"]))


async def delete_container(http: Request, stack: Stack) -> Response:
    await _require_containers(stack).delete(_container_id(http), tenant=http.scope["tenant"])
    return deleted_response(_container_id(http), "container.deleted")


async def add_container_file(http: Request, stack: Stack) -> Response:
    """From a form, or by the id of an uploaded file."""
    containers, tenant = _require_containers(stack), http.scope["tenant"]
    await containers.get(_container_id(http), tenant=tenant)  # before a body is read for it
    if http.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        async with open_upload(http, containers.max_file_bytes) as upload:
            data = b"".join([piece async for piece in upload.data])
        return model_response(await containers.add_file(_container_id(http), upload.filename, data, tenant=tenant))
    copied = await read_model(http, stack.config.server.max_body_bytes, CopyFile)
    return model_response(await containers.copy_file(_container_id(http), copied.file_id, tenant=tenant))


async def list_container_files(http: Request, stack: Stack) -> Response:
    page = read_query(http, ContainerListParams)
    return page_response(
        await _require_containers(stack).list_files(_container_id(http), page, tenant=http.scope["tenant"])
    )


async def get_container_file(http: Request, stack: Stack) -> Response:
    return model_response(
        await _require_containers(stack).get_file(_container_id(http), _file_id(http), tenant=http.scope["tenant"])
    )


async def delete_container_file(http: Request, stack: Stack) -> Response:
    await _require_containers(stack).delete_file(_container_id(http), _file_id(http), tenant=http.scope["tenant"])
    return deleted_response(_file_id(http), "container.file.deleted")


async def get_container_file_content(http: Request, stack: Stack) -> Response:
    data = await _require_containers(stack).content(_container_id(http), _file_id(http), tenant=http.scope["tenant"])
    return Response(data, headers=_DOWNLOAD_HEADERS, media_type="application/octet-stream")


CONTAINER_ROUTES: Final = (
    ("/containers", "POST", create_container),
    ("/containers", "GET", list_containers),
    ("/containers/{container_id}", "GET", get_container),
    ("/containers/{container_id}", "DELETE", delete_container),
    ("/containers/{container_id}/files", "POST", add_container_file),
    ("/containers/{container_id}/files", "GET", list_container_files),
    ("/containers/{container_id}/files/{file_id}", "GET", get_container_file),
    ("/containers/{container_id}/files/{file_id}", "DELETE", delete_container_file),
    ("/containers/{container_id}/files/{file_id}/content", "GET", get_container_file_content),
)


def _require_containers(stack: Stack) -> Containers:
    found = stack.tool_runtime.containers() if stack.tool_runtime is not None else None
    if found is None:
        message = "This server has no containers: give its config's `tool_runtime` the provider `python`."
        raise Unsupported(message, code="not_configured")
    return found


def _container_id(http: Request) -> str:
    return http.path_params["container_id"]


def _file_id(http: Request) -> str:
    return http.path_params["file_id"]
