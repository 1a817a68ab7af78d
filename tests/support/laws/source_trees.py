"""The repository's Python files and their syntax trees, each parsed once for all tests of a module that read it."""

import ast
import gc
import re
import subprocess
from collections.abc import Generator, Sequence
from functools import cache
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[3]


def python_files(*folders: str) -> list[Path]:
    """Return the Python files below these folders that are, or would be, part of the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *(f"{each}/*.py" for each in folders)],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    return [ROOT / line for line in sorted(set(listed.stdout.splitlines())) if (ROOT / line).exists()]


@cache
def text(file: Path) -> str:
    return file.read_text()


def files_with(pattern: str | re.Pattern[str], files: Sequence[Path]) -> list[Path]:
    """Return the files whose text has the pattern somewhere: the others need not be parsed to find what has it."""
    expression = re.compile(pattern)
    return [file for file in files if expression.search(text(file))]


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(text(file), str(file))


@cache
def nodes(file: Path) -> Sequence[ast.AST]:
    """Return all nodes of the file's tree, in the order of `ast.walk`."""
    return [*ast.walk(tree(file))]


@pytest.fixture(scope="module", autouse=True)
def shared_trees() -> Generator[None]:
    """Forget the trees, some 300 MB, after a module that imports this fixture. Until then the garbage collector would
    only walk over them."""
    gc.disable()
    try:
        yield
    finally:
        text.cache_clear()
        tree.cache_clear()
        nodes.cache_clear()
        gc.enable()
