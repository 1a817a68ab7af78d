"""Grammars from outside compile in a child process: none of them ends the server, and none keeps it for long."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from apis.errors import InvalidRequest
from apis.wire.text_format import Grammar
from providers.common.grammars.checks import GrammarSource, check_grammars, find_problem, matches, run_in_turn
from providers.common.grammars.depth import InvalidGrammar, check_depth
from providers.common.grammars.schema_values import InvalidSchema
from providers.common.grammars.schemas import check_references
from providers.common.processes.child import TaskChild, TaskDied, build_environment
from tests.support.laws.grammar_forms import DEADLY, FORMS

Json = dict[str, Any]
MAX_OWN_CPU_S = 0.5
NESTED = 'start: list\nlist: "[" (item ("," item)*)? "]"\nitem: list | NUMBER\nNUMBER: /[0-9]+/'
WIDE = "start: " + " | ".join(f"r{at}" for at in range(2000)) + "".join(f'\nr{at}: "a{at}"' for at in range(2000))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1_000, 4_000])
async def test_no_grammar_ends_the_server_or_keeps_it_busy(form: str, size: int) -> None:
    """The grammar has a verdict, and the work is the child's."""
    syntax, build = FORMS[form]
    definition = build(size)
    began = time.process_time()
    problem = await find_problem(GrammarSource(definition, syntax), "t")
    assert time.process_time() - began < MAX_OWN_CPU_S
    assert problem or form not in DEADLY


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [16_000, 60_000])
async def test_no_large_grammar_ends_the_server(form: str, size: int) -> None:
    """The largest grammar that is accepted does not either."""
    syntax, build = FORMS[form]
    began = time.process_time()
    await find_problem(GrammarSource(build(size), syntax), "t")
    assert time.process_time() - began < 2 * MAX_OWN_CPU_S


async def test_a_grammar_that_takes_too_much_time_is_refused_and_remembered() -> None:
    """The second request with it costs nothing."""
    source = GrammarSource("a?" * 60_000, "regex")
    assert await find_problem(source, "t") == "it takes too much time or memory to compile."
    began = time.monotonic()
    assert await find_problem(source, "other")
    assert time.monotonic() - began < 1


@pytest.mark.parametrize("definition", [NESTED, WIDE, 'start: "a" start | "b"', "start: /a\n/"])
async def test_usual_grammars_are_valid(definition: str) -> None:
    """Recursion and many rules are no depth."""
    assert await find_problem(GrammarSource(definition), "t") == ""


async def test_a_refusal_names_its_field() -> None:
    """The first of several errors is reported."""
    grammars = [
        ("tools[0].format.definition", Grammar(syntax="lark", definition=NESTED)),
        ("tools[1].format.definition", Grammar(syntax="lark", definition=FORMS["a chain of rules"][1](3000))),
    ]
    with pytest.raises(InvalidRequest, match="more than 512 levels deep") as caught:
        await check_grammars(grammars, "t")
    assert (caught.value.param, caught.value.code) == ("tools[1].format.definition", "invalid_grammar")


@pytest.mark.parametrize(
    ("text", "is_match"), [("[]", True), ("[1,[2]]", True), ("[1", False), ("", False), ("[1]]", False)]
)
async def test_a_text_is_matched_as_a_whole(text: str, is_match: bool) -> None:
    """Matching is the child's work, too."""
    assert await matches(Grammar(syntax="lark", definition=NESTED), text, "t") is is_match


async def test_a_text_that_is_too_long_counts_as_a_match() -> None:
    """No work is done for it."""
    assert await matches(Grammar(syntax="lark", definition=NESTED), "x" * 300_000, "t")


@pytest.mark.parametrize(("levels", "is_refused"), [(511, False), (513, True)])
def test_the_depth_of_rules_is_bounded(levels: int, is_refused: bool) -> None:
    """The longest way from rule to rule counts, also where comments, texts and patterns name rules."""
    rules = "\n".join(f'r{at}: "r{at}" r{at + 1} /r0"/ // r0 "' for at in range(levels - 2))
    definition = f'start: r0\n{rules}\nr{levels - 2}: "x"'
    if is_refused:
        with pytest.raises(InvalidGrammar):
            check_depth(definition)
    else:
        check_depth(definition)


