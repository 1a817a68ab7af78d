"""Commands of a shell call as they are read while a model writes them."""

import pytest

from apis.errors import ToolFailed
from providers.responses.tools.shell.arguments import CommandChange, CommandsParser

ARGUMENTS = '{ "commands" : [ "echo \\"a\\" \\ud83d\\ude00\\n" , "", "ls | wc" ] , "timeout_ms": 5 }'
COMMANDS = ['echo "a" \U0001f600\n', "", "ls | wc"]


def apply(changes: list[CommandChange]) -> list[str]:
    """The commands that the changes add up to; each change must be legal."""
    commands: list[str] = []
    ended: set[int] = set()
    for change in changes:
        assert change.is_new == (change.index == len(commands))
        assert change.index not in ended
        if change.is_new:
            commands.append("")
        commands[change.index] += change.text
        if change.is_last:
            ended.add(change.index)
    assert len(ended) == len(commands)
    return commands


@pytest.mark.parametrize("size", range(1, 12))
def test_changes_add_up_to_the_commands_however_the_arguments_are_cut(size: int) -> None:
    parser = CommandsParser()
    chunks = [ARGUMENTS[start : start + size] for start in range(0, len(ARGUMENTS), size)]
    changes = [change for chunk in chunks for change in parser.feed(chunk)]
    assert apply([*changes, *parser.finish(COMMANDS)]) == COMMANDS == parser.commands
    assert changes


def test_commands_after_other_arguments_are_read_at_the_end() -> None:
    parser = CommandsParser()
    assert list(parser.feed('{"timeout_ms": 5, "commands": ["ls"]}')) == []
    assert apply([*parser.finish(["ls"])]) == ["ls"]


def test_commands_that_change_their_mind_are_refused() -> None:
    parser = CommandsParser()
    parser.feed('{"commands": ["rm -r"], "commands": ["ls"]}')
    with pytest.raises(ToolFailed, match="twice"):
        parser.finish(["ls"])


def test_no_more_commands_are_shown_than_a_call_may_have() -> None:
    parser = CommandsParser()
    parser.feed('{"commands": [' + '"a",' * 1000)
    assert len(parser.commands) == 32


@pytest.mark.parametrize("broken", ['{"commands": ["a\\x"', '{"commands": [5, "a"]', '{"commands": {"a": 1}', "[1]"])
def test_text_that_is_no_list_of_commands_shows_none(broken: str) -> None:
    parser = CommandsParser()
    parser.feed(broken)
    assert "".join(parser.commands) == ""
