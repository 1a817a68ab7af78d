"""Told: a finished hosted call as the model knows it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from apis.tool_runtime import Source


@dataclass(frozen=True, slots=True)
class ContainerFile:
    """A file of a container, which a program wrote."""

    container_id: str
    file_id: str


@dataclass(frozen=True, slots=True)
class ToolResultRecord:
    """What the model called and what it was told. Kept beside the item, so that later turns can show the model the
    same again."""

    call_id: str
    name: str
    arguments: str
    output: str
    sources: Mapping[int, Source] = field(default_factory=dict[int, Source])
    """The pages it showed, by the numbers that the model may cite them by."""
    custom: bool = False
    """`arguments` is raw text, the input of a custom call."""
    state: Any = None
    """JSON that the tool wants to find again in later turns of the chain."""
    turn: int = 0
    """Which of the response's turns called; calls of one turn are one message."""
    files: Mapping[str, ContainerFile] = field(default_factory=dict[str, ContainerFile])
    """What its program wrote, by the paths that the model may link to."""
