"""Packages whose own module is executed only when something of it is used, and not for the sake of their submodules."""

import importlib.util
import sys
import threading
from types import ModuleType
from typing import Any, Final

_lock = threading.RLock()
_begun: Final[set[str]] = set()


class _DeferredPackage(ModuleType):
    """A package that is executed when a name that it does not have yet is looked up in it."""

    def __getattr__(self, name: str) -> Any:
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


def defer_package(name: str) -> None:
    """Let the package be executed when it is first used; nothing happens if it has been imported already.

    The own module of `openai` would import its client and all resources: a fifth of a second and 14 MB.
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
