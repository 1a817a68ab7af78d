"""DELETE /v1/organization/projects/{project_id}, an extension: an archived project with all it owns."""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from apis.errors import InvalidRequest
from stack.http.answers import value_response
from stack.http.context import HttpContext, Services
from stack.http.route import ADMINISTRATION, Route
from stack.http.routes.organization.objects import require_directory, require_organization
from stack.retention.erasure import ProjectEraser


async def delete_project(http: Request, _context: HttpContext, services: Services) -> Response:
    project = await require_directory(services).get_project(http.path_params["project_id"])
    erasure = require_organization(services).erasure
    if any(key.tenant == project.id for key in services.stack.config.server.api_keys):
        raise InvalidRequest(
            "A key of `server.api_keys` in the run config belongs to this project: remove it and restart the workers.",
            param="project_id",
            code="project_in_config",
        )
    erased = await ProjectEraser(services.stack, erasure).delete_project(project)
    fields = {"erased_entries": erased.entry_count, "remaining_entries": 0}
    return value_response({"id": project.id, "object": "organization.project.deleted", "deleted": True, **fields})


ERASURE_ROUTES: Final = (Route("DELETE", "/organization/projects/{project_id}", ADMINISTRATION, delete_project),)
