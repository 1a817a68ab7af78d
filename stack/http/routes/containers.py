"""/v1/containers: the containers of the code interpreter, and the files in them."""

from typing import Final

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from apis.containers import ContainerListParams, Containers, CopyFile, CreateContainer
from apis.errors import Unsupported
from stack.http.answers import value_response
from stack.http.context import HttpContext, Services
from stack.http.forms import open_upload
from stack.http.request_body import read_model
from stack.http.route import RESPONSES, Route
from stack.http.routes.calls import ApiCalls

_DOWNLOAD_HEADERS: Final = {"content-disposition": "attachment"}
"""A file that a program wrote may be any page: no browser may render it as one of this server's."""


async def create_container(http: Request, context: HttpContext, services: Services) -> Response:
    containers = _require_containers(services)
    request = await read_model(http, CreateContainer)
    container = await containers.create(request, tenant=context.tenant)
    context.created_id = container.id
    return value_response(container)


async def add_container_file(http: Request, context: HttpContext, services: Services) -> Response:
    """Add a file from a form, or the copy of an uploaded file by its id."""
    containers, tenant = _require_containers(services), context.tenant
    await containers.get(http.path_params["container_id"], tenant=tenant)  # before a body is read in vain
    if http.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        async with open_upload(http, containers.max_file_bytes, None) as upload:
            data = b"".join([chunk async for chunk in upload.data])
        return value_response(
            await containers.add_file(http.path_params["container_id"], upload.filename, data, tenant=tenant)
        )
    request = await read_model(http, CopyFile)
    return value_response(await containers.copy_file(http.path_params["container_id"], request.file_id, tenant=tenant))


async def get_container_file_content(http: Request, context: HttpContext, services: Services) -> Response:
    data = await _require_containers(services).content(
        http.path_params["container_id"], http.path_params["file_id"], tenant=context.tenant
    )
    return Response(data, headers=_DOWNLOAD_HEADERS, media_type="application/octet-stream")


def _require_containers(services: Services) -> Containers:
    tool_runtime = services.stack.tool_runtime
    containers = tool_runtime.containers() if tool_runtime is not None else None
    if containers is None:
        message = "This server has no containers: give its config's `tool_runtime` the provider `python`."
        raise Unsupported(message, code="not_configured")
    return containers


_containers = ApiCalls(_require_containers)
list_containers = _containers.calling("list_containers", lambda containers: containers.list)
get_container = _containers.calling("get_container", lambda containers: containers.get)
delete_container = _containers.deleting("delete_container", lambda containers: containers.delete, "container.deleted")
list_container_files = _containers.calling("list_container_files", lambda containers: containers.list_files)
get_container_file = _containers.calling("get_container_file", lambda containers: containers.get_file)
delete_container_file = _containers.deleting(
    "delete_container_file", lambda containers: containers.delete_file, "container.file.deleted"
)

CONTAINER_ROUTES: Final = (
    Route(
        "POST",
        "/containers",
        RESPONSES,
        create_container,
        body=CreateContainer,
        stores=True,
        keyed=True,
        tool="code_interpreter",
    ),
    Route("GET", "/containers", RESPONSES, list_containers, query=ContainerListParams),
    Route("GET", "/containers/{container_id}", RESPONSES, get_container),
    Route("DELETE", "/containers/{container_id}", RESPONSES, delete_container, keyed=True),
    Route(
        "POST",
        "/containers/{container_id}/files",
        RESPONSES,
        add_container_file,
        body=CopyFile,
        form=BaseModel,
        form_or_json=True,
        stores=True,
        tool="code_interpreter",
    ),
    Route("GET", "/containers/{container_id}/files", RESPONSES, list_container_files, query=ContainerListParams),
    Route("GET", "/containers/{container_id}/files/{file_id}", RESPONSES, get_container_file),
    Route("DELETE", "/containers/{container_id}/files/{file_id}", RESPONSES, delete_container_file),
    Route("GET", "/containers/{container_id}/files/{file_id}/content", RESPONSES, get_container_file_content),
)
