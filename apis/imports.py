"""import_from_string: import an object by its name, "package.module:Name", when it is first used."""

import importlib
from typing import Any


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
