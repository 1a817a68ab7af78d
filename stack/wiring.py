"""wire_providers: from the sections of a run config to provider classes, their checked Configs and their dependencies.

The classes are imported; no provider is constructed.
"""

import inspect
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, Union, cast, get_args, get_origin

from pydantic import BaseModel, SecretStr, ValidationError

from apis.errors import ConfigError
from apis.imports import ImportFromStringError, import_from_string, install_command
from apis.provider import Provider
from providers import PROVIDERS
from stack.api_table import APIS, COMPANION_PROVIDERS, DEFAULT_PROVIDERS, RUN_FACTS
from stack.config import InvalidConfig, ProviderSection, StackConfig, load_config
from stack.config_errors import to_config_error

PACKAGE_EXTRAS: Final = {
    "apsw": "files",
    "asyncpg": "postgres",
    "lxml": "browser",
    "mcp": "mcp",
    "mcp_types": "mcp",
    "obstore": "objects",
    "openai_harmony": "harmony",
    "redis": "redis",
    "safetensors": "gpt-oss",
    "sqlite_vec": "files",
    "torch": "gpt-oss",
    "xllamacpp": "local",
}
"""Packages that not every stack needs, and the extra of ours that brings each."""

_MAX_FIELD_CHARS = 80


@dataclass(frozen=True, slots=True)
class Dependency:
    """A constructor's parameter: the API it takes, and whether it may be None."""

    api: str
    optional: bool = False


@dataclass(frozen=True, slots=True)
class ProviderSpec:
    """One provider of a stack, fully described: `provider_type(config=..., **dependencies, **members)` builds it, with
    the facts of the server section (RUN_FACTS), whose types `fact_parameters` has by the names of the arguments."""

    api: str
    name: str
    path: str
    provider_type: type[Provider]
    config: Provider.Config
    dependencies: Mapping[str, Dependency]
    members: Mapping[str, "Mapping[str, ProviderSpec]"]
    fact_parameters: Mapping[str, type] = field(default_factory=dict[str, type])

    def __str__(self) -> str:
        return f"{self.path} ({self.name})"


def load_wired_config(
    name: str,
    *,
    server: Mapping[str, object] | None = None,
    models: Sequence[str] = (),
    left_out: Iterable[str] = (),
) -> tuple[StackConfig, dict[str, ProviderSpec]]:
    """Return the run config `name` and its providers. Raises ConfigError with a line for each mistake in the file."""
    try:
        config = load_config(name, server=server, models=models, left_out=left_out)
    except InvalidConfig as exc:
        if exc.valid_part is not None:
            try:
                wire_providers(exc.valid_part)
            except ConfigError as others:
                raise ConfigError(f"{exc}\n{others}") from exc
        raise
    return config, wire_providers(config)


def wire_providers(config: StackConfig) -> dict[str, ProviderSpec]:
    """Return the provider of each API of the config. Raises ConfigError with a line for each mistake."""
    sections = {api: cast("ProviderSection | None", getattr(config, api)) for api in APIS}
    parts: dict[str, ProviderSpec] = {}
    errors: list[str] = []
    for api, section in sections.items():
        if section is not None:
            try:
                parts[api] = _wire_provider(config.source, api, api, section)
            except ConfigError as exc:
                errors.append(str(exc))
    if errors:
        raise ConfigError("\n".join(errors))
    _add_missing(config.source, parts)
    for api, companions in COMPANION_PROVIDERS.items():
        for companion, provider in companions.items() if api in parts else ():
            if companion not in parts:
                section = ProviderSection(provider=provider)
                parts[companion] = _wire_provider(config.source, companion, companion, section)
    _add_missing(config.source, parts)
    return parts


def _add_missing(source: str, parts: dict[str, ProviderSpec]) -> None:
    """Add the default providers of the APIs that others require and the run config does not name."""
    while missing := _required_apis(parts.values()) & DEFAULT_PROVIDERS.keys() - parts.keys():
        for api in sorted(missing):
            parts[api] = _wire_provider(source, api, api, ProviderSection(provider=DEFAULT_PROVIDERS[api]))


def _required_apis(specs: Iterable[ProviderSpec]) -> set[str]:
    """Return the APIs that these providers and their members require."""
    required: set[str] = set()
    for part in specs:
        required |= {need.api for need in part.dependencies.values() if not need.optional}
        for members in part.members.values():
            required |= _required_apis(members.values())
    return required


def load_provider_class(api: str, name: str) -> type[Provider]:
    """Return the class that a run config names `name`. Raises ConfigError, without the place in the file."""
    providers = PROVIDERS[api]
    target = providers.get(name, name)
    if ":" not in target:
        raise ConfigError(
            f"there is no {api} provider '{name}'. Known ones: {', '.join(sorted(providers))}; a class of your own is "
            'named "package.module:Class".'
        )
    try:
        provider_type = import_from_string(target)
    except ImportFromStringError as exc:
        raise ConfigError(f"the provider cannot be imported. {exc}") from exc
    except ModuleNotFoundError as exc:
        package = (exc.name or "").partition(".")[0]
        extra = PACKAGE_EXTRAS.get(package)
        command = install_command(extra) if extra else f"pip install {package}"
        raise ConfigError(
            f"the provider '{name}' needs the package {package}, which is not installed. Run: {command}"
        ) from exc
    interface: type[Provider] = import_from_string(APIS[api])
    if not (isinstance(provider_type, type) and issubclass(provider_type, interface)):
        raise ConfigError(f'"{target}" is no provider of {api}: it has to be a class made from {interface.__name__}.')
    return provider_type


