"""Text from outside costs time linear in its length: every regular expression of the product, and every parser."""

import pickle
import re
import subprocess
import sys

from providers.inference.harmony import vocabulary
from providers.responses.events.citations import CitationScanner
from providers.responses.events.tool_result import ContainerFile
from tests.support.laws.regexes import METHODS, ROOT, Expression, find_expressions

BUILT: dict[str, list[re.Pattern[str]]] = {
    "providers/inference/harmony/vocabulary.py": [vocabulary._split_pattern(), vocabulary._run_pattern()],  # pyright: ignore[reportPrivateUsage] - built when first used
    "providers/responses/events/citations.py": [
        CitationScanner({}, {"/mnt/data/a.txt": ContainerFile("c", "f")})._pattern  # pyright: ignore[reportPrivateUsage] - built of a request's files
    ],
}
"""The expressions that the code does not show, as the product builds them."""

LARK = r'"(?:\\.|[^"\\])*"|/(?!/)(?:\\.|[^/\\])+/|(?:\#|//)[^\n]*|(?P<foreign><[^<>\s]+>|@)'
QUADRATIC = [
    LARK,
    r"\s*(?:[^\W\d_]{1,64}|\d{1,3}|_{1,16}|[^\w\s]{1,16})|\s{1,64}",
    r"\s+$",
    r"(a+)+b",
    r"<[^>]*>",
    r"\s*\S+",
]
"""Expressions that the timing must find, or it proves nothing: the first was that of Lark grammars, the
second the chunker's."""


def slow_calls(program: str, data: bytes = b"") -> list[str]:
    """Run the timing in a child process, which a call that hangs cannot outlive."""
    command = [sys.executable, "-m", f"tests.support.laws.{program}"]
    done = subprocess.run(command, input=data, capture_output=True, cwd=ROOT, timeout=150, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().splitlines()


def test_every_regular_expression_takes_linear_time() -> None:
    """Runs of blanks, letters, digits, brackets and marks, also escaped, with heads and tails that each
    pattern likes."""
    expressions, unreadable = find_expressions()
    assert len(expressions) > 90
    sources = [row.place for row in unreadable]
    assert sorted(sources) == sorted(place for place, patterns in BUILT.items() for _ in patterns), (
        f"add what the product builds to BUILT: {unreadable}"
    )
    built = [
        Expression(place, pattern.pattern, pattern.flags & ~re.UNICODE, METHODS)
        for place, patterns in BUILT.items()
        for pattern in patterns
    ]
    quadratic = [Expression(f"quadratic {n}", pattern, 0, METHODS) for n, pattern in enumerate(QUADRATIC)]
    slow = slow_calls("linear_time", pickle.dumps([*expressions, *built, *quadratic]))
    unexpected = [line for line in slow if not line.startswith("quadratic ")]
    assert not unexpected, "\n".join(unexpected)
    assert {line.partition(":")[0] for line in slow} == {row.place for row in quadratic}


def test_every_parser_of_foreign_text_takes_linear_time() -> None:
    """Parsers that read their whole buffer again with each piece are quadratic without any expression."""
    slow = slow_calls("linear_parsers")
    assert not slow, "\n".join(slow)
