"""/v1/agents/sessions/ID/artifacts: the files that the turns of a session have put out."""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from apis.agents.environments import ArtifactListParams
from stack.http.answers import list_response
from stack.http.context import HttpContext, Services
from stack.http.request_body import read_query
from stack.http.route import Route
from stack.http.routes.agent_beta import delete_route, object_response, read_route, require_agents

_PATH: Final = "/agents/sessions/{session_id}/artifacts"
_ARTIFACT_PATH: Final = f"{_PATH}/{{artifact_id}}"
_DOWNLOAD_HEADERS: Final = {"content-disposition": "attachment"}
"""A file that a program wrote may be any page: no browser may render it as one of this server's."""


async def list_artifacts(http: Request, context: HttpContext, services: Services) -> Response:
    artifacts = require_agents(services).require_environments().artifacts
    params = read_query(http, ArtifactListParams)
    page = await artifacts.list(http.path_params["session_id"], params, tenant=context.tenant)
    return list_response(page.data, has_more=page.has_more)


async def get_artifact(http: Request, context: HttpContext, services: Services) -> Response:
    artifacts = require_agents(services).require_environments().artifacts
    return object_response(await artifacts.get(*_ids(http), tenant=context.tenant))


async def get_artifact_content(http: Request, context: HttpContext, services: Services) -> Response:
    artifacts = require_agents(services).require_environments().artifacts
    content = await artifacts.content(*_ids(http), tenant=context.tenant)
    return StreamingResponse(content, headers=_DOWNLOAD_HEADERS, media_type="application/octet-stream")


async def delete_artifact(http: Request, context: HttpContext, services: Services) -> Response:
    artifacts = require_agents(services).require_environments().artifacts
    return object_response(await artifacts.delete(*_ids(http), tenant=context.tenant))


def _ids(http: Request) -> tuple[str, str]:
    return http.path_params["session_id"], http.path_params["artifact_id"]


ARTIFACT_ROUTES: Final[tuple[Route, ...]] = (
    read_route(_PATH, list_artifacts, ArtifactListParams),
    read_route(_ARTIFACT_PATH, get_artifact),
    read_route(f"{_ARTIFACT_PATH}/content", get_artifact_content),
    delete_route(_ARTIFACT_PATH, delete_artifact),
)
