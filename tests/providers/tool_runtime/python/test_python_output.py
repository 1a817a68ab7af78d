"""The output of programs becomes bounded, readable text; and the filter of system calls is a program of its own."""

import time

import pytest

from apis.confinement.seccomp import sandbox_filter
from providers.tool_runtime.python.output import ProgramOutput, render_terminal_text


def test_output_keeps_both_ends_and_says_what_lies_between() -> None:
    output = ProgramOutput(100)
    for _ in range(1000):
        output.feed(b"0123456789")
    assert output.text() == f"{'0123456789' * 5}\n[... 9900 bytes of output are left out here ...]\n{'0123456789' * 5}"
    whole = ProgramOutput(100)
    whole.feed(b"x" * 100)
    assert whole.text() == "x" * 100


@pytest.mark.parametrize(
    ("printed", "text"),
    [
        (b"\x1b[1;31mred\x1b[0m", "red"),
        (b"\x1b]8;;http://x\x1b\\link\x1b]8;;\x07", "link"),
        (b"10%\r50%\r100%\ndone", "100%\ndone"),
        (b"a\r\nb\r\n", "a\nb\n"),
        (b"a\0b\x07\xff", "a\ufffdb\ufffd\ufffd"),
        (b"\xed\xa0\x80", "\ufffd\ufffd\ufffd"),
        ("naïve 🙂\t|".encode(), "naïve 🙂\t|"),
    ],
)
def test_output_is_text_as_it_would_be_seen(printed: bytes, text: str) -> None:
    assert render_terminal_text(printed) == text


@pytest.mark.parametrize("block", [b"\x1b[", b"\x1b]", b"\r", b"a\r", b"\x1b[1;", b"\x1b]\x1b[1"])
def test_making_text_takes_linear_time(block: bytes) -> None:
    began = time.perf_counter()
    render_terminal_text(block * 100_000)
    assert time.perf_counter() - began < 5


def test_the_filter_is_known_for_two_machines() -> None:
    for machine in ("x86_64", "aarch64"):
        program = sandbox_filter(machine)
        assert len(program) % 8 == 0
        assert len(program) // 8 < 4096
    with pytest.raises(LookupError):
        sandbox_filter("vax")
