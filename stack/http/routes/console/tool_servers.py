"""/v1/stack/tool_servers, an extension of OpenAI's API: whether an MCP server of the run config answers, and with which
tools."""

from typing import Any, Final

from openai.types.responses.mcp_tool_call_error import HTTPError
from starlette.requests import Request
from starlette.responses import Response

from apis.errors import NotFound
from apis.tool_servers import ToolServerFailed, ToolServers
from apis.wire.tools import McpTool
from stack.http.answers import value_response
from stack.http.context import HttpContext, Services, require_section
from stack.http.route import RESPONSES, Route

_REFUSED: Final = (401, 403)
"""Statuses of a server that wants credentials, or other ones."""


async def get_tool_server(http: Request, context: HttpContext, services: Services) -> Response:
    label: str = http.path_params["label"]
    provider = services.stack.providers_by_path.get("tool_servers")
    servers = require_section(
        provider if isinstance(provider, ToolServers) else None, "has no MCP servers", "tool_servers"
    )
    if label not in servers.known_labels(context.tenant):
        raise NotFound(f"No MCP server '{label}' is in the run config.")
    return value_response({"object": "stack.tool_server", "label": label, **await _inspect(servers, label, context)})


TOOL_SERVER_ROUTES: Final = (Route("GET", "/stack/tool_servers/{label}", RESPONSES, get_tool_server),)


async def _inspect(servers: ToolServers, label: str, context: HttpContext) -> dict[str, Any]:
    """Return the state of a server, which is contacted, and its tools or the reason why there are none."""
    declaration = McpTool.model_validate({"type": "mcp", "server_label": label})
    try:
        tools = await servers.list_tools(declaration, tenant=context.tenant)
    except ToolServerFailed as exc:
        is_refused = isinstance(exc.error, HTTPError) and exc.error.code in _REFUSED
        reason = exc.message
        if is_refused:
            reason += f" Put its credentials into `tool_servers.servers.{label}.headers` of the run config."
        return {"state": "needs_sign_in" if is_refused else "failed", "reason": reason, "tools": []}
    return {"state": "ready", "reason": None, "tools": [tool.name for tool in tools]}
