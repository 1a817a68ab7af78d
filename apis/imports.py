"""Imports at run time: an object by its name, "package.module:Name", and the command that installs what it needs."""

import importlib
import json
import shlex
from functools import cache
from typing import Any, Final
from urllib.parse import unquote, urlsplit

_DISTRIBUTION: Final = "responses-stack"


class ImportFromStringError(Exception):
    """No object has the name; the message says which part of the name exists."""


def import_from_string(name: str) -> Any:
    """Return the object of the name `name`.

    Raises ImportFromStringError for a name of another form, a module that does not exist and a module without that
    object. A module that exists and fails while it is imported raises its own error.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ImportFromStringError(f'"{name}" is not of the form "package.module:Class".')
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as exc:
        # Only for the named module or a package above it: an import that fails within the module is another error.
        if exc.name is None or not f"{module_name}.".startswith(f"{exc.name}."):
            raise
        raise ImportFromStringError(f'There is no module "{module_name}".') from None
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ImportFromStringError(f'The module "{module_name}" has no "{attribute}".') from None


def install_command(*extras: str) -> str:
    """Return the shell command that adds `extras` of this project to the installation that runs.

    A project that was installed from a folder or a file is named by it: an index may hold another one by our name.
    Source: PEP 610, `direct_url.json`.
    """
    names = ",".join(dict.fromkeys(extras))
    url = _installed_from()
    if url is None:
        requirement = f"{_DISTRIBUTION}[{names}]"
    elif url.endswith((".whl", ".tar.gz", ".zip")):
        requirement = f"{_DISTRIBUTION}[{names}] @ {url}"
    else:
        requirement = (
            f"{unquote(urlsplit(url).path)}[{names}]"
            if url.startswith("file:")
            else f"{_DISTRIBUTION}[{names}] @ {url}"
        )
    return f"pip install '{requirement}'" if "'" not in requirement else f"pip install {shlex.quote(requirement)}"


@cache
def _installed_from() -> str | None:
    from importlib import metadata  # noqa: PLC0415 - a fifth of the time of `stack --help`, only for an error's text

    try:
        text = metadata.distribution(_DISTRIBUTION).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    return json.loads(text)["url"] if text else None
