"""/v1/files: upload, list, download and delete."""

import re
from typing import Any, Final
from urllib.parse import quote

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from apis.errors import Unsupported
from apis.files import Files, FilesPage, NewFile
from stack.build import Stack
from stack.http.answers import deleted_response, model_response, page_response
from stack.http.parsing import explain
from stack.http.uploads import Upload, read_query, uploaded

_NESTED: Final = re.compile(r"(\w{1,32})\[(\w{1,32})\]")


async def create_file(http: Request, stack: Stack) -> Response:
    files = _files(stack)
    async with uploaded(http, files.max_file_bytes) as upload:
        file = await files.create(_new_file(upload), upload.data, tenant=http.scope["tenant"])
    return model_response(file)


async def list_files(http: Request, stack: Stack) -> Response:
    page = read_query(http, FilesPage)
    return page_response(await _files(stack).list(page, tenant=http.scope["tenant"]))


async def get_file(http: Request, stack: Stack) -> Response:
    return model_response(await _files(stack).get(http.path_params["file_id"], tenant=http.scope["tenant"]))


async def delete_file(http: Request, stack: Stack) -> Response:
    file_id = http.path_params["file_id"]
    await _files(stack).delete(file_id, tenant=http.scope["tenant"])
    if stack.vector_stores is not None:
        await stack.vector_stores.forget_file(file_id, tenant=http.scope["tenant"])
    return deleted_response(file_id, "file")


async def file_content(http: Request, stack: Stack) -> Response:
    """Never as what its name says: a browser is not to run what a stranger uploaded."""
    file_id, tenant = http.path_params["file_id"], http.scope["tenant"]
    file = await _files(stack).get(file_id, tenant=tenant)
    headers = {
        "content-length": str(file.bytes),
        "content-disposition": f"attachment; filename*=UTF-8''{quote(file.filename, safe='')}",
        "x-content-type-options": "nosniff",
    }
    return StreamingResponse(
        _files(stack).content(file_id, tenant=tenant), headers=headers, media_type="application/octet-stream"
    )


FILE_ROUTES: Final = (
    ("/files", "POST", create_file),
    ("/files", "GET", list_files),
    ("/files/{file_id}", "GET", get_file),
    ("/files/{file_id}", "DELETE", delete_file),
    ("/files/{file_id}/content", "GET", file_content),
)


def _files(stack: Stack) -> Files:
    if stack.files is None:
        raise Unsupported("This server keeps no files: its config has no section `files`.", code="not_configured")
    return stack.files


def _new_file(upload: Upload) -> NewFile:
    fields: dict[str, Any] = {"filename": upload.filename}
    for key, value in upload.fields.items():
        if nested := _NESTED.fullmatch(key):
            given: str | int = int(value) if value.isascii() and value.isdigit() and len(value) < 10 else value
            inner = fields.setdefault(nested[1], {})
            if isinstance(inner, dict):
                inner[nested[2]] = given
        elif key != "filename":
            fields[key] = value
    try:
        return NewFile.model_validate(fields)
    except ValidationError as exc:
        raise explain(exc.errors(include_url=False)[0], fields) from None
