"""/v1/stack/models, an extension of OpenAI's API: models that the server fetches to its machine, and serves.

A server without keys lets everybody who reaches it fetch; one with keys, its administrators.
"""

from dataclasses import asdict
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from apis.errors import Unsupported
from apis.inference import Inference
from apis.model_pulls import ModelInstaller, ModelPull, PullModel
from stack.http.answers import value_response
from stack.http.context import HttpContext, Services
from stack.http.request_body import read_model
from stack.http.route import ADMINISTRATION, Route


def may_install(context: HttpContext, services: Services) -> bool:
    """Return True if the server fetches models, and lets the caller ask for it."""
    return context.is_administrator and _find_installer(services) is not None


async def list_local_models(_http: Request, _context: HttpContext, services: Services) -> Response:
    installer = _require_installer(services)
    library = asdict(await installer.list_library())
    return value_response({"object": "stack.models", **library, "pull": _show(await installer.find_pull())})


async def pull_model(http: Request, _context: HttpContext, services: Services) -> Response:
    request = await read_model(http, PullModel)
    return value_response(_show(await _require_installer(services).begin_pull(request.name)))


async def get_pull(_http: Request, _context: HttpContext, services: Services) -> Response:
    return value_response(_show(await _require_installer(services).find_pull()))


async def cancel_pull(_http: Request, _context: HttpContext, services: Services) -> Response:
    return value_response(_show(await _require_installer(services).cancel_pull()))


LOCAL_MODEL_ROUTES: Final = (
    Route("GET", "/stack/models", ADMINISTRATION, list_local_models),
    Route("POST", "/stack/models/pull", ADMINISTRATION, pull_model, body=PullModel, stores=False),
    Route("GET", "/stack/models/pull", ADMINISTRATION, get_pull),
    Route("DELETE", "/stack/models/pull", ADMINISTRATION, cancel_pull),
)


def _find_installer(services: Services) -> ModelInstaller | None:
    """Return that of the first provider that fetches models."""
    inference = (each for each in services.stack.providers_by_path.values() if isinstance(each, Inference))
    return next((installer for each in inference if (installer := each.installer()) is not None), None)


def _require_installer(services: Services) -> ModelInstaller:
    """Return the installer. Raises Unsupported where there is none."""
    installer = _find_installer(services)
    if installer is None:
        raise Unsupported(
            "This server fetches no models: its run config has no `llama_cpp` with `installs_models: true`.",
            code="not_configured",
        )
    return installer


def _show(pull: ModelPull | None) -> dict[str, Any] | None:
    return None if pull is None else {"object": "stack.model_pull", **asdict(pull)}
