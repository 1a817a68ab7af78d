"""Checks of grammars from outside, each compiled once in a child process.

What compiles grammars in this process has them checked here before: none that has passed exhausts a stack. Tenants take
turns.
"""

import asyncio
import atexit
import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, TypeVar
from weakref import WeakKeyDictionary

from apis.errors import InvalidRequest, Overloaded
from apis.fair_share import FairShare
from apis.wire.text_format import Grammar
from providers.common.processes.child import TaskChild, TaskDied
from providers.common.recent import RecentEntries

_MAX_DEFINITION_BYTES: Final = 256 * 1024
_MAX_INPUT_BYTES: Final = 256 * 1024
"""Longest input that is matched; a longer one counts as a match."""
_BYTE_LIMITS: Final = {"max_items_in_row": 2_000}
"""Limit of the parser's work for one byte; a grammar that needs more is refused, or its input counts as a match."""
_MAX_CACHED: Final = 4096
_PROGRAM: Final = Path(__file__).with_name("compile_child.py")
_PARALLEL: Final = 2
"""Grammars that compile at a time, one of each tenant."""
_TIMEOUT_S: Final = 30.0
"""Time on the clock for one grammar. The child itself has two seconds of processor time."""
_MAX_RESULT_BYTES: Final = 2**22
_STACK_BYTES: Final = 8 * 2**20
_TOO_MUCH_WORK: Final = "it takes too much time or memory to compile."

_Result = TypeVar("_Result")
_verdicts = RecentEntries[bytes, str](_MAX_CACHED)
"""Problems of grammars by their hash, empty for a valid one, because agents send the same tools with every turn."""
_lock = threading.Lock()
_idle_children: list[TaskChild] = []
_places: WeakKeyDictionary[asyncio.AbstractEventLoop, FairShare] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar as llguidance reads it, over the bytes or a `vocabulary` of so many tokens, within the compiler's
    `limits`."""

    definition: str
    syntax: Literal["lark", "regex"] = "lark"
    vocabulary: int | None = None
    limits: Mapping[str, int] = field(default_factory=lambda: _BYTE_LIMITS)

    def to_task(self, text: str | None = None) -> dict[str, Any]:
        """Return the task of the child: to compile the grammar, and to match the text if there is one."""
        fields = {"definition": self.definition, "syntax": self.syntax, "vocabulary": self.vocabulary}
        return {**fields, "limits": self.limits, "input": text}


async def check_grammars(grammars: Sequence[tuple[str, Grammar]], tenant: str) -> None:
    """Raise InvalidRequest for the first grammar that does not compile; each comes with the field that declares it."""
    for param, grammar in grammars:
        problem = await find_problem(GrammarSource(grammar.definition, grammar.syntax), tenant)
        if problem:
            raise InvalidRequest(f"The grammar is not valid: {problem}", param=param, code="invalid_grammar")


async def find_problem(source: GrammarSource, tenant: str) -> str:
    """Return why the grammar cannot be compiled, as the end of a sentence; empty for a valid one. Raises Overloaded
    where that cannot be found out."""
    problem = _find_verdict(_hash(source))
    return await run_in_turn(lambda: compile_grammar(source), tenant) if problem is None else problem


def compile_grammar(source: GrammarSource) -> str:
    """Do the work of `find_problem`, for callers in `run_in_turn`. Blocks."""
    key = _hash(source)
    problem = _find_verdict(key)
    if problem is not None:
        return problem
    size = len(source.definition.encode("utf-8", "surrogatepass"))
    if size > _MAX_DEFINITION_BYTES and source.vocabulary is None:
        return f"it is larger than {_MAX_DEFINITION_BYTES} bytes."
    try:
        problem = str(_run_task(source.to_task())["problem"])
    except TaskDied as exc:
        problem = _TOO_MUCH_WORK
        if exc.is_timeout:
            return problem
    with _lock:
        _verdicts[key] = problem
    return problem


async def matches(grammar: Grammar, text: str, tenant: str) -> bool:
    """Return whether the whole text is one of the grammar; True where that cannot be found out within the limits."""
    if len(text.encode("utf-8", "surrogatepass")) > _MAX_INPUT_BYTES:
        return True
    source = GrammarSource(grammar.definition, grammar.syntax)
    try:
        result = await run_in_turn(lambda: _run_task(source.to_task(text)), tenant)
    except TaskDied:
        return True
    return bool(result["problem"] or result["is_match"])


@dataclass(frozen=True, slots=True)
class RelaxedSchema:
    """A schema without the keywords that no grammar can hold, and the place of each of these: names of properties and
    keywords, from the outside in."""

    schema: Mapping[str, Any]
    left_out: Sequence[Sequence[str]]


async def relax_schema(schema: Mapping[str, Any], tenant: str) -> RelaxedSchema | None:
    """Return the schema, which has the compiler's options as `x-guidance`, without what cannot be compiled; None where
    that takes too much work to find out."""
    try:
        result = await run_in_turn(lambda: _run_task({"schema": schema}), tenant)
    except TaskDied:
        return None
    return RelaxedSchema(result["schema"], result["left_out"]) if "schema" in result else None


async def run_in_turn(work: Callable[[], _Result], tenant: str) -> _Result:
    """Return the result of work on a grammar that has been checked, done in a thread at the tenant's turn. The thread
    works to its end if the caller is cancelled, and the tenant's place with it."""
    place = await _find_places().acquire(tenant)
    done = asyncio.get_running_loop().run_in_executor(_start_threads(), work)
    done.add_done_callback(lambda future: (future.cancelled() or future.exception(), place.release()))
    return await asyncio.shield(done)


def _find_places() -> FairShare:
    """Return the places of the compilers in this event loop."""
    return _places.setdefault(
        asyncio.get_running_loop(), FairShare("grammars to be compiled", _PARALLEL, several_tenants=True)
    )


def _hash(source: GrammarSource) -> bytes:
    return hashlib.sha256(json.dumps(source.to_task()).encode()).digest()


def _find_verdict(key: bytes) -> str | None:
    with _lock:
        return _verdicts.find(key)


@cache
def _start_threads() -> ThreadPoolExecutor:
    """Return threads with a stack of their own size: that of a system's threads may be smaller."""
    executor = ThreadPoolExecutor(_PARALLEL, "grammars")
    previous = threading.stack_size(_STACK_BYTES)
    try:
        barrier = threading.Barrier(_PARALLEL)
        for _ in range(_PARALLEL):
            executor.submit(barrier.wait)
    finally:
        threading.stack_size(previous)
    return executor


def _run_task(task: Mapping[str, Any]) -> dict[str, Any]:
    """Return the child's result. Raises TaskDied, and Overloaded where no child can be started."""
    child = _idle_children.pop() if _idle_children else _create_child()
    try:
        result: dict[str, Any] = child.run(task)
        return result
    except OSError as exc:
        message = "The grammar cannot be checked now: no process for it could be started. Try again shortly."
        raise Overloaded(message) from exc
    finally:
        _idle_children.append(child)


def _create_child() -> TaskChild:
    child = TaskChild(_PROGRAM, timeout_s=_TIMEOUT_S, max_result_bytes=_MAX_RESULT_BYTES)
    atexit.register(child.close)
    return child
