"""/v1/models: the models that the inference lists, in OpenAI's form, or in Anthropic's or Codex's for their clients."""

from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from apis.agents import MODEL_PREFIX
from apis.agents.agents import MAX_PAGE, AgentListParams
from apis.errors import AgentNotFound, ModelNotFound
from apis.inference import Model
from stack.http.answers import value_response
from stack.http.codex_catalog import CLIENT_VERSION, build_catalog
from stack.http.context import HttpContext, Services
from stack.http.messages.dialect import has_version
from stack.http.messages.models import ModelPageParams, build_model_info, build_model_page
from stack.http.request_body import read_query
from stack.http.route import ANY_PROJECT_KEY, Route


async def list_models(http: Request, context: HttpContext, services: Services) -> Response:
    models = await services.stack.inference.models()
    if has_version(http.scope):
        return value_response(build_model_page(models, read_query(http, ModelPageParams)))
    if CLIENT_VERSION in http.query_params:
        return value_response(await build_catalog(services.stack.inference, models))
    agents = await _list_agents(context, services)
    return value_response({"object": "list", "data": [_model_to_fields(model) for model in [*models, *agents]]})


async def get_model(http: Request, context: HttpContext, services: Services) -> Response:
    model_id, inference, agents = http.path_params["model_id"], services.stack.inference, services.stack.agents
    if agents is not None and model_id.startswith(MODEL_PREFIX):
        agent_id = model_id.removeprefix(MODEL_PREFIX)
        try:
            agent = await (await agents.load_definitions()).get(agent_id, tenant=context.tenant)
        except AgentNotFound:
            raise ModelNotFound(model_id) from None
        return value_response(_model_to_fields(_agent_to_model(agent)))
    models = {model.id: model for model in await inference.models()}
    model = models.get(model_id)
    if model is None:  # a request may name it by another name than the list
        model = models.get((await inference.find_names(model_id)).name)
    if model is None:
        raise ModelNotFound(model_id, models)
    if has_version(http.scope):
        return value_response(build_model_info(model, model_id))
    return value_response({**_model_to_fields(model), "id": model_id})


MODEL_ROUTES: Final = (
    Route("GET", "/models", ANY_PROJECT_KEY, list_models),
    Route("GET", "/models/{model_id:path}", ANY_PROJECT_KEY, get_model),
)


async def _list_agents(context: HttpContext, services: Services) -> list[Model]:
    """Return the newest agents of the tenant as models."""
    agents = services.stack.agents
    if agents is None:
        return []
    page = await (await agents.load_definitions()).list(AgentListParams(limit=MAX_PAGE), tenant=context.tenant)
    return [_agent_to_model(agent) for agent in page.data]


def _agent_to_model(agent: dict[str, Any]) -> Model:
    return Model(id=f"{MODEL_PREFIX}{agent['id']}", created=agent["created_at"], owned_by="agents")


def _model_to_fields(model: Model) -> dict[str, Any]:
    fields = {"id": model.id, "object": "model", "created": model.created, "owned_by": model.owned_by}
    return {**fields, "max_model_len": model.context_tokens} if model.context_tokens else fields
