"""ProjectSettings: the models, hosted tools and service tiers that a project may use, and how long its data lives."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

from pydantic import Field

from apis.errors import PermissionDenied
from apis.inference import ModelNames
from apis.wire.base import Wire
from apis.wire.tools import TOOL_TYPES

PermissionMode = Literal["allow_list", "deny_list"]
HostedTool = Literal["code_interpreter", "file_search", "image_generation", "mcp", "web_search"]
HOSTED_TOOLS: Final[tuple[HostedTool, ...]] = get_args(HostedTool)
"""The hosted tools that a project may be closed to, by their names in the API."""
OptionalTier = Literal["flex", "fast", "ultrafast"]
RetentionType = Literal["organization_default", "none", "zero_data_retention"]
"""`zero_data_retention` stores nothing; the others store for as long as the run config says, or `retention_days`."""
_MAX_MODELS: Final = 1000
_TIER_NAMES: Final[Mapping[str, str]] = {"priority": "fast"}
"""Values of `service_tier` by the tier that they are another name of."""
_STANDARD_TIERS: Final = frozenset({"auto", "default", "scale"})
_HOSTED_TOOL_TYPES: Final[Mapping[str, HostedTool]] = {
    name: tool for each in TOOL_TYPES for name in each.type_names() if (tool := each.type_names()[0]) in HOSTED_TOOLS
}
"""The tool that each type of a declaration stands for, in all its spellings."""


@dataclass(frozen=True, slots=True)
class ProjectSettings:
    """Settings of one project; the defaults forbid nothing. `enabled_tiers` is None where all may be used."""

    model_mode: PermissionMode = "deny_list"
    model_ids: tuple[str, ...] = ()
    disabled_tools: tuple[HostedTool, ...] = ()
    default_tier: Literal["standard", "fast"] = "standard"
    enabled_tiers: tuple[OptionalTier, ...] | None = None
    retention_type: RetentionType = "organization_default"
    retention_days: float | None = None

    @property
    def are_open(self) -> bool:
        """True if they forbid no model, tool or tier, and let everything be stored."""
        return (
            not (self.model_ids or self.disabled_tools)
            and self.model_mode == "deny_list"
            and self.enabled_tiers is None
            and not self.stores_nothing
        )

    @property
    def stores_nothing(self) -> bool:
        """True if no content of the project may be stored."""
        return self.retention_type == "zero_data_retention"

    def require_model(self, model: ModelNames | None) -> None:
        """Raise PermissionDenied if the project may not use the model under any of its names, or has to name one."""
        if not self.model_ids and self.model_mode == "deny_list":
            return
        if model is None:
            is_allowed = False
        elif self.model_mode == "allow_list":
            is_allowed = not model.names.isdisjoint(self.model_ids)
        else:
            is_allowed = (model.names | model.shared).isdisjoint(self.model_ids)
        if not is_allowed:
            problem = "has to name its model" if model is None else f"may not use the model '{model.name[:256]}'"
            raise PermissionDenied(f"A request of this project {problem}.", param="model", code="model_not_allowed")

    def require_tool(self, tool_type: str, environment: str | None, param: str | None) -> None:
        """Raise PermissionDenied if the project is closed to the tool. A `shell` in a container runs code as the code
        interpreter does; `environment` is the type of that of the tool."""
        if self.disabled_tools and find_hosted_tool(tool_type, environment) in self.disabled_tools:
            raise PermissionDenied(
                f"This project may not use the tool '{tool_type[:64]}'.", param=param, code="tool_not_allowed"
            )

    def require_tier(self, tier: str | None) -> None:
        """Raise PermissionDenied if the project may not use the service tier."""
        name = _TIER_NAMES.get(tier or "auto", tier or "auto")
        if self.enabled_tiers is not None and name not in _STANDARD_TIERS and name not in self.enabled_tiers:
            raise PermissionDenied(
                f"This project may not use the service tier '{tier}'.",
                param="service_tier",
                code="service_tier_not_allowed",
            )


def find_hosted_tool(tool_type: str, environment: str | None = None) -> HostedTool | None:
    """Return the hosted tool that a declaration of this type is, with the type of its environment where it has one;
    None for a tool that runs where the client is. Code runs in a container by `shell` as by `code_interpreter`."""
    if tool_type == "shell" and environment not in (None, "local"):
        return "code_interpreter"
    return _HOSTED_TOOL_TYPES.get(tool_type)


OPEN_SETTINGS: Final = ProjectSettings()
"""Settings of a project for which nothing is set."""


class UpdateModelPermissions(Wire):
    """Body that sets the models that a project may use, or may not use."""

    mode: PermissionMode
    model_ids: list[str] = Field(max_length=_MAX_MODELS)


class ToolPermission(Wire):
    """The permission of one hosted tool."""

    enabled: bool


class UpdateHostedToolPermissions(Wire):
    """Body that opens or closes hosted tools to a project; absent ones stay as they are."""

    code_interpreter: ToolPermission | None = None
    file_search: ToolPermission | None = None
    image_generation: ToolPermission | None = None
    mcp: ToolPermission | None = None
    web_search: ToolPermission | None = None


class UpdateServiceTierSettings(Wire):
    """Body that sets the service tiers of a project; absent fields stay as they are."""

    default: Literal["standard", "fast"] | None = None
    enabled_tiers: Literal["all"] | list[OptionalTier] | None = None


class UpdateDataRetention(Wire):
    """Body that sets how long the data of a project lives. `retention_days`, an extension, is from its creation on;
    null means for as long as the run config says."""

    retention_type: RetentionType
    retention_days: float | None = Field(default=None, gt=0, le=36_500)
