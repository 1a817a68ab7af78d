"""Depth of a Lark grammar: how far its rules lead from one to the next. Compilers follow them by recursion."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Final

from providers.common.grammars.schema_values import InvalidSchema
from providers.common.grammars.schemas import check_references

MAX_DEPTH: Final = 512
MAX_RULES: Final = 10_000
LARK_TOKEN: Final = re.compile(
    r"""(?P<text>"(?:\\.|[^"\\\n])*+"?|/(?!/)(?:\\.|[^/\\])++/?)
      | (?P<comment>(?:\#|//)[^\n]*+)
      | (?P<json>%json(?=\s*+\{))
      | (?P<token><[^<>\s]++>)
      | (?P<grammar>@)
      | (?P<definition>^[ \t]*+[?!]*+[A-Za-z_][\w-]*+)(?=[^\n:"/]{0,512}+:)
      | (?P<reference>[A-Za-z_][\w-]*+)""",
    re.VERBOSE | re.MULTILINE | re.ASCII,
)
"""A part of a Lark grammar that means something by itself, as llguidance reads it: a regular expression may go on after
the line's end. A text without its end takes the rest, in which the compiler finds the fault."""


class InvalidGrammar(Exception):
    """A fault of a grammar; the message is the end of a sentence."""


def check_depth(definition: str) -> None:
    """Raise InvalidGrammar for a grammar whose rules, terminals or schemas lead too far from one to the next."""
    references: dict[str, set[str]] = {}
    current: set[str] = set()
    at = 0
    while (token := LARK_TOKEN.search(definition, at)) is not None:
        at = token.end()
        match token.lastgroup:
            case "definition":
                current = references.setdefault(token[0].lstrip(" \t?!"), set())
            case "reference":
                current.add(token[0])
            case "json":
                at = _skip_schema(definition, definition.index("{", at))
            case _:
                pass
    if len(references) > MAX_RULES:
        raise InvalidGrammar(f"it has more than {MAX_RULES} rules and terminals.")
    graph = {name: [target for target in targets if target in references] for name, targets in references.items()}
    if _find_depth(graph) > MAX_DEPTH:
        raise InvalidGrammar(f"its rules or terminals refer to each other more than {MAX_DEPTH} levels deep.")


def _skip_schema(definition: str, start: int) -> int:
    """Return the place after the schema that begins there. Raises InvalidGrammar for one that is none, or refers too
    far."""
    try:
        schema, end = json.JSONDecoder().raw_decode(definition, start)
        check_references(schema)
    except RecursionError:
        raise InvalidGrammar("a schema in it is nested too deeply.") from None
    except InvalidSchema as exc:
        raise InvalidGrammar(f"a schema in it is not valid: {exc}") from None
    except ValueError as exc:
        raise InvalidGrammar(f"a schema in it is not JSON: {exc}.") from None
    return end


def _find_depth(graph: Mapping[str, Sequence[str]]) -> int:
    """Return the most names that a path can have which visits none of them twice, or a little more: names that lead
    back to each other count as one path."""
    depths: dict[str, int] = {}
    for names in _find_cycles(graph):
        group = set(names)
        below = [depths[target] for name in names for target in graph[name] if target not in group]
        depth = len(names) + max(below, default=0)
        depths.update(dict.fromkeys(names, depth))
    return max(depths.values(), default=0)


def _find_cycles(graph: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Return the names in groups that lead back to each other, each group after those that it leads to (Tarjan)."""
    groups: list[list[str]] = []
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    ungrouped: dict[str, None] = {}
    for root in graph:
        path = [(root, iter(graph[root]))] if root not in numbers else []
        while path:
            name, targets = path[-1]
            if name not in numbers:
                numbers[name] = lowest[name] = len(numbers)
                ungrouped[name] = None
            for target in targets:
                if target not in numbers:
                    path.append((target, iter(graph[target])))
                    break
                if target in ungrouped:
                    lowest[name] = min(lowest[name], numbers[target])
            else:
                path.pop()
                if path:
                    lowest[path[-1][0]] = min(lowest[path[-1][0]], lowest[name])
                if lowest[name] == numbers[name]:
                    group = [name]
                    while (last := ungrouped.popitem()[0]) != name:
                        group.append(last)
                    groups.append(group)
    return groups