def wiring_lines(specs: Mapping[str, ProviderSpec]) -> list[str]:
    """Return one line for each API: its provider, and the fields that the run config sets, without secrets."""
    return [f"{api:<16}{part.name:<14}  {_render_fields(part)}".rstrip() for api, part in specs.items()]


def _render_fields(spec: ProviderSpec) -> str:
    rendered = {key: _render_field(key, getattr(spec.config, key)) for key in spec.config.model_fields_set}
    fields = [f"{key}={rendered[key]}" for key in type(spec.config).model_fields if rendered.get(key)]
    fields += [f"{key}={','.join(members)}" for key, members in spec.members.items()]
    return " ".join(fields)


def _wire_provider(source: str, api: str, path: str, section: ProviderSection) -> ProviderSpec:
    try:
        make = load_provider_class(api, section.provider)
        needs, groups, facts = _inspect_constructor(make)
    except ConfigError as exc:
        raise ConfigError(f"{source}: {path}.provider: {exc}") from exc
    fields = section.fields
    members = {
        name: _wire_members(source, member_api, f"{path}.{name}", fields.get(name))
        for name, member_api in groups.items()
    }
    try:
        config = make.Config.model_validate(fields)
    except ValidationError as exc:
        raise to_config_error(exc, source, path, make.Config, fields) from None
    return ProviderSpec(api, section.provider, path, make, config, needs, members, facts)


def _wire_members(source: str, api: str, path: str, sections: object) -> dict[str, ProviderSpec]:
    if not isinstance(sections, dict) or not sections:
        raise ConfigError(f"{source}: {path}: must be a mapping of names to {api} sections, each with its provider.")
    members: dict[str, ProviderSpec] = {}
    errors: list[str] = []
    for name, section in cast("dict[str, Any]", sections).items():
        where = f"{path}.{name}"
        try:
            members[name] = _wire_provider(source, api, where, ProviderSection.model_validate(section))
        except ValidationError as exc:
            errors.append(str(to_config_error(exc, source, where, ProviderSection, section)))
        except ConfigError as exc:
            errors.append(str(exc))
    if errors:
        raise ConfigError("\n".join(errors))
    return members


@cache
def _inspect_constructor(
    provider_type: type[Provider],
) -> tuple[Mapping[str, Dependency], Mapping[str, str], Mapping[str, type]]:
    """Return the constructor's parameters but `config`: single APIs, named groups of providers of an API, and facts of
    the run. Raises ConfigError, without the place in the file."""
    hints = typing.get_type_hints(provider_type.__init__)
    needs: dict[str, Dependency] = {}
    groups: dict[str, str] = {}
    names = _name_apis(hints.values())
    parameters = inspect.signature(provider_type).parameters
    if "config" not in parameters:
        raise ConfigError(f"the constructor of {provider_type.__name__} takes no 'config', which it is given.")
    for name, parameter in parameters.items():
        hint = hints.get(name)
        if name == "config" or hint in RUN_FACTS or parameter.default is not parameter.empty:
            continue
        arguments = get_args(hint)
        if hint in names:
            needs[name] = Dependency(names[hint])
        elif get_origin(hint) is Mapping and arguments[0] is str and arguments[1] in names:
            groups[name] = names[arguments[1]]
        elif get_origin(hint) in (Union, types.UnionType) and set(arguments) - names.keys() == {types.NoneType}:
            (api,) = (names[argument] for argument in arguments if argument in names)
            needs[name] = Dependency(api, optional=True)
        else:
            raise ConfigError(
                f"the constructor of {provider_type.__name__} takes '{name}', whose type is not an API. A provider's "
                "constructor takes its config, APIs (X, or X | None), Mapping[str, X] of them, and Tenants."
            )
    return needs, groups, {name: hint for name, hint in hints.items() if hint in RUN_FACTS}


def _name_apis(hints: Iterable[Any]) -> dict[Any, str]:
    """Return the APIs among the types and the arguments of these hints, by their classes."""
    names = {name: api for api, name in APIS.items()}
    kinds = {kind for hint in hints for kind in (hint, *get_args(hint)) if isinstance(kind, type)}
    apis = {kind: names.get(f"{kind.__module__}:{kind.__qualname__}") for kind in kinds}
    return {kind: api for kind, api in apis.items() if api is not None}


def _render_field(key: str, value: object) -> str:
    if isinstance(value, (SecretStr, BaseModel, dict)) or value is None:
        return ""
    if re.search(r"key|token|secret|password", key):
        return ""
    values = cast("list[object]", value) if isinstance(value, list) else [value]
    # A password within a URL is a secret that no type marks.
    text = ",".join(re.sub(r"//[^/@\s]*@", "//...@", str(item)) for item in values)
    return text if len(text) <= _MAX_FIELD_CHARS else f"{text[: _MAX_FIELD_CHARS - 3]}..."
