"""/v1/files: upload, list, download and delete."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from apis.documents.files import CreateFile, FileListParams, Files
from stack.http.answers import deleted_response, value_response
from stack.http.context import HttpContext, Services, require_section
from stack.http.forms import open_upload, read_form_fields
from stack.http.route import FILES, Route
from stack.http.routes.calls import ApiCalls


async def create_file(http: Request, context: HttpContext, services: Services) -> Response:
    files = _require_files(services)
    async with open_upload(http, files.max_file_bytes) as upload:
        request = read_form_fields({**upload.fields, "filename": upload.filename}, CreateFile)
        file = await files.create(request, upload.data, tenant=context.tenant)
    return value_response(file)


async def delete_file(http: Request, context: HttpContext, services: Services) -> Response:
    file_id = http.path_params["file_id"]
    await _require_files(services).delete(file_id, tenant=context.tenant)
    if services.stack.vector_stores is not None:
        await services.stack.vector_stores.forget_file(file_id, tenant=context.tenant)
    return deleted_response(file_id, "file")


async def get_file_content(http: Request, context: HttpContext, services: Services) -> Response:
    """Stream the file as an attachment of no known type, so that no browser runs what a stranger uploaded."""
    file_id, tenant = http.path_params["file_id"], context.tenant
    files = _require_files(services)
    file = await files.get(file_id, tenant=tenant)
    content = await _read_first(files.content(file_id, tenant=tenant))
    headers = {
        "content-length": str(file.bytes),
        "content-disposition": f"attachment; filename*=UTF-8''{quote(file.filename, safe='')}",
    }
    return StreamingResponse(content, headers=headers, media_type="application/octet-stream")


def _require_files(services: Services) -> Files:
    return require_section(services.stack.files, "keeps no files", "files")


_files = ApiCalls(_require_files)
list_files = _files.calling("list_files", lambda files: files.list)
get_file = _files.calling("get_file", lambda files: files.get)

FILE_ROUTES: Final = (
    Route("POST", "/files", FILES, create_file, form=CreateFile, stores=True),
    Route("GET", "/files", FILES, list_files, query=FileListParams),
    Route("GET", "/files/{file_id}", FILES, get_file),
    Route("DELETE", "/files/{file_id}", FILES, delete_file),
    Route("GET", "/files/{file_id}/content", FILES, get_file_content),
)


async def _read_first(chunks: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """Return the chunks again once the first one is read: its error still becomes an error response."""
    first_chunk = await anext(chunks, b"")

    async def chain() -> AsyncGenerator[bytes]:
        async with aclosing(chunks):
            yield first_chunk
            async for chunk in chunks:
                yield chunk

    return chain()
