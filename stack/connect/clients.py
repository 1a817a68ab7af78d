"""The settings of each client: files of its own, and the command that starts the client with them."""

import json
import os
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from apis.errors import ConfigError
from stack.server_models import NO_KEY, ServedModel, Server

_MAX_OUTPUT_TOKENS: Final = 32_000
_PROFILE: Final = "stack"
"""The name of Codex's profile."""
_ASSUMED_WINDOW: Final = 32_768
"""Tokens of a window that the server does not know, for clients that demand a number."""


@dataclass(frozen=True, slots=True)
class SetupFile:
    """A file to write. `command` is a shell command that writes the same, for texts that are too long to print."""

    path: Path
    text: str
    command: str | None = None


@dataclass(frozen=True, slots=True)
class Setup:
    """The files of one client, and the shell command that starts it with them. `note` is for what else to do."""

    files: Sequence[SetupFile]
    start: str
    note: str | None = None


def build_codex(server: Server) -> Setup:
    """Return a profile of Codex and its catalog of the models."""
    folder = _find_folder("CODEX_HOME", "~/.codex")
    own = _read_settings(folder / "config.toml", "Codex", tomllib.loads)
    legacy = own.get("profiles")
    if own.get("profile") == _PROFILE or (isinstance(legacy, Mapping) and _PROFILE in legacy):
        raise ConfigError(
            f'{folder / "config.toml"}: Codex starts no profile while this file has profile = "{_PROFILE}" or '
            f"[profiles.{_PROFILE}]. Remove them, then run this again."
        )
    profile, catalog = folder / f"{_PROFILE}.config.toml", folder / f"{_PROFILE}.models.json"
    key_line = f"env_key = {_to_toml(server.key_variable)}\n" if server.key_variable else ""
    header = "" if not server.key_variable else f'-H "Authorization: Bearer ${server.key_variable}" '
    text = (
        f"model = {_to_toml(server.model.slug)}\n"
        'model_provider = "stack"\n'
        f"model_catalog_json = {_to_toml(str(catalog))}\n"
        'web_search = "disabled"  # remove this line if the stack has a search among its tools\n'
        f"{_replace_window(own, server.model.context_window)}"
        "\n"
        "[model_providers.stack]\n"
        'name = "stack"\n'
        f"base_url = {_to_toml(server.url)}\n"
        'wire_api = "responses"\n'
        "supports_websockets = true\n"
        f"{key_line}"
    )
    models = _to_json({"models": [model.model_dump() for model in server.models]})
    fetch = f"curl -s {header}{shlex.quote(f'{server.url}/models?client_version=0')} > {shlex.quote(str(catalog))}"
    return Setup((SetupFile(profile, text), SetupFile(catalog, models, fetch)), f"codex --profile {_PROFILE}")


