"""The arguments of the function `shell`, and its commands as they are read while a model writes them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from apis.chat import FunctionDefinition
from apis.containers import MountedSkill
from apis.errors import ToolFailed
from apis.wire.tools import Skill
from providers.responses.tools.client import Arguments, build_function
from providers.responses.tools.json_strings import decode_string_piece

SHELL_NAME: Final = "shell"
_MAX_COMMANDS: Final = 32
_PROPERTIES: Final = {
    "commands": {"type": "array", "items": {"type": "string"}, "description": "The commands, each for the shell."},
    "timeout_ms": {"type": "integer", "description": "Milliseconds after which a command is stopped."},
    "max_output_length": {"type": "integer", "description": "Characters of output to return of each command."},
}
_PREFIX: Final = re.compile(r'\s*\{\s*"commands"\s*:\s*\[')
_COMPACT_PREFIX: Final = '{"commands":['
_SEPARATOR: Final = re.compile(r"[\s,]*")
_MAX_PREFIX_CHARS: Final = 100


class ShellArguments(Arguments):
    """Arguments of one call. 0 as a time limit means none of its own."""

    commands: Annotated[list[str], Field(min_length=1, max_length=_MAX_COMMANDS)]
    timeout_ms: Annotated[int, Field(ge=0)] | None = None
    max_output_length: Annotated[int, Field(ge=0)] | None = None


def build_shell_function(description: str) -> FunctionDefinition:
    """Return the function as a model is offered it."""
    return build_function(SHELL_NAME, description, _PROPERTIES, ["commands"])


def describe_skills(skills: Sequence[Skill | MountedSkill]) -> str:
    """Return the end of the function's description that names the skills; "" for none."""
    listed = "".join(f"\n- {skill.name} ({skill.path}): {skill.description}" for skill in skills)
    return f"\nSkills, each explained in the SKILL.md of its folder:{listed}" if listed else ""


def build_action(arguments: ShellArguments | None, commands: Sequence[str] = ()) -> dict[str, Any]:
    """Return the `action` of an item: OpenAI's own items always have these three fields. Without arguments it has the
    `commands` that are known so far."""
    if arguments is not None:
        return {"max_output_length": None, "timeout_ms": None, **arguments.model_dump()}
    return {"commands": [*commands], "max_output_length": None, "timeout_ms": None}


@dataclass(frozen=True, slots=True)
class CommandChange:
    """More of the text of a command; it `is_new` with its first change and has ended with the one that `is_last`."""

    index: int
    text: str
    is_new: bool = False
    is_last: bool = False


class CommandsParser:
    """Reads the commands of `{"commands": ["...", ...]}` in chunks. Other arguments are left to be read as a whole."""

    def __init__(self) -> None:
        self._texts: list[list[str]] = []
        self._state: Literal["beginning", "between", "command", "nothing"] = "beginning"
        self._buffer = ""

    @property
    def commands(self) -> list[str]:
        """The commands read so far; the last one may be incomplete."""
        return ["".join(chunks) for chunks in self._texts]

    def feed(self, chunk: str) -> Sequence[CommandChange]:
        """Take the next chunk of the arguments and return the changes of commands in it."""
        if self._state == "nothing":
            return ()
        self._buffer += chunk
        if self._state == "beginning":
            self._detect_format()
        changes: list[CommandChange] = []
        while (change := self._next_change()) is not None:
            changes.append(change)
        return changes

    def finish(self, commands: Sequence[str]) -> Sequence[CommandChange]:
        """Return the changes that lead from the commands read so far to the complete ones. Raises ToolFailed where they
        contradict each other."""
        earlier = self.commands
        if earlier != [*commands[: len(earlier)]]:
            raise ToolFailed(f"The arguments of `{SHELL_NAME}` hold `commands` twice.")
        new = enumerate(commands[len(earlier) :], len(earlier))
        changes = [CommandChange(index, command, is_new=True, is_last=True) for index, command in new]
        self._texts, self._state = [[command] for command in commands], "nothing"
        return changes

    def _detect_format(self) -> None:
        match = _PREFIX.match(self._buffer)
        bare = "".join(self._buffer.split())
        if match:
            self._state = "between"
            self._buffer = self._buffer[match.end() :]
        elif not _COMPACT_PREFIX.startswith(bare) or len(self._buffer) > _MAX_PREFIX_CHARS:
            self._state = "nothing"  # another key precedes `commands`

    def _next_change(self) -> CommandChange | None:
        is_new = False
        if self._state == "between":
            self._buffer = _SEPARATOR.sub("", self._buffer, count=1)
            if not self._buffer:
                return None
            if self._buffer[0] != '"' or len(self._texts) == _MAX_COMMANDS:
                self._state = "nothing"
                return None
            self._buffer, self._state, is_new = self._buffer[1:], "command", True
            self._texts.append([])
        if self._state != "command":
            return None
        try:
            piece = decode_string_piece(self._buffer)
        except ValueError:
            self._state = "nothing"
            return None
        self._buffer = piece.rest
        self._texts[-1].append(piece.text)
        if piece.is_closed:
            self._state = "between"
        if not (is_new or piece.text or piece.is_closed):
            return None
        return CommandChange(len(self._texts) - 1, piece.text, is_new, is_last=piece.is_closed)
