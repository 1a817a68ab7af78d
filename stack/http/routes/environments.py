"""/v1/agents/environments and /v1/agents/sessions/ID/artifacts: environments of sessions, their templates, the files
in them, and the files that the turns of a session have put out."""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from apis.agents.agents import AgentListParams
from apis.agents.environments import (
    ArtifactListParams,
    CreateEnvironment,
    CreateEnvironmentFile,
    CreateTemplate,
    EnvironmentFileListParams,
    EnvironmentListParams,
    UpdateTemplate,
)
from providers.common.permissions import require_request
from stack.http.answers import value_response
from stack.http.context import HttpContext, Services
from stack.http.request_body import read_model, read_query
from stack.http.route import Route
from stack.http.routes.agent_beta import (
    CREATED,
    delete_route,
    read_request_key,
    read_route,
    require_agents,
    write_route,
)
from stack.http.routes.calls import ApiCalls

_ENVIRONMENT_PATH: Final = "/agents/environments/{environment_id}"
_TEMPLATES_PATH: Final = "/agents/environments/templates"
_TEMPLATE_PATH: Final = f"{_TEMPLATES_PATH}/{{template_id}}"
_FILES_PATH: Final = f"{_ENVIRONMENT_PATH}/files"
_ARTIFACTS_PATH: Final = "/agents/sessions/{session_id}/artifacts"
_ARTIFACT_PATH: Final = f"{_ARTIFACTS_PATH}/{{artifact_id}}"
_DOWNLOAD_HEADERS: Final = {"content-disposition": "attachment"}
"""A file that a program wrote may be any page: no browser may render it as one of this server's."""


async def create_environment(http: Request, context: HttpContext, services: Services) -> Response:
    request = await read_model(http, CreateEnvironment)
    require_request(context.caller, request, None)
    environments = require_agents(services).require_environments()
    key = read_request_key(http, request)
    return value_response(await environments.create(request, tenant=context.tenant, key=key), CREATED)


async def list_environment_files(http: Request, context: HttpContext, services: Services) -> Response:
    params = read_query(http, EnvironmentFileListParams)
    environments = require_agents(services).require_environments()
    environment_id: str = http.path_params["environment_id"]
    files, next_page = await environments.list_files(environment_id, params, tenant=context.tenant)
    return value_response({"object": "list", "data": [*files], "has_more": next_page is not None, "next": next_page})


async def get_artifact_content(http: Request, context: HttpContext, services: Services) -> Response:
    artifacts = require_agents(services).require_environments().artifacts
    session_id, artifact_id = http.path_params["session_id"], http.path_params["artifact_id"]
    content = await artifacts.content(session_id, artifact_id, tenant=context.tenant)
    return StreamingResponse(content, headers=_DOWNLOAD_HEADERS, media_type="application/octet-stream")


_environments = ApiCalls(lambda services: require_agents(services).require_environments())
_templates = ApiCalls(lambda services: require_agents(services).require_environments().templates)
_artifacts = ApiCalls(lambda services: require_agents(services).require_environments().artifacts)
list_environments = _environments.calling("list_environments", lambda environments: environments.list)
get_environment = _environments.calling("get_environment", lambda environments: environments.get)
add_environment_file = _environments.calling(
    "add_environment_file", lambda environments: environments.add_file, CREATED
)
create_template = _templates.calling("create_template", lambda templates: templates.create, CREATED)
list_templates = _templates.calling("list_templates", lambda templates: templates.list)
get_template = _templates.calling("get_template", lambda templates: templates.get)
update_template = _templates.calling("update_template", lambda templates: templates.update)
delete_template = _templates.calling("delete_template", lambda templates: templates.delete)
list_artifacts = _artifacts.calling("list_artifacts", lambda artifacts: artifacts.list)
get_artifact = _artifacts.calling("get_artifact", lambda artifacts: artifacts.get)
delete_artifact = _artifacts.calling("delete_artifact", lambda artifacts: artifacts.delete)

ENVIRONMENT_ROUTES: Final[tuple[Route, ...]] = (
    write_route("/agents/environments", create_environment, CreateEnvironment, tool="code_interpreter"),
    read_route("/agents/environments", list_environments, EnvironmentListParams),
    write_route(_TEMPLATES_PATH, create_template, CreateTemplate, tool="code_interpreter"),
    read_route(_TEMPLATES_PATH, list_templates, AgentListParams),
    read_route(_TEMPLATE_PATH, get_template),
    write_route(_TEMPLATE_PATH, update_template, UpdateTemplate, tool="code_interpreter"),
    delete_route(_TEMPLATE_PATH, delete_template),
    read_route(_ENVIRONMENT_PATH, get_environment),
    write_route(_FILES_PATH, add_environment_file, CreateEnvironmentFile, tool="code_interpreter"),
    read_route(_FILES_PATH, list_environment_files, EnvironmentFileListParams),
    read_route(_ARTIFACTS_PATH, list_artifacts, ArtifactListParams),
    read_route(_ARTIFACT_PATH, get_artifact),
    read_route(f"{_ARTIFACT_PATH}/content", get_artifact_content),
    delete_route(_ARTIFACT_PATH, delete_artifact),
)
