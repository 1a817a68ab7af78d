"""/v1/uploads: files in parts, for those that are larger than one body may be."""

from typing import Final

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from apis.uploads import CompleteUpload, CreateUpload
from providers.uploads.kv import StoredUploads
from stack.http.answers import model_response
from stack.http.context import HttpContext, Services, require_section
from stack.http.forms import open_upload
from stack.http.request_body import read_model
from stack.http.route import FILES, Route


async def create_upload(http: Request, context: HttpContext, services: Services) -> Response:
    request = await read_model(http, CreateUpload)
    return model_response(await _require_uploads(services).create(request, tenant=context.tenant))


async def add_upload_part(http: Request, context: HttpContext, services: Services) -> Response:
    uploads = _require_uploads(services)
    async with open_upload(http, uploads.max_part_bytes, "uploads.max_part_bytes", field="data") as upload:
        part = await uploads.add_part(http.path_params["upload_id"], upload.data, tenant=context.tenant)
    return model_response(part)


async def complete_upload(http: Request, context: HttpContext, services: Services) -> Response:
    request = await read_model(http, CompleteUpload)
    upload = await _require_uploads(services).complete(http.path_params["upload_id"], request, tenant=context.tenant)
    return model_response(upload)


async def cancel_upload(http: Request, context: HttpContext, services: Services) -> Response:
    return model_response(await _require_uploads(services).cancel(http.path_params["upload_id"], tenant=context.tenant))


UPLOAD_ROUTES: Final = (
    Route("POST", "/uploads", FILES, create_upload, body=CreateUpload, stores=True),
    Route("POST", "/uploads/{upload_id}/parts", FILES, add_upload_part, form=BaseModel, file_field="data", stores=True),
    Route("POST", "/uploads/{upload_id}/complete", FILES, complete_upload, body=CompleteUpload, stores=True),
    Route("POST", "/uploads/{upload_id}/cancel", FILES, cancel_upload, stores=False),
)


def _require_uploads(services: Services) -> StoredUploads:
    return require_section(services.stack.uploads, "keeps no files", "files")
