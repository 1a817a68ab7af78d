"""From a section of the run config to its provider's class, its checked Config and what its constructor asks for.

Imports the class; makes nothing live.
"""

import inspect
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Union, cast, get_args, get_origin

from pydantic import BaseModel, SecretStr, ValidationError

from apis.errors import ConfigError
from apis.fetcher import Fetcher
from apis.files import Files
from apis.imports import ImportFromStringError, import_from_string
from apis.inference import Inference
from apis.provider import Provider
from apis.reader import Reader
from apis.responses import Responses
from apis.storage.kv_store import KVStore
from apis.tool_runtime import ToolRuntime
from apis.vector_index import VectorIndex
from apis.vector_stores import VectorStores
from providers import PROVIDERS
from stack.config import Section, StackConfig, explained

APIS: Final[dict[str, type[Provider]]] = {
    "inference": Inference,
    "responses": Responses,
    "tool_runtime": ToolRuntime,
    "kv_store": KVStore,
    "fetcher": Fetcher,
    "files": Files,
    "reader": Reader,
    "vector_index": VectorIndex,
    "vector_stores": VectorStores,
}
DEFAULTS: Final = {"fetcher": "safe", "files": "kv", "reader": "child", "vector_index": "sqlite_vec"}
"""What stands behind an API that another provider needs and the config does not name."""
EXTRAS: Final = {
    "apsw": "files",
    "asyncpg": "postgres",
    "httpx2": "mcp",
    "lxml": "browser",
    "mcp": "mcp",
    "mcp_types": "mcp",
    "llguidance": "harmony",
    "openai_harmony": "harmony",
    "redis": "redis",
    "safetensors": "gpt-oss",
    "snowballstemmer": "files",
    "sqlite_vec": "files",
    "torch": "gpt-oss",
    "xllamacpp": "local",
}
"""Packages that not every stack needs, and the extra of ours that brings each."""

_LONGEST_FACT = 80


@dataclass(frozen=True, slots=True)
class Need:
    """A constructor's parameter: the API it takes, and whether it does without."""

    api: str
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """One provider of a stack, fully described: `make(config=..., **needs, **members)` builds it."""

    api: str
    name: str
    path: str
    make: type[Provider]
    config: Provider.Config
    needs: Mapping[str, Need]
    members: Mapping[str, "Mapping[str, Part]"]

    def __str__(self) -> str:
        return f"{self.path} ({self.name})"


def wire(config: StackConfig) -> dict[str, Part]:
    """Every API of the config and the provider behind it. Raises ConfigError."""
    sections = {api: cast("Section | None", getattr(config, api)) for api in APIS}
    parts = {api: _wire(config.source, api, api, section) for api, section in sections.items() if section is not None}
    while missing := _needed(parts.values()) & DEFAULTS.keys() - parts.keys():
        for api in sorted(missing):
            parts[api] = _wire(config.source, api, api, Section(provider=DEFAULTS[api]))
    return parts


def _needed(parts: Iterable[Part]) -> set[str]:
    """The APIs that these providers cannot do without, their members' included."""
    found: set[str] = set()
    for part in parts:
        found |= {need.api for need in part.needs.values() if not need.optional}
        if getattr(part.config, "webhooks", None):
            found.add("fetcher")  # which the app sends them by
        for members in part.members.values():
            found |= _needed(members.values())
    return found


def provider_class(api: str, name: str) -> type[Provider]:
    """The class that a run config means by `name`. Raises ConfigError, without the place in the file."""
    known = PROVIDERS[api]
    target = known.get(name, name)
    if ":" not in target:
        raise ConfigError(
            f"there is no {api} provider '{name}'. Known ones: {', '.join(sorted(known))}; a class of your own is "
            'named "package.module:Class".'
        )
    try:
        found = import_from_string(target)
    except ImportFromStringError as exc:
        raise ConfigError(f"the provider cannot be imported. {exc}") from exc
    except ModuleNotFoundError as exc:
        package = (exc.name or "").partition(".")[0]
        wanted = f"'responses-stack[{EXTRAS[package]}]'" if package in EXTRAS else package
        raise ConfigError(
            f"the provider '{name}' needs the package {package}, which is not installed. Run: pip install {wanted}"
        ) from exc
    if not (isinstance(found, type) and issubclass(found, APIS[api])):
        raise ConfigError(f'"{target}" is no provider of {api}: it has to be a class made from {APIS[api].__name__}.')
    return found


