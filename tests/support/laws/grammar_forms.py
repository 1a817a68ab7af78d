"""Grammars that a compiler follows far or works on for long, by their size."""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

Syntax = Literal["lark", "regex"]


def chain(rule: str, last: str, name: str = "r") -> Callable[[int], str]:
    """Rules that each lead to the next one."""

    def build(size: int) -> str:
        rules = (rule.replace("HERE", f"{name}{at}").replace("NEXT", f"{name}{at + 1}") for at in range(size))
        return "\n".join([f"start: {name}0", *rules, last.replace("LAST", f"{name}{size}")])

    return build


def schema_chain(link: Callable[[str], Any]) -> Callable[[int], str]:
    """A schema whose definitions each lead to the next one."""

    def build(size: int) -> str:
        definitions = {f"d{at}": link(f"#/$defs/d{at + 1}") for at in range(size)}
        schema = {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{size}": {"type": "string"}}}
        return f"start: %json {json.dumps(schema)}"

    return build


def mutual(size: int) -> str:
    """Rules that all lead back to each other."""
    pairs = (f'a{at}: "a" b{at} | "x"\nb{at}: "b" a{(at + 1) % size}' for at in range(size))
    return "\n".join(["start: a0", *pairs])


LARK_FORMS: Final[Mapping[str, Callable[[int], str]]] = {
    "a chain of rules": chain('HERE: "a" NEXT', 'LAST: "x"'),
    "a chain of bare rules": chain("HERE: NEXT", 'LAST: "x"'),
    "a chain used twice": chain("HERE: NEXT NEXT", 'LAST: "x"'),
    "a chain with a choice": chain('HERE: "a" NEXT | "b"', 'LAST: "x"'),
    "optional rules": chain("HERE: NEXT?", 'LAST: "x"'),
    "starred rules": chain("HERE: NEXT*", 'LAST: "x"'),
    "grouped rules": chain('HERE: (NEXT | "b")+', 'LAST: "x"'),
    "left recursion": chain('HERE: NEXT "a"', 'LAST: r0 | "x"'),
    "no end": chain('HERE: "a" NEXT', "LAST: LAST"),
    "rules with dashes": chain('HERE: "a" NEXT', 'LAST: "x"', "r-"),
    "rules with attributes": chain('HERE[capture]: "a" NEXT', 'LAST: "x"'),
    "mutual rules": mutual,
    "a chain of terminals": chain('HERE: "a" NEXT', 'LAST: "x"', "T"),
    "a chain of conjunctions": chain("HERE: /a*/ & NEXT", "LAST: /x/", "T"),
    "a chain of negations": chain("HERE: ~NEXT", "LAST: /x/", "T"),
    "a chain of $ref": schema_chain(lambda target: {"$ref": target}),
    "a chain of properties": schema_chain(lambda target: {"type": "object", "properties": {"a": {"$ref": target}}}),
    "a chain of items": schema_chain(lambda target: {"type": "array", "items": {"$ref": target}}),
    "a chain of choices": schema_chain(lambda target: {"anyOf": [{"$ref": target}, {"type": "null"}]}),
    "parentheses": lambda size: f'start: {"(" * size}"a"{")" * size}',
    "brackets": lambda size: f'start: {"[" * size}"a"{"]" * size}',
    "nested grammars": lambda size: f'start: {"%lark { start: " * size}"a"{" }" * size}',
    "a deep schema": lambda size: "start: %json " + '{"items":' * size + "{}" + "}" * size,
    "optional texts": lambda size: "start: " + '"a"? ' * size,
    "many terminals": lambda size: "\n".join(
        ["start: " + " | ".join(f"T{at}" for at in range(size)), *(f'T{at}: "a{at}"' for at in range(size))]
    ),
    "many properties": lambda size: (
        f'start: %json {{"type": "object", "properties": {json.dumps({f"p{at}": {} for at in range(size)})}}}'
    ),
}
REGEX_FORMS: Final[Mapping[str, Callable[[int], str]]] = {
    "optional letters": lambda size: "a?" * size,
    "groups": lambda size: "(" * size + "a" + ")" * size,
    "classes": lambda size: "[a-z][0-9]?" * size,
    "look-aheads": lambda size: "(?=a)" * size,
    "alternatives": lambda size: "|".join(f"a{at}b" for at in range(size)),
    "counts": lambda size: f"(a{{0,{size}}}b){{0,{size}}}",
    "stars": lambda size: "(a|b)*c" * size,
}
FORMS: Final[Mapping[str, tuple[Syntax, Callable[[int], str]]]] = {
    **{name: ("lark", build) for name, build in LARK_FORMS.items()},
    **{name: ("regex", build) for name, build in REGEX_FORMS.items()},
}
DEADLY: Final = (
    *("a chain of rules", "optional rules", "left recursion", "mutual rules", "a chain of terminals"),
    *("a chain of $ref", "a chain of properties"),
)
"""Forms that end a process whose compiler has the stack of a thread, from some thousand on."""
