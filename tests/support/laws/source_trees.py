"""Syntax trees of source files, each parsed once for all tests of a module that read it."""

import ast
import gc
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), str(file))


@cache
def nodes(file: Path) -> Sequence[ast.AST]:
    """Return all nodes of the file's tree, in the order of `ast.walk`."""
    return [*ast.walk(tree(file))]


@contextmanager
def shared_trees() -> Generator[None]:
    """Forget the trees at the end, some 300 MB. Until then the garbage collector would only walk over them."""
    gc.disable()
    try:
        yield
    finally:
        tree.cache_clear()
        nodes.cache_clear()
        gc.enable()
