"""The command `stack list`: the section `server`, and the providers of each API with their fields."""

import inspect
import ipaddress
import shutil
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel, SecretBytes, SecretStr
from pydantic.fields import FieldInfo

from apis.errors import ConfigError
from apis.provider import Provider
from providers import PROVIDERS
from stack.server_config import HttpServerConfig
from stack.wiring import load_provider_class

_INDENT: Final = " " * 6
_MAX_TYPE_WIDTH: Final = 26
_MAX_NAMED_KEYS: Final = 4


def provider_lines(name: str | None = None) -> Iterator[str]:
    """Yield the section `server`, then every API, its providers, and their Config's fields: name, type, default.

    With `name`, only the entries of that name, with all that their documentation says. Lines fit the terminal.
    Raises ConfigError if there is no such entry.
    """
    matches = 0
    if name in (None, "server"):
        matches += 1
        yield "server"
        yield from _documentation(HttpServerConfig, whole=name is not None)
        yield from _field_lines(HttpServerConfig)
        yield ""
    for api, names in PROVIDERS.items():
        if name not in (None, api, *names):
            continue
        yield api
        for provider in sorted(names):
            if name in (None, api, provider):
                matches += 1
                yield from _provider_lines(api, provider, whole=name == provider)
        yield ""
    if not matches:
        known_names = sorted({"server", *PROVIDERS, *(provider for names in PROVIDERS.values() for provider in names)})
        raise ConfigError(f"There is no '{name}'. Known names: {', '.join(known_names)}.")


def _provider_lines(api: str, name: str, *, whole: bool) -> Iterator[str]:
    try:
        provider_type = load_provider_class(api, name)
    except ConfigError as exc:
        yield from _wrap(f"  {name:<14}{exc}", _INDENT)
        return
    yield from _wrap(f"  {name:<14}{_first_sentence(provider_type)}", _INDENT)
    if whole:
        yield from _documentation(provider_type, whole=True)
        yield from _documentation(provider_type.Config, whole=True)
    yield from _field_lines(provider_type.Config)


def _documentation(described: type, *, whole: bool) -> Iterator[str]:
    text = " ".join((described.__doc__ or "").split())
    yield from _wrap(_INDENT + (text if whole else text.partition(". ")[0].removesuffix(".") + "."), _INDENT)


def _wrap(line: str, indent: str) -> list[str]:
    width = max(60, shutil.get_terminal_size((100, 24)).columns)
    return textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _first_sentence(provider: type[Provider]) -> str:
    return " ".join((inspect.getdoc(provider) or "").split()).partition(". ")[0].removesuffix(".")


def _field_lines(model: type[BaseModel]) -> Iterator[str]:
    rows = [(key, _render_type(field.annotation), _render_default(field)) for key, field in model.model_fields.items()]
    key_width = max((len(key) for key, _, _ in rows), default=0)
    type_width = min(_MAX_TYPE_WIDTH, max((len(kind) for _, kind, _ in rows), default=0))
    indent = " " * (len(_INDENT) + key_width + 2)
    for key, kind, default in rows:
        yield from _wrap(f"{_INDENT}{key:<{key_width}}  {kind:<{type_width}}  {default}".rstrip(), indent)


def _render_default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = cast("object", field.get_default(call_default_factory=True, validated_data={}))
    if value is None:
        return "none"
    if isinstance(value, BaseModel):
        return "{}"
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
        fields = annotation.model_fields
        return f"mapping ({', '.join(fields)})" if len(fields) <= _MAX_NAMED_KEYS else "mapping"
    kind: object = cast("object", origin or annotation)
    name = _TYPE_NAMES.get(kind) or getattr(kind, "__name__", str(kind))
    arguments = tuple(argument for argument in arguments if argument is not ...)
    return f"{name} of {_render_type(arguments[-1])}" if arguments and arguments[-1] is not Any else name


_TYPE_NAMES: Final[dict[object, str]] = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "true or false",
    SecretStr: "secret",
    ipaddress.IPv4Network: "network",
    ipaddress.IPv6Network: "network",
    Path: "path",
    dict: "mapping",
    list: "list",
    tuple: "list",
    frozenset: "list",
}
