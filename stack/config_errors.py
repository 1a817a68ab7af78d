"""to_config_error: from pydantic's errors to lines that name the file, the place in it and the remedy."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import cast, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from apis.errors import ConfigError

_ERROR_TYPE_SENTENCES = {
    "missing": "is required.",
    "model_type": "must be a mapping of keys to values.",
    "dict_type": "must be a mapping of keys to values.",
}


def to_config_error(
    exc: ValidationError, source: str, prefix: str, model: type[BaseModel], raw: Mapping[str, object]
) -> ConfigError:
    """Return the errors of `raw`, one line each: the file, the dotted path in it below `prefix`, and the remedy.

    The values themselves are never shown, because one of them may be a secret.
    """
    lines: dict[str, str] = {}
    choices: dict[str, list[str]] = {}
    for error in exc.errors(include_url=False, include_input=False):
        path = _error_path(raw, error)
        where = ".".join(part for part in (prefix, *path) if part)
        # Each branch of a union reports the value: the words that it may be say most, else the first error.
        if error["type"] == "literal_error":
            choices.setdefault(where, []).append(str(error.get("ctx", {}).get("expected")))
            lines[where] = f"{source}: {where}: must be {' or '.join(choices[where])}."
        else:
            lines.setdefault(where, f"{source}: {where}: {_error_sentence(error, path, model)}")
    return ConfigError("\n".join(lines.values()))


def _error_path(raw: object, error: ErrorDetails) -> list[str]:
    """Return the error's path in the file, without the branches of unions that pydantic adds."""
    path: list[str] = []
    node = raw
    for position, part in enumerate(error["loc"]):
        if isinstance(node, dict) and part in node:
            node = cast("dict[object, object]", node)[part]
        elif isinstance(node, list) and isinstance(part, int) and part < len(cast("list[object]", node)):
            node = cast("list[object]", node)[part]
        elif error["type"] != "missing" or position < len(error["loc"]) - 1:
            continue
        path.append(str(part))
    return path


def _error_sentence(error: ErrorDetails, path: Sequence[str], model: type[BaseModel]) -> str:
    if error["type"] == "extra_forbidden":
        keys = sorted(_known_keys(model, path[:-1]))
        near = difflib.get_close_matches(path[-1], keys, n=1)
        return (
            f"is not a known key. Did you mean '{near[0]}'?"
            if near
            else (
                f"is not a known key. Known keys: {', '.join(keys)}." if keys else "is not a known key; it takes none."
            )
        )
    message = _ERROR_TYPE_SENTENCES.get(error["type"]) or error["msg"].removeprefix("Value error, ")
    return message if message.endswith((".", "?")) else f"{message}."


def _known_keys(model: type[BaseModel], path: Sequence[str]) -> set[str]:
    """Return the keys that the mapping at `path` below `model` takes."""
    models = [model]
    for part in path:
        if part.isdigit():
            continue
        models = [
            inner
            for outer in models
            if (field := outer.model_fields.get(part)) is not None
            for inner in _nested_models(field.annotation)
        ]
    return {field.alias or name for inner in models for name, field in inner.model_fields.items()}


def _nested_models(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _nested_models(argument)
