"""Child program: times regular expressions on long inputs made to be slow, each call under a limit of CPU time.

Input: a pickled list of `Expression`. Output: lines of the calls that took too long.
"""

import pickle
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import product
from re import _parser  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType] - examples are made of the parsed expression
from typing import Annotated, Any, Final

from pydantic import Field, TypeAdapter, ValidationError

from tests.support.laws.regexes import SCANNING, Expression

RUNS: Final = (" ", "\t", "\n", "a", "1", "(", "[", '"', "<", "\\", "\x1b", "【", "a ", "\\a", '\\"', "/a\\")
TRIAL_CHARS: Final = 5_000
TRIAL_S: Final = 0.01
"""A quadratic expression takes ten times as long on the trial's input, a linear one a tenth."""
FULL_CHARS: Final = 200_000
FULL_S: Final = 0.2


class TooSlow(Exception):
    """A call used up its CPU time."""


def timed(call: Callable[[str], object], text: str, limit_s: float) -> float:
    """Return the CPU time of a call with the text. Raises TooSlow."""
    signal.setitimer(signal.ITIMER_VIRTUAL, limit_s)
    began = time.process_time()
    try:
        with suppress(ValidationError):
            call(text)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return time.process_time() - began


def example_of(parsed: Any) -> str:
    """Return a short text that a parsed expression matches, or nearly."""
    pieces: list[str] = []
    for operation, value in parsed:
        match str(operation):
            case "LITERAL":
                pieces.append(chr(value))
            case "IN":
                pieces.append(_member_of(value))
            case "ANY" | "NOT_LITERAL":
                pieces.append("a")
            case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
                pieces.append(example_of(value[2]) * max(1, value[0]))
            case "SUBPATTERN":
                pieces.append(example_of(value[3]))
            case "ATOMIC_GROUP":
                pieces.append(example_of(value))
            case "BRANCH":
                pieces.append(example_of(value[1][0]))
            case _:
                pass
    return "".join(pieces)


def _member_of(members: Any) -> str:
    kinds = [str(kind) for kind, _ in members]
    if "NEGATE" in kinds:
        return "a"
    kind, value = members[0]
    if str(kind) == "LITERAL":
        return chr(value)
    if str(kind) == "RANGE":
        return chr(value[0])
    return {"CATEGORY_DIGIT": "1", "CATEGORY_SPACE": " ", "CATEGORY_WORD": "a"}.get(str(value), "a")


def inputs(expression: Expression) -> Sequence[tuple[str, str, str]]:
    """Return heads, repeated units and tails: runs that the pattern may or may not like, after its own beginnings and
    before an end that it does not like."""
    text = expression.pattern if isinstance(expression.pattern, str) else expression.pattern.decode("latin-1")
    example = example_of(_parser.parse(text, expression.flags))  # pyright: ignore[reportUnknownMemberType] - as above
    literals = [char for char in dict.fromkeys(example) if char not in RUNS][:4]
    units = dict.fromkeys([*RUNS, *literals, example[:64] or "a"])
    heads = dict.fromkeys(["", example, example[:-1], example[: len(example) // 2]])
    return [*product(heads, units, ("", "\0"))]


def callers(expression: Expression) -> Iterator[tuple[str, Callable[[str], object]]]:
    """Yield the ways in which the product uses the expression."""
    if "pydantic" in expression.methods:
        adapter: TypeAdapter[str] = TypeAdapter(Annotated[str, Field(pattern=str(expression.pattern))])
        yield "pydantic", adapter.validate_python
        return
    compiled: Any = re.compile(expression.pattern, expression.flags)
    encode: Callable[[str], Any] = str if isinstance(expression.pattern, str) else lambda text: text.encode()
    if expression.methods & SCANNING:
        yield "finditer", lambda text: sum(1 for _ in compiled.finditer(encode(text)))
    for method in sorted(expression.methods & {"match", "fullmatch"}):
        yield method, lambda text, method=method: getattr(compiled, method)(encode(text))


def find_slow(expression: Expression) -> Iterator[str]:
    """Yield the calls of an expression that are not linear: all on short inputs, the slowest on a long one, too."""
    for method, call in callers(expression):
        slowest: tuple[float, tuple[str, str, str]] = (-1.0, ("", "", ""))
        parts, size = slowest[1], TRIAL_CHARS
        try:
            for parts in inputs(expression):
                slowest = max(slowest, (timed(call, _build(parts, size), TRIAL_S), parts))
            parts, size = slowest[1], FULL_CHARS
            timed(call, _build(parts, size), FULL_S)
        except TooSlow:
            yield f"{expression.place}: {method} of {expression.pattern!r} on {size} characters of {parts}"


def _build(parts: tuple[str, str, str], size: int) -> str:
    head, unit, tail = parts
    return f"{head}{unit * (size // len(unit))}{tail}"


def _raise_too_slow(*_: object) -> None:
    raise TooSlow


def prepare_timing() -> None:
    """Let `timed` interrupt a call."""
    signal.signal(signal.SIGVTALRM, _raise_too_slow)


def main() -> None:
    prepare_timing()
    expressions: list[Expression] = pickle.load(sys.stdin.buffer)
    for expression in expressions:
        for line in find_slow(expression):
            print(line, flush=True)


if __name__ == "__main__":
    main()
