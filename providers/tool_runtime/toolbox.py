"""Toolbox: several tool runtimes as one."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from apis.containers import Containers
from apis.errors import ConfigError, ToolFailed
from apis.provider import Provider
from apis.tool_runtime import ToolCall, ToolResult, ToolRuntime, ToolSpec
from apis.workspaces import Workspaces


class Toolbox(ToolRuntime):
    """The tools of all its providers, in their order. A call is run by the provider that has its tool."""

    class Config(Provider.Config):
        """`providers` holds tool_runtime sections by name."""

        providers: dict[str, dict[str, Any]] = Field(min_length=1)

    def __init__(self, config: Config, providers: Mapping[str, ToolRuntime]) -> None:
        self._providers = providers
        self._tools: Sequence[ToolSpec] = ()
        self._runtimes: dict[str, ToolRuntime] = {}

    async def start(self) -> None:
        """Collect the providers' tools. Raises ConfigError when two providers have a tool of one name."""
        tools: list[ToolSpec] = []
        owners: dict[str, str] = {}
        for name, runtime in self._providers.items():
            for tool in runtime.tools():
                owner = owners.setdefault(tool.name, name)
                if owner != name:
                    raise ConfigError(
                        f"providers: '{owner}' and '{name}' both have a tool named '{tool.name}'. Keep one of them."
                    )
                tools.append(tool)
                self._runtimes[tool.name] = runtime
        self._tools = tuple(tools)

    def tools(self) -> Sequence[ToolSpec]:
        return self._tools

    async def call(self, call: ToolCall) -> ToolResult:
        runtime = self._runtimes.get(call.name)
        if runtime is None:
            names = ", ".join(self._runtimes) or "none"
            raise ToolFailed(f"There is no such tool here. There are: {names}."[:1000])
        return await runtime.call(call)

    def containers(self) -> Containers | None:
        """Return the containers of the first provider that has any."""
        return next((own for runtime in self._providers.values() if (own := runtime.containers())), None)

    def workspaces(self) -> Workspaces | None:
        """Return the workspaces of the first provider that has any."""
        return next((own for runtime in self._providers.values() if (own := runtime.workspaces())), None)