def wiring_lines(parts: Mapping[str, Part]) -> list[str]:
    """One line for each API: its provider, and what the run config says of it, without secrets."""
    return [f"{api:<14}{part.name:<12}  {_facts(part)}".rstrip() for api, part in parts.items()]


def _facts(part: Part) -> str:
    shown = {key: _fact(key, getattr(part.config, key)) for key in part.config.model_fields_set}
    told = [f"{key}={shown[key]}" for key in type(part.config).model_fields if shown.get(key)]
    told += [f"{key}={','.join(members)}" for key, members in part.members.items()]
    return " ".join(told)


def _wire(source: str, api: str, path: str, section: Section) -> Part:
    try:
        make = provider_class(api, section.provider)
    except ConfigError as exc:
        raise ConfigError(f"{source}: {path}.provider: {exc}") from exc
    needs, groups = _parameters(f"{source}: {path}.provider", make)
    fields = section.fields
    members = {
        name: _wire_members(source, member_api, f"{path}.{name}", fields.get(name))
        for name, member_api in groups.items()
    }
    try:
        config = make.Config.model_validate(fields)
    except ValidationError as exc:
        raise explained(exc, source, path, make.Config, fields) from None
    return Part(api, section.provider, path, make, config, needs, members)


def _wire_members(source: str, api: str, path: str, raw: object) -> dict[str, Part]:
    if not isinstance(raw, dict) or not raw:
        raise ConfigError(f"{source}: {path}: must be a mapping of names to {api} sections, each with its provider.")
    members: dict[str, Part] = {}
    for name, section in cast("dict[str, Any]", raw).items():
        where = f"{path}.{name}"
        try:
            members[name] = _wire(source, api, where, Section.model_validate(section))
        except ValidationError as exc:
            raise explained(exc, source, where, Section, section) from None
    return members


def _parameters(where: str, make: type[Provider]) -> tuple[dict[str, Need], dict[str, str]]:
    """What the constructor takes beside `config`: single APIs, and named groups of providers of an API."""
    hints = typing.get_type_hints(make.__init__)
    needs: dict[str, Need] = {}
    groups: dict[str, str] = {}
    names = {api_class: api for api, api_class in APIS.items()}
    parameters = inspect.signature(make).parameters
    if "config" not in parameters:
        raise ConfigError(f"{where}: the constructor of {make.__name__} takes no 'config', which it is given.")
    for name, parameter in parameters.items():
        if name == "config" or parameter.default is not parameter.empty:
            continue
        hint = hints.get(name)
        arguments = get_args(hint)
        if hint in names:
            needs[name] = Need(names[hint])
        elif get_origin(hint) is Mapping and arguments[0] is str and arguments[1] in names:
            groups[name] = names[arguments[1]]
        elif get_origin(hint) in (Union, types.UnionType) and set(arguments) - names.keys() == {types.NoneType}:
            (api,) = (names[argument] for argument in arguments if argument in names)
            needs[name] = Need(api, optional=True)
        else:
            raise ConfigError(
                f"{where}: the constructor of {make.__name__} takes '{name}', whose type is not an API. A "
                "provider's constructor takes its config, APIs (X, or X | None) and Mapping[str, X] of them."
            )
    return needs, groups


def _fact(key: str, value: object) -> str:
    if isinstance(value, (SecretStr, BaseModel, dict)) or value is None:
        return ""
    if re.search(r"key|token|secret|password", key):
        return ""
    values = cast("list[object]", value) if isinstance(value, list) else [value]
    # A password within a URL is a secret that no type marks.
    text = ",".join(re.sub(r"//[^/@\s]*@", "//...@", str(item)) for item in values)
    return text if len(text) <= _LONGEST_FACT else f"{text[: _LONGEST_FACT - 3]}..."