def test_references_in_a_row_are_bounded_in_any_order() -> None:
    """Definitions that are visited before others lead to them count as far as they lead."""
    definitions: Json = {f"d{at}": {"$ref": f"#/$defs/d{at + 1}"} for at in range(300)}
    schema: Json = {
        "anyOf": [{"$ref": f"#/$defs/d{at}"} for at in (250, 200, 150, 100, 50, 0)],
        "$defs": {**definitions, "d300": {}},
    }
    with pytest.raises(InvalidSchema, match="128 references"):
        check_references(schema)
    short: Json = {name: definitions[name] for name in [*definitions][:100]}
    chain: Json = {"$ref": "#/$defs/d0", "$defs": {**short, "d100": {}}}
    check_references(chain)
    odd: Json = {"$ref": "#", "properties": {"a": {"$ref": "https://example.com/none"}}}
    check_references(odd)


PROGRAM = """
import json, os, signal, sys, time
for line in sys.stdin:
    task = json.loads(line)
    if task == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    if task == "sleep":
        time.sleep(60)
    print(json.dumps([task, os.getpid(), sorted(os.environ)]), flush=True)
    if task == "retire":
        os.kill(os.getpid(), signal.SIGALRM)
"""


def wait_for_death(pid: int) -> None:
    while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.001)


def test_a_child_is_started_again_after_it_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each task has its result or its death, and no secret of the server."""
    monkeypatch.setenv("SOME_API_KEY", "secret")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    child = TaskChild(program, timeout_s=5, max_result_bytes=2**16)
    quick = TaskChild(program, timeout_s=0.3, max_result_bytes=2**16)
    try:
        (_, first, names), (_, second, _) = child.run({"a": 1}), child.run({"a": 2})
        assert first == second
        assert "SOME_API_KEY" not in names
        with pytest.raises(TaskDied) as died:
            child.run("die")  # pyright: ignore[reportArgumentType] - the program's own tasks
        assert not died.value.is_timeout
        third = child.run({"a": 3})[1]
        assert third != first
        child.run("retire")  # pyright: ignore[reportArgumentType] - as above
        fourth = child.run({"a": 4})[1]
        assert fourth != third
        os.kill(fourth, signal.SIGKILL)  # while it has no task
        wait_for_death(fourth)
        assert child.run({"a": 5})[1] != fourth
        with pytest.raises(TaskDied) as died:
            quick.run("sleep")  # pyright: ignore[reportArgumentType] - as above
        assert died.value.is_timeout
    finally:
        child.close()
        quick.close()


def test_the_compiler_ends_with_its_server() -> None:
    """It reads the end of its input."""
    program = Path(check_depth.__code__.co_filename).with_name("compile_child.py")
    task: Json = {"definition": 'start: "a"', "syntax": "lark", "vocabulary": None, "limits": {}, "input": None}
    done = subprocess.run(
        [sys.executable, "-I", str(program)],
        input=json.dumps(task).encode() + b"\n",
        capture_output=True,
        env=build_environment(),
        timeout=20,
        check=True,
    )
    assert json.loads(done.stdout) == {"problem": "", "is_match": True}


async def test_work_keeps_its_place_when_the_caller_leaves_and_no_other_tenant_waits() -> None:
    """A tenant that leaves and comes back gets no second place, and keeps none from others."""
    begun, ended = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    gate = threading.Event()

    def work() -> None:
        loop.call_soon_threadsafe(begun.set)
        gate.wait(10)
        ended.set()

    first = asyncio.create_task(run_in_turn(work, "a"))
    await begun.wait()
    first.cancel()
    second = asyncio.create_task(run_in_turn(ended.is_set, "a"))
    assert await find_problem(GrammarSource('start: "of another"'), "b") == ""
    assert not second.done()
    gate.set()
    assert await second
