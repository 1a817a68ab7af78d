"""Models of the SDK built without validation, for values that come typed from our own code.

Validation is most of the time that such a model takes: an item's event tries every type of item. Values from outside,
and plain dicts that must become models, are validated by the constructor as ever. Requests, which live as long as an
open stream, are built from the fields that were set, in a third of their memory.
"""

from collections.abc import Callable, Mapping
from functools import cache, lru_cache
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
            names = names_by_arguments[arguments] = _shared_names(frozenset(fields))
        _set_names(model, names)
        return model

    return build_frozen if model_class.model_config.get("frozen") else build


@lru_cache(maxsize=1024)
def _shared_names(names: frozenset[str]) -> set[str]:
    """Return the one set of these names of fields for all frozen models: a set for each model would take 216 bytes."""
    return {*names}


def _any_value(field: FieldInfo) -> core_schema.CoreSchema:
    schema = core_schema.any_schema()
    return schema if field.is_required() else core_schema.with_default_schema(schema, default=field.default)


def without_unset(request: ModelT) -> ModelT:
    """Return a request, which must be frozen, without the fields that were never set: they are read from its class, so
    they cost nothing, and a dump lacks them. A request has some sixty fields, 1.6 KiB, of which it sets three."""
    return build_sparse(type(request), vars(request), frozenset(request.__pydantic_fields_set__))


def build_sparse(model_class: type[ModelT], fields: Mapping[str, Any], names: frozenset[str]) -> ModelT:
    """Return a request of a frozen class as `without_unset` does: with those of the `fields` that have the `names`,
    which are valid."""
    kept_fields = {name: fields[name] for name in _kept_names(model_class, names)}
    return build_unvalidated(_with_defaults(model_class), kept_fields, _shared_names(names))


@lru_cache(maxsize=256)
def _kept_names(model_class: type[BaseModel], names: frozenset[str]) -> list[str]:
    """Return the names of the fields to keep, in the order of the class."""
    defaults = _defaults(model_class)
    return [name for name in model_class.model_fields if name in names or name not in defaults]


@cache
def _defaults(model_class: type[BaseModel]) -> Mapping[str, Any]:
    """Return the defaults by field, without those that are made for each request."""
    fields = model_class.model_fields.items()
    return {name: field.default for name, field in fields if not (field.is_required() or field.default_factory)}


@cache
def _with_defaults(model_class: type[ModelT]) -> type[ModelT]:
    """Return a subclass of the same name whose attributes are the defaults of the fields; of such a one, itself."""
    if model_class.__base__ is not None and model_class.__base__.__name__ == model_class.__name__:
        return model_class
    attributes = {"__slots__": (), "__module__": model_class.__module__, **_defaults(model_class)}
    # not by pydantic's own metaclass, which would take the attributes for new declarations of the fields
    metaclass: Any = type(BaseModel)
    return type.__new__(metaclass, model_class.__name__, (model_class,), attributes)
