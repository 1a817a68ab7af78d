"""The MCP servers of a message as those of a response."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from apis.errors import InvalidRequest
from apis.messages import McpServerDefinition, McpToolConfig, McpToolConfiguration, MessageTool

TOOLSET: Final = "mcp_toolset"
Tool = dict[str, Any]


class DeclaredServers:
    """The servers that a request declares, each of which a toolset may choose tools of."""

    def __init__(self, servers: Sequence[McpServerDefinition]) -> None:
        self._servers: dict[str, McpServerDefinition] = {}
        self._chosen: set[str] = set()
        for index, server in enumerate(servers):
            if server.name in self._servers:
                raise InvalidRequest(
                    f"Two MCP servers have the name '{server.name}'.", param=f"mcp_servers[{index}].name"
                )
            self._servers[server.name] = server

    def convert_toolset(self, tool: MessageTool, index: int, *, is_searched: bool) -> Sequence[Tool]:
        """Return the tool of a response for a toolset; none for one that is switched off. One that is deferred waits
        for a search for tools, where there is one. Raises InvalidRequest for an unknown server."""
        param = f"tools[{index}].mcp_server_name"
        if tool.mcp_server_name is None:
            raise InvalidRequest(
                f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
            )
        server = self._servers.get(tool.mcp_server_name)
        if server is None:
            raise InvalidRequest(
                f"'{param}': no entry of 'mcp_servers' has the name '{tool.mcp_server_name}'.", param=param
            )
        if server.name in self._chosen:
            raise InvalidRequest(f"'{param}': two toolsets name the server '{server.name}'.", param=param)
        self._chosen.add(server.name)
        configs, default = tool.configs or {}, tool.default_config or McpToolConfig()
        deferral = {"defer_loading": True} if is_searched and default.defer_loading else {}
        if default.enabled is not False:
            excluded = [name for name, config in configs.items() if config.enabled is False]
            return [{**_build_tool(server, _find_names(server.tool_configuration), excluded), **deferral}]
        names = [name for name, config in configs.items() if config.enabled]
        return [{**_build_tool(server, names), **deferral}] if names else []

    def convert_rest(self) -> Sequence[Tool]:
        """Return the tools of the servers without a toolset, which older clients declare so."""
        rest = [server for name, server in self._servers.items() if name not in self._chosen]
        settings = [(server, server.tool_configuration or McpToolConfiguration()) for server in rest]
        return [_build_tool(server, own.allowed_tools) for server, own in settings if own.enabled is not False]


def _find_names(configuration: McpToolConfiguration | None) -> Sequence[str] | None:
    return configuration.allowed_tools if configuration else None


def _build_tool(server: McpServerDefinition, names: Sequence[str] | None, excluded_names: Sequence[str] = ()) -> Tool:
    fields: Mapping[str, Any] = {
        "server_url": server.url,
        "authorization": server.authorization_token,
        "allowed_tools": {"tool_names": names, "excluded_names": excluded_names} if excluded_names else names,
    }
    options = {name: value for name, value in fields.items() if value is not None}
    return {"type": "mcp", "server_label": server.name, "require_approval": "never", **options}
