"""The forms of a Responses request's `tool_choice`."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from apis.wire.base import Wire


class ChosenFunction(Wire):
    type: Literal["function"]
    name: str


class ChosenCustomTool(Wire):
    type: Literal["custom"]
    name: str


class ChosenMcpTool(Wire):
    """Any tool of the MCP server, or the one of this name."""

    type: Literal["mcp"]
    server_label: str
    name: str | None = None


class ChosenHostedTool(Wire):
    """A tool that is declared without a name. `browser_search` is a synonym of `web_search`,
    `computer_use` of `computer`."""

    type: Annotated[
        Literal[
            "web_search",
            "web_search_2025_08_26",
            "web_search_preview",
            "web_search_preview_2025_03_11",
            "browser_search",
            "code_interpreter",
            "file_search",
            "shell",
            "apply_patch",
            "image_generation",
            "computer",
            "computer_use",
            "computer_use_preview",
        ],
        AfterValidator(lambda type_: "web_search" if type_ == "browser_search" else type_),
    ]

    def echo(self) -> dict[str, Any]:
        """Return the choice as the response shows it: the SDK's type has one name of the web search."""
        names = {"web_search": "web_search_preview", "web_search_2025_08_26": "web_search_preview"}
        return {"type": names.get(self.type, self.type)}


ChosenTool = Annotated[
    ChosenFunction | ChosenCustomTool | ChosenMcpTool | ChosenHostedTool, Field(discriminator="type")
]


class AllowedTools(Wire):
    """Restricts calls to these of the declared tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[ChosenTool] = Field(min_length=1, max_length=128)


ToolChoiceMode = Literal["none", "auto", "required"]


ToolChoice = Annotated[
    Annotated[ToolChoiceMode, Tag("mode")]
    | Annotated[
        Annotated[
            ChosenFunction | ChosenCustomTool | ChosenMcpTool | ChosenHostedTool | AllowedTools,
            Field(discriminator="type"),
        ],
        Tag("tool"),
    ],
    Discriminator(lambda value: "mode" if isinstance(value, str) else "tool"),
]
