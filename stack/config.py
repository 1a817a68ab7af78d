"""The run config: from a YAML file to a StackConfig, or to a ConfigError that names the place and the remedy."""

import ipaddress
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from apis.errors import ConfigError
from providers import MODEL_CHOICE_PROVIDER
from stack.config_errors import to_config_error
from stack.server_config import DecisionsConfig, HttpServerConfig

PACKAGED_CONFIGS_DIR: Final = Path(__file__).resolve().parent.parent / "configs"
"""The run configs that may be named without a path."""

KEYS_OF_CONFIG: Final = "config"
"""The provider of accounts whose keys are those of `server.api_keys`; with any other one, every request needs a key."""
_MOVED_FIELDS: Final = {"webhooks": "receivers", "webhook_endpoints": "endpoints"}
"""Fields that `responses` had in earlier versions, and their names in the section `webhooks`."""
_MAX_FILE_BYTES = 1024 * 1024
# Aliases may nest, so that a few of them stand for a great many values: thirty-two stand for 200,000 at the worst.
_MAX_ALIASES = 32
_MAX_DEPTH = 32
_ENV_VARIABLE = re.compile(r"\$\{env\.([A-Za-z_][A-Za-z0-9_]*)(?::=([^}]*))?\}")


class ProviderSection(BaseModel):
    """One API's part of the file: the provider's name, and that provider's own fields, which its class checks."""

    model_config = ConfigDict(extra="allow", frozen=True, hide_input_in_errors=True)

    provider: str = Field(min_length=1)

    @property
    def fields(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class InvalidConfig(ConfigError):
    """Sections of a run config are invalid. `valid_part` is a config without them, None where there is none."""

    valid_part: "StackConfig | None" = None


class StackConfig(BaseModel):
    """A whole run config: how to serve, and the provider of each API."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    accounts: ProviderSection = ProviderSection(provider="config")
    server: HttpServerConfig = Field(default_factory=HttpServerConfig)
    decisions: DecisionsConfig = Field(default_factory=DecisionsConfig)
    inference: ProviderSection
    kv_store: ProviderSection
    responses: ProviderSection = ProviderSection(provider="loop")
    agents: ProviderSection | None = ProviderSection(provider="kv")
    tool_runtime: ProviderSection | None = None
    tool_servers: ProviderSection | None = None
    fetcher: ProviderSection | None = None
    files: ProviderSection | None = None
    reader: ProviderSection | None = None
    traces: ProviderSection | None = ProviderSection(provider="kv")
    skills: ProviderSection | None = None
    vaults: ProviderSection | None = None
    vector_index: ProviderSection | None = None
    vector_stores: ProviderSection | None = None
    image_generator: ProviderSection | None = None
    moderation: ProviderSection | None = None
    uploads: ProviderSection | None = None
    batches: ProviderSection | None = None
    webhooks: ProviderSection = ProviderSection(provider="kv")

    _source: str = PrivateAttr(default="config")

    @property
    def source(self) -> str:
        """The path of the file, for error messages."""
        return self._source

    @property
    def has_stored_tenants(self) -> bool:
        """True if there are keys and tenants that the run config does not list."""
        return self.accounts.provider != KEYS_OF_CONFIG

    @property
    def requires_keys(self) -> bool:
        """True if no request is admitted without a key."""
        return self.has_stored_tenants or bool(self.server.api_keys)

    @property
    def has_several_tenants(self) -> bool:
        """True if there may be more than one tenant."""
        return self.has_stored_tenants or len(self.server.tenants) > 1

    @property
    def serves_console(self) -> bool:
        """True if the built-in page is served: as `server.console` says, else on a server without keys."""
        return not self.requires_keys if self.server.console is None else self.server.console

    @property
    def shows_server(self) -> bool:
        """True if the overview shows the whole server to an API key: there is one tenant, and it may read
        `/metrics`."""
        server = self.server
        may_read_metrics = server.metrics == "open" or (server.metrics == "keyed" and server.metrics_key is None)
        return may_read_metrics and not self.has_several_tenants

    @model_validator(mode="before")
    @classmethod
    def _move_webhooks(cls, data: object) -> object:
        """Read a file of an earlier version, in which the webhooks are fields of `responses`."""
        if not isinstance(data, dict):
            return data
        sections = cast("dict[str, Any]", data)
        responses, webhooks = sections.get("responses"), sections.get("webhooks", {"provider": "kv"})
        if not (isinstance(responses, dict) and isinstance(webhooks, dict)):
            return sections
        if cast("dict[str, Any]", responses).get("provider") != "loop":
            return sections
        old_fields, fields = cast("dict[str, Any]", {**responses}), cast("dict[str, Any]", {**webhooks})
        for old, new in _MOVED_FIELDS.items():
            if old in old_fields and new not in fields:  # else the old one is reported as unknown
                fields[new] = old_fields.pop(old)
        return {**sections, "responses": old_fields, "webhooks": fields}

    @field_validator("server")
    @classmethod
    def _require_key_if_reachable(cls, server: HttpServerConfig, info: ValidationInfo) -> HttpServerConfig:
        accounts: ProviderSection | None = info.data.get("accounts")
        has_keys = server.api_keys or accounts is None or accounts.provider != KEYS_OF_CONFIG
        if not has_keys and not server.dangerously_allow_unauthenticated and not is_loopback(server.host):
            raise ValueError(
                f"host {server.host} can be reached from other machines, and there are no api_keys. Add api_keys, or "
                "set host: 127.0.0.1, or, where something in front of the stack lets only the right callers in, set "
                "dangerously_allow_unauthenticated: true."
            )
        return server


def load_config(
    name: str,
    *,
    server: Mapping[str, object] | None = None,
    models: Sequence[str] = (),
    left_out: Iterable[str] = (),
    env: Mapping[str, str] | None = None,
) -> StackConfig:
    """Read the run config `name`: a path, or the bare name of a packaged config.

    `server` overrides keys of the file's `server` section where they are not None, `models` the models of its
    inference section; the parts at the paths `left_out` are taken for not written. `env` is the environment to
    substitute from, the process's own by default. Raises ConfigError.
    """
    path = find_config(name)
    source = f"{name} (packaged config)" if path.parent == PACKAGED_CONFIGS_DIR and name == path.stem else str(path)
    tree = _parse_yaml(source, _read_text(path))
    raw = cast("dict[str, Any]", _substitute_variables(source, tree, os.environ if env is None else env))
    overrides = {key: value for key, value in (server or {}).items() if value is not None}
    if overrides and isinstance(raw.setdefault("server", {}), dict):
        raw["server"] |= overrides
    if models:
        _choose_models(source, raw, models)
    for place in left_out:
        _leave_out(raw, place.split("."))
    try:
        config = StackConfig.model_validate(raw)
    except ValidationError as exc:
        error = InvalidConfig(str(to_config_error(exc, source, "", StackConfig, raw)))
        error.valid_part = _valid_part(exc, raw, source)
        raise error from None
    config._source = source  # pyright: ignore[reportPrivateUsage]  # the one place that knows it
    return config


def _choose_models(source: str, raw: Mapping[str, Any], models: Sequence[str]) -> None:
    inference = raw.get("inference")
    section = cast("dict[str, Any]", inference) if isinstance(inference, dict) else {}
    members = section.get("providers")
    of_router = cast("dict[str, Any]", members).values() if isinstance(members, dict) else ()
    for each in (section, *of_router):
        if isinstance(each, dict) and cast("dict[str, Any]", each).get("provider") == MODEL_CHOICE_PROVIDER:
            chosen = cast("dict[str, Any]", each)
            chosen.pop("model_path", None)
            chosen |= {"model": models[0], "models": list(models[1:])}
            return
    raise ConfigError(
        f"{source}: inference.provider: --model chooses models of the provider {MODEL_CHOICE_PROVIDER}, and this is "
        f"{section.get('provider')}. Name the model in the inference section, or: stack run local --model {models[0]}"
    )


def _leave_out(raw: dict[str, Any], keys: Sequence[str]) -> None:
    *parents, last = keys
    for key in parents:
        raw = raw.get(key, {})
    raw.pop(last, None)


def _valid_part(exc: ValidationError, raw: Mapping[str, object], source: str) -> StackConfig | None:
    wrong = {str(error["loc"][0]) for error in exc.errors() if error["loc"]}
    try:
        config = StackConfig.model_validate({key: value for key, value in raw.items() if key not in wrong})
    except ValidationError:
        return None
    config._source = source  # pyright: ignore[reportPrivateUsage]  # as in load_config
    return config


def find_config(name: str) -> Path:
    """Return the file that `name` means. Raises ConfigError, which lists the packaged configs."""
    path = Path(name)
    if path.is_file():
        return path
    packaged = {file.stem: file for file in sorted(PACKAGED_CONFIGS_DIR.glob("*.yaml"))}
    if name in packaged:
        return packaged[name]
    raise ConfigError(f"{name}: no such file. Give a path, or one of the packaged configs: {', '.join(packaged)}.")


def copy_packaged_config(name: str, path: str) -> None:
    """Write the packaged config `name` to the new file `path`. Raises ConfigError where it exists or cannot be."""
    source = PACKAGED_CONFIGS_DIR / f"{name}.yaml"
    if "/" in name or not source.is_file():
        packaged = ", ".join(sorted(file.stem for file in PACKAGED_CONFIGS_DIR.glob("*.yaml")))
        raise ConfigError(f"{name}: is not one of the packaged configs: {packaged}.")
    try:
        with Path(path).open("x", encoding="utf-8") as file:
            file.write(source.read_text(encoding="utf-8"))
    except FileExistsError:
        raise ConfigError(f"{path}: exists already and was not changed.") from None
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be written: {exc.strerror}.") from exc


def is_loopback(host: str) -> bool:
    """Return true if only this machine can reach a server bound to `host`; only the name localhost is resolved."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# --- reading ---------------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, which also refuses duplicate keys and limits aliases."""

    alias_count = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = cast("yaml.Event", self.peek_event())  # pyright: ignore[reportUnknownMemberType]  # untyped in PyYAML
        if isinstance(event, yaml.AliasEvent):
            self.alias_count += 1
            if self.alias_count > _MAX_ALIASES:
                raise yaml.MarkedYAMLError(problem=f"more than {_MAX_ALIASES} aliases", problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def compose_mapping_node(self, anchor: dict[str, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys_so_far: set[str] = set()
        for key, _ in cast("list[tuple[yaml.Node, yaml.Node]]", node.value):
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.value in keys_so_far:
                raise yaml.MarkedYAMLError(problem=f"the key '{key.value}' is given twice", problem_mark=key.start_mark)
            keys_so_far.add(key.value)
        return node


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror}.") from exc
    if len(data) > _MAX_FILE_BYTES:
        raise ConfigError(f"{path}: is larger than 1 MiB, which no run config is.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text. Save it in that encoding.") from None


def _parse_yaml(source: str, text: str) -> dict[str, Any]:
    try:
        tree = cast("object", _Loader(text).get_single_data())
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{source}: is not YAML that can be used: {exc.problem}{where}.") from exc
    except (yaml.YAMLError, ValueError) as exc:
        raise ConfigError(f"{source}: is not YAML that can be used: {' '.join(str(exc).split())}.") from exc
    except RecursionError:
        raise ConfigError(f"{source}: is nested deeper than {_MAX_DEPTH} levels.") from None
    if tree is None:
        raise ConfigError(f"{source}: is empty. Start from one of the files in {PACKAGED_CONFIGS_DIR}.")
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: must be a mapping with the keys {', '.join(StackConfig.model_fields)}.")
    return cast("dict[str, Any]", tree)


_UNSET: Final = object()


def _substitute_variables(source: str, value: object, env: Mapping[str, str], path: tuple[str, ...] = ()) -> object:
    """Return `value` with its variables replaced. A text that becomes empty thereby counts as absent."""
    if len(path) > _MAX_DEPTH:
        raise ConfigError(f"{source}: {'.'.join(path[:3])}...: is nested deeper than {_MAX_DEPTH} levels.")
    if isinstance(value, dict):
        mapping: dict[str, object] = {}
        for key, child in cast("dict[object, object]", value).items():
            if not isinstance(key, str):
                where = ".".join((*path, str(key)))
                raise ConfigError(f"{source}: {where}: the key is not text. Put it in quotes.")
            mapping[key] = _substitute_variables(source, child, env, (*path, key))
        return {key: child for key, child in mapping.items() if child is not _UNSET}
    if isinstance(value, list):
        items = [
            _substitute_variables(source, v, env, (*path, str(i))) for i, v in enumerate(cast("list[object]", value))
        ]
        return [item for item in items if item is not _UNSET]
    if isinstance(value, str) and "${" in value:
        text = _expand_variables(source, value, env, path)
        if not text and path[:2] == ("server", "api_keys") and path[-1] != "tenant":
            raise ConfigError(
                f"{source}: {'.'.join(path)}: is empty: a variable in it is not set. Set it, or remove the entry; "
                "without any entry the server takes requests without a key."
            )
        return text or _UNSET
    return value


def _expand_variables(source: str, text: str, env: Mapping[str, str], path: tuple[str, ...]) -> str:
    where = f"{source}: {'.'.join(path)}"

    def replace(match: re.Match[str]) -> str:
        name, default = match[1], cast("str | None", match[2])
        variable = env.get(name, "")
        if not variable and default is None:
            raise ConfigError(
                f"{where}: the environment variable {name} is not set. Set it, or write a default: "
                f"${{env.{name}:=value}}."
            )
        return variable or default or ""

    if "${" in _ENV_VARIABLE.sub("", text):
        raise ConfigError(f"{where}: a variable is written ${{env.NAME}} or ${{env.NAME:=default}}.")
    return _ENV_VARIABLE.sub(replace, text)
