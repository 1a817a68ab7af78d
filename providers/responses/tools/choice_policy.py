"""What the request's tool choice demands of one turn. It holds here, whatever the model makes of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_MAX_LISTED_NAMES: Final = 16


@dataclass(frozen=True, slots=True)
class ToolChoicePolicy:
    """`names` are those that may be called; None where all may. `forced`, one of them is to be."""

    allowed_names: frozenset[str] | None = None
    requires_call: bool = False

    def allows(self, name: str) -> bool:
        """gpt-oss now and then says `functions.` before a name that is in no such namespace."""
        return (
            self.allowed_names is None
            or name in self.allowed_names
            or name.removeprefix("functions.") in self.allowed_names
        )

    def refusal_message(self, name: str) -> str:
        """What the model is told of a call of a tool that may not be called now."""
        why = f"Not run: the tool '{name}' may not be called now."
        return f"{why} {self._call_instruction()}" if self.allowed_names else f"{why} Answer without calling tools."

    def reminder_message(self) -> str:
        """What the model is told where it has called nothing."""
        return f"A tool has to be called now. {self._call_instruction()}"

    def failure_message(self) -> str:
        """What the client is told where that was in vain."""
        named = f" of {_join_names(sorted(self.allowed_names))}" if self.allowed_names else ""
        return f"The model made no call{named}, which `tool_choice` demands, though it was asked twice."

    def _call_instruction(self) -> str:
        return (
            f"Call {_join_names(sorted(self.allowed_names))}."
            if self.allowed_names
            else "Call one of those that you were given."
        )


def _join_names(names: Sequence[str]) -> str:
    more = " and others" if len(names) > _MAX_LISTED_NAMES else ""
    return " or ".join(f"`{name}`" for name in names[:_MAX_LISTED_NAMES]) + more
