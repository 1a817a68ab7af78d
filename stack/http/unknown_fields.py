"""Fields of a request that no request model has: a misspelt name of a field is refused, any other is ignored."""

from collections.abc import Iterator, Mapping
from functools import cache
from heapq import nsmallest
from typing import Any, Final, cast

from pydantic import BaseModel

from apis.errors import InvalidRequest

_LONG_NAME: Final = 10
"""Characters from which a name may differ in two letters."""
_COMMON_START: Final = 3
"""Letters that both names begin with: so `min_tokens`, a field of some engines, is no misspelt `max_tokens`."""
_LONGEST_NAME: Final = 64
_MAX_NAMES: Final = 64
"""Unknown names of one object that are compared, so that a request with thousands of them costs no more."""
_OTHER_FIELDS: Final = frozenset(("top_a", "speed"))
"""Fields of other services that are nearly the name of one of ours."""
_NESTED_LISTS: Final = ("tools",)
"""Lists of objects whose fields are looked at, too. Those of items are kept as they are."""


def refuse_misspelt_field(fields: Mapping[str, Any], request: BaseModel) -> None:
    """Raise InvalidRequest for an unknown field whose name is nearly one of the request's. Clients send fields of
    their own, so all others are ignored, but a misspelt one would have no effect that its sender could notice."""
    for path, name, known_name in _find_misspelt(fields, request, ""):
        raise InvalidRequest(
            f"Unknown parameter: '{path}{name}'. Did you mean '{path}{known_name}'?",
            param=f"{path}{name}",
            code="unknown_parameter",
        )


def _find_misspelt(fields: Mapping[str, Any], request: BaseModel, path: str) -> Iterator[tuple[str, str, str]]:
    model = type(request)
    known_names = _names(model)
    if not fields.keys() <= known_names and model.model_config.get("extra") == "ignore":
        for name in nsmallest(_MAX_NAMES, fields.keys() - known_names - _OTHER_FIELDS):
            if (known_name := _find_similar(name, known_names - fields.keys())) is not None:
                yield path, name, known_name
    for name, value in fields.items():
        if type(value) not in (dict, list):
            continue
        part: Any = getattr(request, name, None)
        if isinstance(part, BaseModel):
            yield from _find_misspelt(value, part, f"{path}{name}.")
        elif name in _NESTED_LISTS and isinstance(part, list):
            for index, (entry, each) in enumerate(zip(value, cast("list[Any]", part), strict=False)):
                if isinstance(entry, dict) and isinstance(each, BaseModel):
                    yield from _find_misspelt(cast("dict[str, Any]", entry), each, f"{path}{name}[{index}].")


@cache
def _names(model: type[BaseModel]) -> frozenset[str]:
    return frozenset(alias for name, field in model.model_fields.items() for alias in (name, field.alias) if alias)


def _find_similar(name: str, known_names: frozenset[str]) -> str | None:
    if len(name) > _LONGEST_NAME:
        return None
    plain = _plain(name)
    return next((known_name for known_name in sorted(known_names) if _is_similar(plain, _plain(known_name))), None)


def _plain(name: str) -> str:
    """Return a name without what separates its words: `maxOutputTokens` and `max-output-tokens` are the same."""
    return name.lower().replace("_", "").replace("-", "")


def _is_similar(name: str, known_name: str) -> bool:
    if name == known_name:
        return True
    most = 2 if len(known_name) >= _LONG_NAME and name[:_COMMON_START] == known_name[:_COMMON_START] else 1
    return (
        len(known_name) > _COMMON_START
        and abs(len(name) - len(known_name)) <= most
        and _count_edits(name, known_name) <= most
    )


def _count_edits(first: str, second: str) -> int:
    """Return how many letters are added, left out, replaced or exchanged with the next (optimal string alignment)."""
    before: list[int] = []
    row = list(range(len(second) + 1))
    for i, letter in enumerate(first, 1):
        after = [i]
        for j, other in enumerate(second, 1):
            edits = min(row[j] + 1, after[j - 1] + 1, row[j - 1] + (letter != other))
            if before and j > 1 and letter == second[j - 2] and first[i - 2] == other:
                edits = min(edits, before[j - 2] + 1)
            after.append(edits)
        before, row = row, after
    return row[-1]
