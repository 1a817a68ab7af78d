"""Closes the shell calls in the log of a response whose worker stopped. Pure functions on JSON."""

from typing import Any, Final

JsonObject = dict[str, Any]

_COMMAND: Final = "response.shell_call_command"
_OUTPUT: Final = "response.shell_call_output_content"
_KILLED: Final = {"type": "exit", "exit_code": 137}
"""Outcome of commands whose worker stopped: their container ends all that ran for it."""


class OpenCommands:
    """The commands of a logged item that have begun and not ended, by their index: each has its text, or its output."""

    def __init__(self) -> None:
        self._texts: dict[int, dict[str, str]] = {}

    def apply(self, item: JsonObject, event_type: str, event: JsonObject) -> None:
        """Take an event of the item; one of another kind does nothing. The item gets what has ended."""
        stem, _, suffix = event_type.rpartition(".")
        if stem not in (_COMMAND, _OUTPUT):
            return
        index: int = event["command_index"]
        if suffix == "done":
            self._texts.pop(index, None)
            if stem == _COMMAND:
                item["action"]["commands"].append(event["command"])
            else:
                item["output"] += event["output"]
        else:
            pieces: dict[str, str | None] = (
                event["delta"] if stem == _OUTPUT else {"command": event.get("delta") or event.get("command")}
            )
            texts = self._texts.setdefault(index, {})
            for name, text in pieces.items():
                texts[name] = texts.get(name, "") + (text or "")

    def close(self, item: JsonObject, output_index: int) -> list[JsonObject]:
        """Return the events that end what is open, without their numbers, and put it into the item."""
        events: list[JsonObject] = []
        for index, texts in sorted(self._texts.items()):
            place = {"output_index": output_index, "command_index": index}
            if item["type"] == "shell_call":
                event: JsonObject = {"type": f"{_COMMAND}.done", **place, "command": texts.get("command", "")}
            else:
                output = {"stdout": texts.get("stdout", ""), "stderr": texts.get("stderr", ""), "outcome": _KILLED}
                event = {"type": f"{_OUTPUT}.done", "item_id": item["id"], **place, "output": [output]}
            events.append(event)
        for event in events:
            self.apply(item, event["type"], event)
        return events
