"""Packages whose own module is executed only when something of it is used, and not for the sake of their submodules."""

import ast
import importlib
import importlib.util
import re
import sys
import threading
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any, Final

_DEFINITION: Final = re.compile(r"^(def|class) ", re.MULTILINE)
_lock = threading.RLock()
_begun: Final[set[str]] = set()
_reexports: Final[dict[str, dict[str, tuple[str, str]]]] = {}


class _DeferredPackage(ModuleType):
    """A package that is executed when a name that it does not have yet is looked up in it.

    A package that does nothing but import names from other modules is not even then: only the module of the name is
    imported. Nor is one for the name of a submodule.
    """

    def __getattr__(self, name: str) -> Any:
        if "__path__" in vars(self) and importlib.util.find_spec(f"{self.__name__}.{name}") is not None:
            return importlib.import_module(f"{self.__name__}.{name}")
        with _lock:
            if self.__name__ not in _reexports:
                _reexports[self.__name__] = _read_reexports(self)
            reexport = _reexports[self.__name__].get(name)
        if reexport is not None:
            module_name, original_name = reexport
            value = getattr(importlib.import_module(module_name), original_name)
            setattr(self, name, value)
            return value
        with _lock:  # other threads wait until the package is complete
            spec = self.__spec__
            if self.__name__ not in _begun and spec is not None and spec.loader is not None:
                _begun.add(self.__name__)
                try:
                    spec.loader.exec_module(self)
                except BaseException:
                    _begun.discard(self.__name__)
                    raise
                object.__setattr__(self, "__class__", ModuleType)
        return ModuleType.__getattribute__(self, name)


def _read_reexports(package: ModuleType) -> dict[str, tuple[str, str]]:
    """Return the module that each name of the package is imported from, and its name there; nothing if the package does
    more than import names and set constants."""
    loader = package.__spec__ and package.__spec__.loader
    source = (loader.get_source(package.__name__) if isinstance(loader, SourceFileLoader) else None) or ""
    if _DEFINITION.search(source):  # to parse a large module would take more memory than the module itself
        return {}
    reexports: dict[str, tuple[str, str]] = {}
    for statement in ast.parse(source).body:
        match statement:
            case ast.ImportFrom(module="__future__") | ast.Assign(value=ast.Constant() | ast.List()):
                pass
            case ast.ImportFrom(level=level, module=str(name), names=names):
                module = importlib.util.resolve_name("." * level + name, package.__name__)
                reexports |= {alias.asname or alias.name: (module, alias.name) for alias in names}
            case _:
                return {}
    return reexports


def defer_package(name: str) -> None:
    """Let the package be executed when it is first used; nothing happens if it has been imported already.

    The own module of `openai` would import its client and all resources: a fifth of a second and 14 MB. Those of its
    types would import all types of their part of the API: a twentieth of a second and 5 MB. That of `uvicorn` would
    import a command line, and `psutil` is for the metrics and the fetcher: together 15 ms and 2 MB. `prometheus_client`
    would import servers of its own, and `logging.config` is for a configuration that uvicorn is not given: 1.5 MB.
    """
    if name in sys.modules:
        return
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    module.__class__ = _DeferredPackage
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
