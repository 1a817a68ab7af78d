"""The rules that the request's tool choice sets for one turn; the loop enforces them on the model's calls."""

from collections.abc import Sequence
from typing import Final

import msgspec

_MAX_LISTED_NAMES: Final = 16


class ToolChoicePolicy(msgspec.Struct, frozen=True):
    """`allowed_names` are the names that may be called, or None for all; `requires_call` demands a call of one."""

    allowed_names: frozenset[str] | None = None
    requires_call: bool = False

    def allows(self, name: str) -> bool:
        """Return True if the tool may be called. gpt-oss sometimes writes `functions.` before a plain name."""
        return (
            self.allowed_names is None
            or name in self.allowed_names
            or name.removeprefix("functions.") in self.allowed_names
        )

    def refusal_message(self, name: str) -> str:
        """Return the model's output of a call of a tool that may not be called now."""
        instruction = self._call_instruction() if self.allowed_names else "Answer without calling tools."
        return f"Not run: the tool '{name}' may not be called now. {instruction}"

    def reminder_message(self) -> str:
        """Return the message to a model that has called nothing."""
        return f"A tool has to be called now. {self._call_instruction()}"

    def failure_message(self) -> str:
        """Return the client's error message after the model ignored the reminder."""
        choice = f" of {_join_names(sorted(self.allowed_names))}" if self.allowed_names else ""
        return f"The model made no call{choice}, which `tool_choice` demands, though it was asked twice."

    def _call_instruction(self) -> str:
        return (
            f"Call {_join_names(sorted(self.allowed_names))}."
            if self.allowed_names
            else "Call one of those that you were given."
        )


def _join_names(names: Sequence[str]) -> str:
    suffix = " and others" if len(names) > _MAX_LISTED_NAMES else ""
    return " or ".join(f"`{name}`" for name in names[:_MAX_LISTED_NAMES]) + suffix
