"""Requests in a third of their memory, for those that live as long as an open stream."""

from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any, TypeVar

from pydantic import BaseModel

from providers.responses.events.unvalidated import build_unvalidated, shared_names

ModelT = TypeVar("ModelT", bound=BaseModel)


def without_unset(request: ModelT) -> ModelT:
    """Return a request, which must be frozen, without the fields that were never set: they are read from its class, so
    they cost nothing, and a dump lacks them. A request has some sixty fields, 1.6 KiB, of which it sets three."""
    return build_sparse(type(request), vars(request), frozenset(request.__pydantic_fields_set__))


def build_sparse(model_class: type[ModelT], fields: Mapping[str, Any], names: frozenset[str]) -> ModelT:
    """Return a request of a frozen class as `without_unset` does: with those of the `fields` that have the `names`,
    which are valid."""
    kept_fields = {name: fields[name] for name in _kept_names(model_class, names)}
    return build_unvalidated(_with_defaults(model_class), kept_fields, shared_names(names))


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
