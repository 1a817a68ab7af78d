"""Compares the openai SDK's own parameter types with the models that read the requests, field by field.

`find_gaps` walks a pair of both to the innermost object and yields each field, type and value that the SDK can send and
the model does not read.
"""

import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NotRequired, Required, Union, cast, get_args, get_origin, get_type_hints

from openai._utils import PropertyInfo
from pydantic import BaseModel, JsonValue
from typing_extensions import ReadOnly, is_typeddict

_MARKS = (Required, NotRequired, ReadOnly)
_TAG_FIELDS = ("type", "role", "anchor")
"""Fields whose literal value says which member of a union an object is."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A field of an object that the SDK can send, and the value or type of it where only that is unknown."""

    model: str
    field: str
    value: str | None = None
    is_type: bool = False
    """True where `value` is the type of an object of a union."""


@dataclass(frozen=True, slots=True)
class _Leaves:
    """The objects and the literal values that an annotation admits at any depth of its unions and arrays."""

    objects: tuple[type, ...]
    values: frozenset[str]
    takes_any_text: bool
    takes_any_object: bool


def find_gaps(sdk_type: Any, *models: type[BaseModel]) -> set[Gap]:
    """Return what the SDK's type has and none of the models reads, nested objects included: one model reads the body of
    a request and one its query."""
    gaps: set[Gap] = set()
    for params in _leaves(sdk_type).objects:
        visited: set[tuple[type, type]] = set()
        for model in models:
            others = {name for other in models if other is not model for name in other.model_fields}
            gaps |= {
                gap
                for gap in _compare(params, model, visited)
                if gap.model != model.__name__ or gap.value is not None or gap.field not in others
            }
    return gaps


def _compare(params: type, model: type[BaseModel], visited: set[tuple[type, type]]) -> Iterator[Gap]:
    if (params, model) in visited:
        return
    visited.add((params, model))
    model.model_rebuild()
    ours = {field.alias or name: field for name, field in model.model_fields.items()}
    for name, annotation in _hints(params).items():
        field = ours.get(name)
        if field is None:
            yield Gap(model.__name__, name)
            continue
        sdk, own = _leaves(annotation), _leaves(Annotated[field.annotation, None])
        if not own.takes_any_text and name not in _TAG_FIELDS:
            yield from (Gap(model.__name__, name, value) for value in sorted(sdk.values - own.values))
        if own.takes_any_object:
            continue
        for member in sdk.objects:
            yield from _compare_member(member, own.objects, Gap(model.__name__, name), visited)


def _compare_member(member: type, own: Iterable[type], place: Gap, visited: set[tuple[type, type]]) -> Iterator[Gap]:
    """Compare one object of a field with the models that read objects of its type."""
    tags = _tags(member)
    candidates = [candidate for candidate in own if _may_read(tags, _tags(candidate))]
    own_gaps: list[dict[tuple[str, str | None], Gap]] = []
    for candidate in candidates:
        gaps = [*_compare(member, cast(type[BaseModel], candidate), visited)]
        yield from (gap for gap in gaps if gap.model != candidate.__name__)
        own_gaps.append({(gap.field, gap.value): gap for gap in gaps if gap.model == candidate.__name__})
    for key, gap in own_gaps[0].items() if own_gaps else ():
        if all(key in gaps for gaps in own_gaps):  # a message of any role is read by the model of one role
            yield gap
    readers = candidates or [*own]
    for field in _TAG_FIELDS:
        values = [_tags(candidate).get(field) for candidate in candidates]
        if None in values:
            continue
        missing = tags.get(field, frozenset()).difference(*(value for value in values if value))
        owner = replace(place, is_type=True) if field == "type" or not readers else Gap(readers[0].__name__, field)
        yield from (replace(owner, value=value) for value in sorted(missing))
    if not candidates and not tags:
        yield replace(place, value=member.__name__, is_type=True)


def _may_read(tags: Mapping[str, frozenset[str]], own: Mapping[str, frozenset[str]]) -> bool:
    return all(not tags.get(name) or tags[name] & values for name, values in own.items() if values)


def _tags(kind: type) -> dict[str, frozenset[str]]:
    hints = _hints(kind)
    return {name: _leaves(hints[name]).values for name in _TAG_FIELDS if name in hints}


def _hints(kind: type) -> dict[str, Any]:
    if issubclass(kind, BaseModel):
        return {field.alias or name: field.annotation for name, field in kind.model_fields.items()}
    hints = get_type_hints(cast(Any, kind), include_extras=True)
    return {_find_alias(hint) or name: hint for name, hint in hints.items()}


def _find_alias(annotation: Any) -> str | None:
    """The name that a field has in JSON, where that differs: `async` is none of Python's."""
    while get_origin(annotation) in _MARKS:
        annotation = get_args(annotation)[0]
    marks = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    return next((mark.alias for mark in marks if isinstance(mark, PropertyInfo)), None)


def _leaves(annotation: Any) -> _Leaves:
    objects: dict[type, None] = {}
    values: set[str] = set()
    flags = {"text": False, "object": False}
    stack = [annotation]
    while stack:
        kind = stack.pop()
        origin = get_origin(kind)
        if origin is Annotated or origin in _MARKS:
            stack.append(get_args(kind)[0])
        elif origin is Literal:
            values |= {value for value in get_args(kind) if isinstance(value, str)}
        elif origin in (Union, types.UnionType):
            stack += get_args(kind)
        elif origin is dict or kind in (dict, Any, object, JsonValue):
            flags["object"] = True
        elif origin is not None:  # an array of any kind
            stack += get_args(kind)[:1]
        elif kind is str:
            flags["text"] = True
        elif isinstance(kind, type) and (is_typeddict(kind) or issubclass(kind, BaseModel)):
            objects[kind] = None
    return _Leaves(tuple(objects), frozenset(values), flags["text"], flags["object"])


def list_models(model: type[BaseModel]) -> set[type[BaseModel]]:
    """Return the model and all that its fields hold, at any depth."""
    results: set[type[BaseModel]] = set()
    stack = [model]
    while stack:
        kind = stack.pop()
        if kind in results:
            continue
        results.add(kind)
        kind.model_rebuild()
        for field in kind.model_fields.values():
            stack += [member for member in _leaves(field.annotation).objects if issubclass(member, BaseModel)]
    return results
