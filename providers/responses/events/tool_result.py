"""The record of a finished hosted call: the call and the result that the model received."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from apis.tool_runtime import Source


@dataclass(frozen=True, slots=True)
class ContainerFile:
    """A file that a program wrote into a container."""

    container_id: str
    file_id: str


@dataclass(frozen=True, slots=True)
class ToolResultRecord:
    """A call and its output, word for word. It is stored with the item, so that later turns show the model the same
    text."""

    call_id: str
    name: str
    arguments: str
    output: str
    sources: Mapping[int, Source] = field(default_factory=dict[int, Source])
    """The pages that the output shows, by the numbers that the model cites."""
    custom: bool = False
    """True if `arguments` is raw text, the input of a custom call."""
    state: Any = None
    """A JSON value that the tool reads in later turns of the chain."""
    turn: int = 0
    """The number of the turn that called; the calls of one turn are one message."""
    files: Mapping[str, ContainerFile] = field(default_factory=dict[str, ContainerFile])
    """The files that the program wrote, by the paths that the model may link to."""
