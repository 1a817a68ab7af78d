"""From the shell calls of a response to the commands of the turn that it is a part of: an item for each command."""

from collections.abc import Sequence
from typing import Final

from apis.workspaces import WORKSPACE_FOLDER
from providers.agents.records import Json, OpenCommand
from providers.agents.transition import Transition

_DELTA: Final = "agent.output.command_execution_output.delta"


def begin_commands(transition: Transition, call: Json) -> None:
    """Show the commands of a call, which are about to run."""
    turn = transition.turn
    if call["status"] == "incomplete" or any(each.call_id == call["call_id"] for each in turn.commands):
        return
    for position, command in enumerate(call["action"]["commands"] or [""]):
        item = {
            "id": f"cmd_{call['id'].partition('_')[2]}_{position}",
            "type": "command_execution",
            "command": command,
            "cwd": WORKSPACE_FOLDER,
            "output": None,
            "exit_code": None,
            "duration_ms": None,
            "status": "in_progress",
        }
        index = turn.outputs
        turn.outputs += 1
        number = transition.add_item(item, index)
        transition.open_items[number] = item
        turn.commands.append(OpenCommand(call["call_id"], position, index, number))
    turn.has_commands = turn.has_outputs = True
    if transition.root.state.turn is not None:  # which publishes what its subagents put out
        transition.root.state.turn.has_outputs = True


def begin_outputs(transition: Transition, call_id: str, output_index: int) -> None:
    """Note where the output of a call comes from."""
    for command in transition.turn.commands:
        if command.call_id == call_id:
            command.output_index = output_index


def show_output(transition: Transition, event: Json) -> None:
    """Show what a command has written."""
    command = _find(transition, event)
    if command is not None:
        delta = event["delta"]
        text = (delta.get("stdout") or "") + (delta.get("stderr") or "")
        item_id = transition.open_items[command.number]["id"]
        ids = {"session_id": transition.ref.id, "turn_id": transition.turn.id, "item_id": item_id}
        transition.emit(_DELTA, **ids, output_index=command.index, delta=text)


def end_output(transition: Transition, event: Json) -> None:
    """Show the end of a command."""
    command = _find(transition, event)
    if command is not None and event["output"]:
        _end(transition, command, event["output"][0])


def end_commands(transition: Transition, result: Json) -> None:
    """Show the ends of the commands of a call that have not been shown."""
    for command in [each for each in transition.turn.commands if each.call_id == result["call_id"]]:
        outputs = result["output"]
        output = outputs[command.position] if command.position < len(outputs) else None
        _end(transition, command, output, is_whole=result["status"] == "completed")


def close_commands(transition: Transition, items: Sequence[Json]) -> None:
    """Show the ends of all commands of a response that has ended with these items."""
    for item in items:
        if item["type"] == "shell_call_output":
            end_commands(transition, item)
    for command in list(transition.turn.commands):
        _end(transition, command, None)


def _find(transition: Transition, event: Json) -> OpenCommand | None:
    place = (event["output_index"], event["command_index"])
    commands = transition.turn.commands
    return next((each for each in commands if (each.output_index, each.position) == place), None)


def _end(transition: Transition, command: OpenCommand, output: Json | None, *, is_whole: bool = True) -> None:
    turn = transition.turn
    turn.commands.remove(command)
    item = transition.open_items.pop(command.number)
    code = output["outcome"].get("exit_code") if output is not None else None
    status = "completed" if code == 0 else "failed" if output is not None and is_whole else "incomplete"
    text = None if output is None else output["stdout"] + output["stderr"]
    duration_ms = None if output is None else output.get("duration_ms")
    item.update(turn_id=turn.id, output=text, exit_code=code, duration_ms=duration_ms, status=status)
    transition.put_item(command.number, item)
    transition.emit_of_turn("item.done", item=item, output_index=command.index)
