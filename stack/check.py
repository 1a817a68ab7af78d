"""The commands `stack check` and `stack list`: try a run config, list the providers and their fields."""

import asyncio
import inspect
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel, SecretBytes, SecretStr
from pydantic.fields import FieldInfo

from apis.errors import ConfigError
from apis.provider import Provider
from providers import PROVIDERS
from stack.build import confinement_lines, locate_errors, open_stack
from stack.config import StackConfig, load_config
from stack.wiring import load_provider_class, wire_providers, wiring_lines

# Providers bound their own starts; this bounds their sum, in which a model may have to be fetched.
_TIMEOUT_S: Final = 3600.0
_MAX_LISTED_MODELS = 20


def check(file: str, write_line: Callable[[str], None]) -> None:
    """Build and start the stack of `file`, list its models, close it, and write a line about each step.

    Raises ConfigError, and StackError if a service that the stack needs cannot be reached.
    """
    asyncio.run(_check(load_config(file), write_line))


async def _check(config: StackConfig, write_line: Callable[[str], None]) -> None:
    for line in wiring_lines(wire_providers(config)):
        write_line(line)
    try:
        async with asyncio.timeout(_TIMEOUT_S), open_stack(config) as stack:
            with locate_errors(config, "inference"):
                models = sorted(model.id for model in await stack.inference.models())
            for line in confinement_lines(stack):
                write_line(line)
    except TimeoutError as exc:
        raise ConfigError(f"{config.source}: not everything started and answered in {_TIMEOUT_S:.0f} seconds.") from exc
    named = ", ".join(models[:_MAX_LISTED_MODELS]) or "none yet"
    more = f" and {len(models) - _MAX_LISTED_MODELS} more" if len(models) > _MAX_LISTED_MODELS else ""
    write_line(f"{'models':<14}{named}{more}")
    write_line(f"{config.source} is ready to run.")


def provider_lines() -> Iterator[str]:
    """Yield every API, its providers, and their Config's fields in columns: name, type, default."""
    for api, names in PROVIDERS.items():
        yield api
        for name in sorted(names):
            try:
                provider_type = load_provider_class(api, name)
            except ConfigError as exc:
                yield f"  {name:<14}{exc}"
                continue
            yield f"  {name:<14}{_first_sentence(provider_type)}"
            yield from _field_lines(provider_type)
        yield ""


def _first_sentence(provider: type[Provider]) -> str:
    return " ".join((inspect.getdoc(provider) or "").split()).partition(". ")[0].removesuffix(".")


def _field_lines(provider: type[Provider]) -> Iterator[str]:
    rows = [
        (key, _render_type(field.annotation), _render_default(field))
        for key, field in provider.Config.model_fields.items()
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    for row in rows:
        yield "      " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _render_default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = cast("object", field.get_default(call_default_factory=True, validated_data={}))
    if value is None:
        return "none"
    return "(secret)" if isinstance(value, (SecretBytes, SecretStr)) else str(value)


def _render_type(annotation: object) -> str:
    """Return the annotation in the words of a config file rather than in Python's."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _render_type(arguments[0])
    if origin is Literal:
        return " or ".join(str(argument) for argument in arguments)
    if origin in (Union, types.UnionType):
        branches = [_render_type(argument) for argument in arguments if argument is not types.NoneType]
        return " or ".join(dict.fromkeys(branches))
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return "mapping"
    kind: object = cast("object", origin or annotation)
    name = _TYPE_NAMES.get(kind) or getattr(kind, "__name__", str(kind))
    return f"{name} of {_render_type(arguments[-1])}" if arguments and arguments[-1] is not Any else name


_TYPE_NAMES: Final[dict[object, str]] = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "true or false",
    SecretStr: "secret",
    Path: "path",
    dict: "mapping",
    list: "list",
    tuple: "list",
    frozenset: "list",
}
