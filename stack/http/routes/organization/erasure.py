"""DELETE /v1/organization/projects/{project_id}, an extension: an archived project with all it owns."""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from stack.http.answers import value_response
from stack.http.context import HttpContext, Route, Services
from stack.http.routes.organization.objects import require_directory
from stack.retention.erasure import ProjectEraser


async def delete_project(http: Request, _context: HttpContext, services: Services) -> Response:
    directory, erasure = require_directory(services), services.stack.accounts.project_erasure()
    assert erasure is not None  # a provider with a directory has it
    project = await directory.get_project(http.path_params["project_id"])
    erased = await ProjectEraser(services.stack, erasure).delete_project(project)
    fields = {"erased_entries": erased.entry_count, "remaining_entries": 0}
    return value_response({"id": project.id, "object": "organization.project.deleted", "deleted": True, **fields})


ERASURE_ROUTES: Final = (Route("DELETE", "/organization/projects/{project_id}", delete_project),)
