"""Entry of `stack bench`: reads the arguments, runs the load, prints the report."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import orjson

from apis.errors import InvalidRequest
from stack.bench.plan import parse_arguments
from stack.bench.report import render_table
from stack.bench.runner import run_load


def bench(arguments: Sequence[str], write: Callable[[str], None], show: Callable[[str], None]) -> int:
    """Run the load that the arguments describe; returns the exit code. `write` gets the lines of the result, `show` the
    progress, each time as a line that replaces the one before. Raises StackError."""
    plan, output = parse_arguments(arguments)
    earlier = _read_earlier(output.compare_path) if output.compare_path else None
    figures = asyncio.run(run_load(plan, show))
    document = figures.to_json()
    if output.as_json:
        write(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode())
    else:
        for line in render_table(document, earlier):
            write(line)
    return 0 if figures.tally.responses else 1


def _read_earlier(path: str) -> dict[str, Any]:
    try:
        earlier: Any = orjson.loads(Path(path).read_bytes())
    except (OSError, orjson.JSONDecodeError) as exc:
        raise InvalidRequest(f"--compare {path}: {exc}") from exc
    if not isinstance(earlier, dict) or "responses_per_s" not in earlier:
        raise InvalidRequest(f"--compare {path}: not a result of `stack bench --json`.")
    return cast("dict[str, Any]", earlier)