def build_claude(server: Server) -> Setup:
    """Return a file of settings for Claude Code. Models, servers and keys in the environment do not count."""
    folder = _find_folder("CLAUDE_CONFIG_DIR", "~/.claude")
    _read_settings(folder / "settings.json", "Claude Code", json.loads)
    name, window = server.model.slug, server.model.context_window
    environment = {
        "ANTHROPIC_BASE_URL": server.root,
        "ANTHROPIC_API_KEY": "",
        "ANTHROPIC_AUTH_TOKEN": "" if server.key_variable else NO_KEY,
        **dict.fromkeys((f"CLAUDE_CODE_USE_{cloud}" for cloud in ("BEDROCK", "VERTEX", "FOUNDRY")), ""),
        "ANTHROPIC_MODEL": name,
        **dict.fromkeys((f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU", "FABLE")), name),
        "CLAUDE_CODE_SUBAGENT_MODEL": name,
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "API_TIMEOUT_MS": "1800000",
    }
    if window:
        environment |= {
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": f"{window}",
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": f"{window}",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": f"{_find_output_tokens(server.model)}",
        }
    helper = {"apiKeyHelper": f'printf %s "${server.key_variable}"'} if server.key_variable else {}
    path = folder / "stack.settings.json"
    text = _to_json({"model": name, **helper, "env": environment})
    return Setup((SetupFile(path, text),), f"claude --settings {shlex.quote(str(path))}")


def build_opencode(server: Server) -> Setup:
    """Return a config of opencode with the stack as a provider of responses."""
    path = _find_folder("XDG_CONFIG_HOME", "~/.config") / "opencode" / "stack.json"
    key = f"{{env:{server.key_variable}}}" if server.key_variable else NO_KEY
    model = f"stack/{server.model.slug}"
    config = {
        "$schema": "https://opencode.ai/config.json",
        "provider": {
            "stack": {
                "npm": "@ai-sdk/openai",
                "name": "Responses Stack",
                "options": {"baseURL": server.url, "apiKey": key},
                "models": {each.slug: _build_opencode_model(each) for each in server.models},
            }
        },
        "model": model,
        "small_model": model,
    }
    return Setup((SetupFile(path, _to_json(config)),), f"OPENCODE_CONFIG={shlex.quote(str(path))} opencode")


def build_continue(server: Server) -> Setup:
    """Return a config of Continue's `cn`, which its editors also read as a block of models. Editors have no reference
    to the environment: their key comes from Continue's own file of secrets."""
    folder = _find_folder("CONTINUE_GLOBAL_DIR", "~/.continue")
    path = folder / "models" / "stack.yaml"
    key = f"${{{{ secrets.{server.key_variable} }}}}" if server.key_variable else NO_KEY
    models = [
        {
            "name": model.slug,
            "provider": "openai",
            "model": model.slug,
            "apiBase": server.url,
            "apiKey": key,
            "roles": ["chat", "edit", "apply"],
            "capabilities": ["tool_use", *(["image_input"] if "image" in model.input_modalities else [])],
            "defaultCompletionOptions": {
                "contextLength": model.context_window or _ASSUMED_WINDOW,
                "maxTokens": _find_output_tokens(model),
            },
        }
        for model in (server.model, *(model for model in server.models if model != server.model))
    ]
    block = {"name": "Responses Stack", "version": "1.0.0", "schema": "v1", "models": models}
    note = f"In an editor, choose the model {server.model.slug}"
    if server.key_variable:
        note += f", and put {server.key_variable}=YOUR_KEY into {folder / '.env'}"
    return Setup((SetupFile(path, _to_yaml(block)),), f"cn --config {shlex.quote(str(path))}", note)


def build_aider(server: Server) -> Setup:
    """Return a config of aider, and a file with the windows of the models."""
    config, metadata = Path.home() / ".aider.stack.conf.yml", Path.home() / ".aider.stack.metadata.json"
    model = f"openai/{server.model.slug}"
    settings = {
        "model": model,
        "weak-model": model,
        "openai-api-base": server.url,
        "model-metadata-file": str(metadata),
        "check-update": False,
        **({} if server.key_variable else {"openai-api-key": NO_KEY}),
    }
    windows = {
        f"openai/{each.slug}": {
            "max_input_tokens": each.context_window or _ASSUMED_WINDOW,
            "max_output_tokens": _find_output_tokens(each),
            "litellm_provider": "openai",
            "mode": "chat",
        }
        for each in server.models
    }
    start = f"{_set_variable('OPENAI_API_KEY', server)}aider --config {shlex.quote(str(config))}"
    return Setup((SetupFile(config, _to_yaml(settings)), SetupFile(metadata, _to_json(windows))), start)


def build_goose(server: Server) -> Setup:
    """Return a custom provider of goose."""
    path = _find_folder("XDG_CONFIG_HOME", "~/.config") / "goose" / "custom_providers" / "stack.json"
    provider = {
        "name": "stack",
        "engine": "openai",
        "display_name": "Responses Stack",
        "description": "Models on a server of your own",
        "api_key_env": server.key_variable or "",
        "requires_auth": server.key_variable is not None,
        "base_url": f"{server.url}/chat/completions",
        "models": [
            {"name": model.slug, "context_limit": model.context_window or _ASSUMED_WINDOW} for model in server.models
        ],
        "supports_streaming": True,
    }
    start = f"GOOSE_PROVIDER=stack GOOSE_MODEL={shlex.quote(server.model.slug)} goose session"
    return Setup((SetupFile(path, _to_json(provider)),), start)


def build_environment(server: Server) -> Setup:
    """Return a shell script that sets the variables of OpenAI's and Anthropic's SDKs."""
    path = _find_folder("XDG_CONFIG_HOME", "~/.config") / "responses-stack" / "env.sh"
    key = f'"${server.key_variable}"' if server.key_variable else NO_KEY
    own_key = "" if server.key_variable == "OPENAI_API_KEY" else f"export OPENAI_API_KEY={key}\n"
    text = (
        f"export OPENAI_BASE_URL={shlex.quote(server.url)}\n"
        f"{own_key}"
        f"export OPENAI_MODEL={shlex.quote(server.model.slug)}\n"
        f"export ANTHROPIC_BASE_URL={shlex.quote(server.root)}\n"
        f"export ANTHROPIC_AUTH_TOKEN={key}\n"
        "unset ANTHROPIC_API_KEY\n"
        f"export ANTHROPIC_MODEL={shlex.quote(server.model.slug)}\n"
    )
    return Setup((SetupFile(path, text),), f". {shlex.quote(str(path))}")


SETUPS: Final[Mapping[str, Callable[[Server], Setup]]] = {
    "codex": build_codex,
    "claude": build_claude,
    "opencode": build_opencode,
    "continue": build_continue,
    "aider": build_aider,
    "goose": build_goose,
    "env": build_environment,
}
"""The clients by their names on the command line."""


def _build_opencode_model(model: ServedModel) -> dict[str, Any]:
    inputs = [kind for kind in ("text", "image") if kind in model.input_modalities]
    return {
        "name": model.slug,
        "tool_call": True,
        "reasoning": True,
        "attachment": "image" in inputs,
        "modalities": {"input": inputs, "output": ["text"]},
        "limit": {"context": model.context_window or _ASSUMED_WINDOW, "output": _find_output_tokens(model)},
    }


def _find_folder(variable: str, default: str) -> Path:
    return Path(os.environ.get(variable) or default).expanduser().absolute()


def _find_output_tokens(model: ServedModel) -> int:
    """Return the longest answer to request: at most a quarter of the window, so that a prompt has room."""
    return min(_MAX_OUTPUT_TOKENS, (model.context_window or _ASSUMED_WINDOW) // 4)


def _read_settings(path: Path, client: str, parse: Callable[[str], Any]) -> Mapping[str, Any]:
    """Return the client's own settings, which we never change; none without a file. Raises ConfigError for a file that
    the client cannot read."""
    try:
        return parse(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path}: {client} cannot read it: {exc}. Repair it first, then run this again.") from exc


def _replace_window(own: Mapping[str, Any], window: int | None) -> str:
    """Return lines with the model's window where Codex's own settings have another one, which would hold for all
    models. Codex takes the window from the catalog otherwise."""
    if window is None:
        return ""
    values = {"model_context_window": window, "model_auto_compact_token_limit": window * 9 // 10}
    return "".join(f"{name} = {value}\n" for name, value in values.items() if name in own)


def _set_variable(name: str, server: Server) -> str:
    """Return the assignment to put before a command, where the client reads a key from this variable only."""
    return "" if server.key_variable in (None, name) else f'{name}="${server.key_variable}" '


def _to_json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _to_yaml(value: object) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True)


def _to_toml(text: str) -> str:
    """Return a basic string, whose escapes are those of JSON. No text here has control characters."""
    return json.dumps(text, ensure_ascii=False)
