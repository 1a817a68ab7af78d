"""Parts that a guest reports of its shell commands: a program may have written them."""

from dataclasses import replace
from typing import Any

import pytest

from apis.confinement.commands import CommandEvent, ShellCommand
from providers.tool_runtime.python.commands import CommandParts, bind_command, parse_written_files

Json = dict[str, Any]
END: Json = {"part": 0, "out": 0, "exit_code": 0}


def parts_of(*commands: ShellCommand) -> tuple[CommandParts, list[CommandEvent]]:
    events: list[CommandEvent] = []
    bound = [bind_command(command, max_timeout_s=5, max_chars=100) for command in commands]
    return CommandParts(bound, events.append), events


@pytest.mark.parametrize(
    "feeds",
    [
        [({"part": 2, "out": 1}, b"a")],
        [({"part": -1, "out": 1}, b"a")],
        [({"part": "0", "out": 1}, b"a")],
        [({"part": 0}, b"a")],
        [({"part": 0, "out": None}, b"a")],
        [(END, b""), ({"part": 0, "out": 1}, b"a")],
        [(END, b""), (END, b"")],
        [({"part": 0, "out": 200}, b"a" * 200), ({"part": 0, "out": 101}, b"a" * 101)],
        [({"part": 0, "out": 0}, b"a" * 301)],
        [({"part": 0, "out": 0}, b"")] * 2001,
    ],
)
def test_parts_that_no_running_command_can_have_are_refused(feeds: list[tuple[Json, bytes]]) -> None:
    parts, _ = parts_of(ShellCommand("ls"), ShellCommand("ls"))
    *legal, (part, payload) = feeds
    for each in legal:
        parts.feed(*each)
    with pytest.raises(ValueError, match=r"limit|running"):
        parts.feed(part, payload)


@pytest.mark.parametrize(
    ("code", "expected"), [(0, 0), (255, 255), (256, None), (-1, None), (None, None), ("0", None), (1 << 70, None)]
)
def test_exit_codes_are_those_of_a_shell(code: Any, expected: int | None) -> None:
    parts, events = parts_of(ShellCommand("ls"))
    parts.feed({"part": 0, "out": 1}, b"a")
    parts.feed({"part": 0, "out": 1, "exit_code": code}, b"ab\xff\x1b[31m\x00")
    assert [event.duration_ms is not None for event in events] == [False, True]
    assert replace(events[1], duration_ms=None) == CommandEvent(0, "a", "b\ufffd\ufffd", True, expected)


def test_commands_that_have_not_ended_end_with_their_session() -> None:
    parts, events = parts_of(ShellCommand("ls"), ShellCommand("ls"))
    parts.feed(END, b"")
    parts.end_all("gone", is_timed_out=True)
    parts.end_all("gone", is_timed_out=False)
    assert len(events) == 2
    assert events[1].duration_ms is not None
    assert replace(events[1], duration_ms=None) == CommandEvent(1, "", "[gone]\n", has_ended=True)


def test_limits_are_the_smaller_ones() -> None:
    bound = bind_command(ShellCommand("ls", timeout_s=9, max_output_chars=7), max_timeout_s=5, max_chars=100)
    assert (bound.timeout_s, bound.max_chars) == (5, 7)
    bound = bind_command(ShellCommand("ls", max_output_chars=0), max_timeout_s=5, max_chars=100)
    assert (bound.timeout_s, bound.max_chars) == (5, 0)


@pytest.mark.parametrize("names", [["../a"], ["/etc/passwd"], ["a\n"], ["a", 5], [None], "a"])
def test_written_files_with_impossible_names_are_left_out(names: Any) -> None:
    reply = {"files": [{"name": name, "size": 1} for name in names]}
    assert parse_written_files(reply) == [name for name in names if name == "a"]
    assert parse_written_files({"files": [{"name": f"f{number}", "size": 1} for number in range(500)]})[100:] == []
