"""What `stack check` and `stack list` find out."""

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
from stack.build import blamed, open_stack
from stack.config import StackConfig, load_config
from stack.wiring import provider_class, wire, wiring_lines

# Providers bound their own starts; this bounds their sum, in which a model may have to be fetched.
_TIMEOUT_S: Final = 3600.0
_MANY = 20


def check(file: str, say: Callable[[str], None]) -> None:
    """Build and start what `file` wires, ask for its models, and close it all, saying a line of each thing found.

    Raises ConfigError, and StackError where something that the stack needs cannot be reached.
    """
    asyncio.run(_check(load_config(file), say))


async def _check(config: StackConfig, say: Callable[[str], None]) -> None:
    for line in wiring_lines(wire(config)):
        say(line)
    try:
        async with asyncio.timeout(_TIMEOUT_S), open_stack(config) as stack:
            with blamed(config, "inference"):
                models = sorted(model.id for model in await stack.inference.models())
    except TimeoutError as exc:
        raise ConfigError(f"{config.source}: not everything started and answered in {_TIMEOUT_S:.0f} seconds.") from exc
    named = ", ".join(models[:_MANY]) or "none yet"
    more = f" and {len(models) - _MANY} more" if len(models) > _MANY else ""
    say(f"{'models':<14}{named}{more}")
    say(f"{config.source} is ready to run.")


def provider_lines() -> Iterator[str]:
    """Every API, its providers, and their Config's fields in columns: name, type, default."""
    for api, known in PROVIDERS.items():
        yield api
        for name in sorted(known):
            try:
                found = provider_class(api, name)
            except ConfigError as exc:
                yield f"  {name:<14}{exc}"
                continue
            yield f"  {name:<14}{_first_sentence(found)}"
            yield from _field_lines(found)
        yield ""


def _first_sentence(found: type[Provider]) -> str:
    return " ".join((inspect.getdoc(found) or "").split()).partition(". ")[0].removesuffix(".")


def _field_lines(found: type[Provider]) -> Iterator[str]:
    rows = [(key, _type(field.annotation), _default(field)) for key, field in found.Config.model_fields.items()]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    for row in rows:
        yield "      " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = cast("object", field.get_default(call_default_factory=True, validated_data={}))
    if value is None:
        return "none"
    return "(secret)" if isinstance(value, (SecretBytes, SecretStr)) else str(value)


def _type(annotation: object) -> str:
    """The annotation in the words of a config file rather than in Python's."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin is Literal:
        return " or ".join(str(argument) for argument in arguments)
    if origin in (Union, types.UnionType):
        branches = [_type(argument) for argument in arguments if argument is not types.NoneType]
        return " or ".join(dict.fromkeys(branches))
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return "mapping"
    kind: object = cast("object", origin or annotation)
    name = _NAMES.get(kind) or getattr(kind, "__name__", str(kind))
    return f"{name} of {_type(arguments[-1])}" if arguments and arguments[-1] is not Any else name


_NAMES: Final[dict[object, str]] = {
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
