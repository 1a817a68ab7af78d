"""/v1/uploads: files in parts, for those that are larger than one body may be."""

from typing import Final

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from apis.uploads import CompleteUpload, CreateUpload
from providers.uploads.kv import StoredUploads
from stack.http.answers import value_response
from stack.http.context import HttpContext, Services, require_section
from stack.http.forms import open_upload
from stack.http.route import FILES, Route
from stack.http.routes.calls import ApiCalls


async def add_upload_part(http: Request, context: HttpContext, services: Services) -> Response:
    uploads = _require_uploads(services)
    async with open_upload(http, uploads.max_part_bytes, "uploads.max_part_bytes", field="data") as upload:
        part = await uploads.add_part(http.path_params["upload_id"], upload.data, tenant=context.tenant)
    return value_response(part)


def _require_uploads(services: Services) -> StoredUploads:
    return require_section(services.stack.uploads, "keeps no files", "files")


_uploads = ApiCalls(_require_uploads)
create_upload = _uploads.calling("create_upload", lambda uploads: uploads.create)
complete_upload = _uploads.calling("complete_upload", lambda uploads: uploads.complete)
cancel_upload = _uploads.calling("cancel_upload", lambda uploads: uploads.cancel)

UPLOAD_ROUTES: Final = (
    Route("POST", "/uploads", FILES, create_upload, body=CreateUpload, stores=True),
    Route("POST", "/uploads/{upload_id}/parts", FILES, add_upload_part, form=BaseModel, file_field="data", stores=True),
    Route("POST", "/uploads/{upload_id}/complete", FILES, complete_upload, body=CompleteUpload, stores=True),
    Route("POST", "/uploads/{upload_id}/cancel", FILES, cancel_upload, stores=False),
)
