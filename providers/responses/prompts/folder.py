"""Prompts from a folder: one YAML file each, read and checked when the stack starts."""

from pathlib import Path
from typing import Any, Final, cast

import yaml
from pydantic import ValidationError

from apis.errors import ConfigError
from providers.responses.prompts.template import PromptFile, StoredPrompt

MAX_FILES: Final = 1000
MAX_FILE_BYTES: Final = 1024 * 1024
"""Bytes of one file; more is refused, because YAML takes many times its size in memory."""


def load_folder(folder: Path) -> dict[str, StoredPrompt]:
    """Return the prompts of the folder's files `*.yaml` and `*.yml` by id: the file's own, else its name without the
    ending. It blocks. Raises ConfigError, with the file, the path in it and the remedy, for the first that is wrong."""
    if not folder.is_dir():
        raise ConfigError(f"prompts: there is no folder {folder}. Create it, or name the one with the YAML files.")
    files = sorted(file for file in folder.iterdir() if file.suffix in (".yaml", ".yml"))
    if not files:
        raise ConfigError(f"prompts: the folder {folder} holds no file *.yaml. Add one, or remove the setting.")
    if len(files) > MAX_FILES:
        raise ConfigError(f"prompts: the folder {folder} holds more than {MAX_FILES} files.")
    templates: dict[str, StoredPrompt] = {}
    for file in files:
        template = _load_file(file)
        prompt_id = template.id or file.stem
        if prompt_id in templates:
            raise ConfigError(f"prompts: {file}: id: another file has the id '{prompt_id}' too. Choose a new one.")
        templates[prompt_id] = template
    return templates


def _load_file(file: Path) -> PromptFile:
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"prompts: {file}: is larger than 1 MiB, which no prompt is.")
        tree = cast(object, yaml.safe_load(file.read_text(encoding="utf-8-sig")))
    except OSError as exc:
        raise ConfigError(f"prompts: {file}: cannot be read: {exc.strerror}.") from exc
    except (yaml.YAMLError, ValueError, RecursionError) as exc:
        raise ConfigError(f"prompts: {file}: is not YAML that can be used: {' '.join(str(exc).split())}.") from exc
    if not isinstance(tree, dict):
        raise ConfigError(f"prompts: {file}: must be a mapping with the key versions.")
    try:
        return PromptFile.model_validate(_with_text_keys(cast("dict[object, Any]", tree)))
    except ValidationError as exc:
        raise ConfigError("\n".join(dict.fromkeys(_error_lines(exc, file)))) from None


def _with_text_keys(tree: dict[object, Any]) -> dict[object, Any]:
    """Return the tree with the names of its versions as texts: YAML reads `2:` as a number."""
    versions = tree.get("versions")
    if not isinstance(versions, dict):
        return tree
    return {**tree, "versions": {str(name): value for name, value in cast("dict[object, Any]", versions).items()}}


def _error_lines(exc: ValidationError, file: Path) -> list[str]:
    lines: list[str] = []
    for error in exc.errors(include_url=False, include_input=False, include_context=False):
        place = ".".join(str(step) for step in error["loc"])
        message = {"missing": "is required", "extra_forbidden": "is not a known key"}.get(error["type"], error["msg"])
        message = message.removeprefix("Value error, ").rstrip(".")
        lines.append(f"prompts: {file}: {f'{place}: ' if place else ''}{message}.")
    return lines
