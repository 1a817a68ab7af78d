"""What the request's tool choice demands of one turn. It holds here, whatever the model makes of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_MAX_NAMED: Final = 16


@dataclass(frozen=True, slots=True)
class Demand:
    """`names` are those that may be called; None where all may. `forced`, one of them is to be."""

    names: frozenset[str] | None = None
    forced: bool = False

    def allows(self, name: str) -> bool:
        """gpt-oss now and then says `functions.` before a name that is in no such namespace."""
        return self.names is None or name in self.names or name.removeprefix("functions.") in self.names

    def refusal(self, name: str) -> str:
        """What the model is told of a call of a tool that may not be called now."""
        why = f"Not run: the tool '{name}' may not be called now."
        return f"{why} {self._call()}" if self.names else f"{why} Answer without calling tools."

    def reminder(self) -> str:
        """What the model is told where it has called nothing."""
        return f"A tool has to be called now. {self._call()}"

    def failure(self) -> str:
        """What the client is told where that was in vain."""
        named = f" of {_listed(sorted(self.names))}" if self.names else ""
        return f"The model made no call{named}, which `tool_choice` demands, though it was asked twice."

    def _call(self) -> str:
        return f"Call {_listed(sorted(self.names))}." if self.names else "Call one of those that you were given."


def _listed(names: Sequence[str]) -> str:
    more = " and others" if len(names) > _MAX_NAMED else ""
    return " or ".join(f"`{name}`" for name in names[:_MAX_NAMED]) + more
