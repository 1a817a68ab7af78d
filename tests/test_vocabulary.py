"""The vocabulary of names and prose (CONTRIBUTING.md), counted in every file of the product and of the tests."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.support.laws.source_trees import ROOT, files_with, nodes, python_files, shared_trees

__all__ = ["shared_trees"]

FOLDERS: Final = ("apis", "providers", "stack", "tests")
MAX_BARE_NAMES: Final = 20
"""Bare names in all files; so many fail the test."""

PROSE: Final = re.compile(
    r"\b(?:told|tells?|whoever|whatever|nobody|somebody|anybody|anew|beside|behind|lest|retold|wrest|mourn|heed"
    r"|what comes|as \w+ may be)\b",
    re.IGNORECASE,
)
"""Words that an international reader stumbles over."""
BARE_NAMES: Final = frozenset(
    ("told", "given", "made", "kept", "asked", "found", "left", "known", "shown", "seen", "held", "wanted", "some")
)
"""Participles that name nothing without a noun: `tool_results`, not `found`."""
AVOIDED_WORDS: Final = "told|tells?|telling|whoever|whatever|nobodys?|somebody|anybody|anew|beside|behind|retold"
AVOIDED_IN_NAMES: Final = re.compile(rf"(?:^|_)(?:{AVOIDED_WORDS})(?:_|$)", re.IGNORECASE)
"""Parts of names that an international reader stumbles over."""
FRAGMENT: Final = re.compile(r"(?:What|Whether|Of|The same|As)\b")
"""Beginnings of docstrings that need the line above them."""


def docstrings(file: Path) -> Iterator[tuple[int, str]]:
    """Every docstring and every string that stands alone as a note on the line above it."""
    for node in nodes(file):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def comments(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def names(file: Path) -> Iterator[tuple[int, str]]:
    """Every name that the file defines: functions, classes, parameters, variables, attributes."""
    for node in nodes(file):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def where(file: Path, line: int, word: str) -> str:
    return f"{file.relative_to(ROOT)}:{line} {word}"


def test_prose_avoids_the_words_of_the_list() -> None:
    hits = [
        where(file, line, word)
        for file in files_with(PROSE, python_files(*FOLDERS))
        for line, text in (*docstrings(file), *comments(file.read_text()))
        for word in PROSE.findall(text)
    ]
    assert hits == []


def test_names_are_nouns_or_verbs_with_an_object() -> None:
    hits = [
        where(file, line, name)
        for file in files_with(rf"(?m)\b_*(?:{'|'.join(BARE_NAMES)})_*\s*(?:[^\w\s]|$|\bin\b)", python_files(*FOLDERS))
        for line, name in names(file)
        if name.strip("_") in BARE_NAMES
    ]
    assert len(hits) < MAX_BARE_NAMES, hits


def test_names_avoid_the_words_of_the_list() -> None:
    hits = [
        where(file, line, name)
        for file in files_with(rf"(?i)(?:\b|_)(?:{AVOIDED_WORDS})(?:\b|_)", python_files(*FOLDERS))
        for line, name in names(file)
        if AVOIDED_IN_NAMES.search(name)
    ]
    assert hits == []


def test_docstrings_are_sentences_of_their_own() -> None:
    hits = [
        where(file, line, text[:60])
        for file in files_with(rf"[\"']\s*{FRAGMENT.pattern}", python_files(*FOLDERS))
        for line, text in docstrings(file)
        if FRAGMENT.match(text)
    ]
    assert hits == []
