"""The texts of shell calls in a stream: what was streamed of commands and of their output is what their items hold."""

from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]


@dataclass
class ShellTexts:
    """The texts of one item's events so far. Methods return the fault that they find, or an empty text."""

    streamed: dict[int, Json] = field(default_factory=dict[int, Json])
    done: dict[int, Any] = field(default_factory=dict[int, Any])

    def feed(self, event: Json, step: str) -> str:
        """Take a `shell_call_command` or `shell_call_output_content` event, by the last word of its type."""
        index = event["command_index"]
        if index in self.done:
            return f"command {index} has ended"
        if step == "added":
            self.streamed[index] = {"command": event["command"]}
            return (
                "" if event["command"] == "" and index == len(self.streamed) - 1 else "it is not added next and empty"
            )
        texts = self.streamed.setdefault(index, {})
        if step == "delta":
            pieces: dict[str, str] = (
                event["delta"] if event["type"].endswith("content.delta") else {"command": event["delta"]}
            )
            for name, text in pieces.items():
                texts[name] = texts.get(name, "") + text
            return "" if any(pieces.values()) else "the delta is empty"
        if "command" in event:
            self.done[index] = event["command"]
            return "" if event["command"] == texts.get("command") else f"the deltas make {texts.get('command')!r}"
        self.done[index] = event["output"]
        (output,) = event["output"]
        wrong = [name for name in ("stdout", "stderr") if output[name] != texts.get(name, "")]
        return f"the deltas make {texts!r}" if wrong else ""

    def compare(self, item: Json) -> str:
        """Compare with the finished item."""
        ended = [self.done[index] for index in sorted(self.done)]
        if item["type"] == "shell_call":
            return "" if item["action"]["commands"] == ended else f"the commands were {ended}"
        outputs = [output for each in ended for output in each]
        return "" if item["output"] == outputs else f"the outputs were {outputs}"
