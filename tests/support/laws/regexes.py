"""Finds the regular expressions of the product by reading its code."""

import ast
import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[3]
FOLDERS: Final = ("apis", "providers", "stack")
SCANNING: Final = frozenset({"search", "finditer", "findall", "sub", "subn", "split", "scanner"})
METHODS: Final = SCANNING | {"match", "fullmatch"}
_MENTION: Final = re.compile(rf"\b(?:re|pattern|regex)\b|\.\s*(?:{'|'.join(sorted(METHODS))})\b")


@dataclass(frozen=True, slots=True)
class Expression:
    """A regular expression of the product. `methods` are those it is used with: `pydantic` for a field's pattern, all
    where the code does not say."""

    place: str
    pattern: str | bytes
    flags: int
    methods: frozenset[str]


@dataclass(frozen=True, slots=True)
class Unreadable:
    """An expression that is built while the product runs."""

    place: str
    source: str


def find_expressions() -> tuple[list[Expression], list[Unreadable]]:
    """Return the expressions of apis/, providers/ and stack/, and calls whose expression the code does not show."""
    trees = {path: _nodes(path) for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))}
    uses = _methods_by_name(trees)
    expressions: list[Expression] = []
    unreadable: list[Unreadable] = []
    for path, tree in trees.items():
        for call, names in _calls(tree):
            for source, method in _patterns(call):
                place = f"{path.relative_to(ROOT)}:{call.lineno}"
                try:
                    pattern, flags = _evaluate(source, path), _flags(call, path)
                except NameError:
                    unreadable.append(Unreadable(f"{path.relative_to(ROOT)}", ast.unparse(source)))
                    continue
                methods = {method} if method != "compile" else set[str]().union(*(uses.get(n, ()) for n in names))
                expressions.append(Expression(place, pattern, flags, frozenset(methods) or METHODS))
    return expressions, unreadable


def _nodes(path: Path) -> Sequence[ast.AST]:
    """Return all nodes of a file, none where not even its text names an expression or a method of one."""
    text = path.read_text()
    return [*ast.walk(ast.parse(text))] if _MENTION.search(text) else []


def _calls(tree: Sequence[ast.AST]) -> Iterator[tuple[ast.Call, list[str]]]:
    """Yield each call with the names that its value is assigned to."""
    assigned: dict[ast.AST, list[str]] = {}
    for node in tree:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [name for target in targets for name in _target_names(target)]
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            assigned |= dict.fromkeys(values, names)
    for node in tree:
        if isinstance(node, ast.Call):
            yield node, assigned.get(node, [])


def _target_names(target: ast.AST) -> list[str]:
    if isinstance(target, ast.Tuple):
        return [name for each in target.elts for name in _target_names(each)]
    return [target.id] if isinstance(target, ast.Name) else [target.attr] if isinstance(target, ast.Attribute) else []


def _patterns(call: ast.Call) -> Iterator[tuple[ast.expr, str]]:
    """Yield the expressions that a call has, each with the method that it is used with."""
    function = call.func
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "re":
        if function.attr in METHODS | {"compile"}:
            yield call.args[0], function.attr
    elif isinstance(function, ast.Name) and function.id in ("Field", "Query", "Path", "constr", "StringConstraints"):
        yield from ((keyword.value, "pydantic") for keyword in call.keywords if keyword.arg in ("pattern", "regex"))


def _methods_by_name(trees: Mapping[Path, Sequence[ast.AST]]) -> dict[str, set[str]]:
    uses: dict[str, set[str]] = {}
    for tree in trees.values():
        for node in tree:
            if isinstance(node, ast.Attribute) and node.attr in METHODS:
                name = node.value
                key = name.id if isinstance(name, ast.Name) else name.attr if isinstance(name, ast.Attribute) else ""
                uses.setdefault(key, set()).add(node.attr)
    return uses


def _evaluate(source: ast.expr, path: Path) -> Any:
    if isinstance(source, ast.Constant):
        return source.value
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    value: Any = eval(compile(ast.Expression(source), str(path), "eval"), dict(vars(importlib.import_module(module))))
    return getattr(value, "pattern", value)


def _flags(call: ast.Call, path: Path) -> int:
    index = {"compile": 1, "search": 2, "match": 2, "fullmatch": 2, "split": 3, "findall": 2, "finditer": 2, "sub": 4}
    named = next((keyword.value for keyword in call.keywords if keyword.arg == "flags"), None)
    at = index.get(call.func.attr, 99) if isinstance(call.func, ast.Attribute) else 99
    source = named or (call.args[at] if at < len(call.args) else None)
    return 0 if source is None else int(_evaluate(source, path))
