"""Models of the SDK built without validation, for values that come typed from our own code.

Validation is most of the time that such a model takes: an item's event tries every type of item. Values from outside,
and plain dicts that must become models, are validated by the constructor as ever.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, ParamSpec, TypeVar, cast

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import SchemaValidator, core_schema

P = ParamSpec("P")
ModelT = TypeVar("ModelT", bound=BaseModel)

# slots of the base class, which object.__setattr__ would look up for every model
_set_fields = BaseModel.__dict__["__dict__"].__set__
_set_names = BaseModel.__dict__["__pydantic_fields_set__"].__set__
_set_extra = BaseModel.__dict__["__pydantic_extra__"].__set__
_set_private = BaseModel.__dict__["__pydantic_private__"].__set__


def build_unvalidated(kind: type[ModelT], fields: dict[str, Any], names: set[str]) -> ModelT:
    """Return the model with `fields`, all of them, in the order of the class; `names` are those that count as set."""
    model = kind.__new__(kind)
    _set_fields(model, fields)
    _set_names(model, names)
    _set_extra(model, None)
    _set_private(model, None)
    return model


def add_extra(model: BaseModel, extra: dict[str, Any]) -> None:
    """Give the model, which has none yet, the fields that its class does not declare."""
    _set_extra(model, extra)
    model.__pydantic_fields_set__.update(extra)


def copy_with(model: ModelT, changes: Mapping[str, Any]) -> ModelT:
    """Return a copy of the model with other values of some of its declared fields, which are not validated."""
    copy = build_unvalidated(type(model), {**vars(model), **changes}, {*model.__pydantic_fields_set__, *changes})
    _set_extra(copy, model.__pydantic_extra__)
    return copy


def unvalidated(kind: Callable[P, ModelT]) -> Callable[P, ModelT]:
    """Return a constructor of a model class that takes the same keyword arguments, none of them extra, and validates
    nothing but that the required ones are there."""
    model_class = cast(type[ModelT], kind)
    # pydantic's own core sets the fields and the slots of the model in one call
    fields_schema = core_schema.model_fields_schema(
        {name: core_schema.model_field(_any_value(field)) for name, field in model_class.model_fields.items()}
    )
    build_from_dict = SchemaValidator(core_schema.model_schema(model_class, fields_schema)).validate_python

    def build(*_: P.args, **fields: P.kwargs) -> ModelT:
        return build_from_dict(fields)

    names_by_arguments: dict[tuple[str, ...], set[str]] = {}

    def build_frozen(*_: P.args, **fields: P.kwargs) -> ModelT:
        model = build_from_dict(fields)
        arguments = tuple(fields)
        names = names_by_arguments.get(arguments)
        if names is None:
            names = names_by_arguments[arguments] = shared_names(frozenset(fields))
        _set_names(model, names)
        return model

    return build_frozen if model_class.model_config.get("frozen") else build


@lru_cache(maxsize=1024)
def shared_names(names: frozenset[str]) -> set[str]:
    """Return the one set of these names of fields for all frozen models: a set for each model would take 216 bytes."""
    return {*names}


def _any_value(field: FieldInfo) -> core_schema.CoreSchema:
    schema = core_schema.any_schema()
    return schema if field.is_required() else core_schema.with_default_schema(schema, default=field.default)
