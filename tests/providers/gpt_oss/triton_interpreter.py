"""Triton's interpreter, less the work that it repeats."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

import pytest

_LANGUAGE: Final[Any] = import_module("triton.language")
_INTERPRETER: Final[Any] = import_module("triton.runtime.interpreter")


def patch_language_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a launch of a kernel put the interpreted functions in place of Triton's once for each module of the functions
    that it calls. Triton does it at each call, and looks at every member of the language: a third of the time."""
    core = _LANGUAGE.core
    packages = (_LANGUAGE, core, core.tensor, _LANGUAGE.math, core.tensor_descriptor_base)
    builtins = {package: _builtin_names(package) for package in packages}
    patched: set[int] = set()
    scope_class = _INTERPRETER._LangPatchScope
    patch_language = _INTERPRETER._patch_lang
    undo = scope_class.restore

    def restore(scope: object) -> None:
        patched.clear()
        undo(scope)

    def patch_builtins(package: Any, builder: object, scope: object) -> None:
        for name in builtins[package]:
            member = getattr(package, name)
            if core.is_builtin(member):
                _INTERPRETER._patch_attr(package, name, member, builder, scope)

    def patch_once(function: Any) -> object:
        names: Mapping[str, object] = function.__globals__
        if id(names) in patched:
            return scope_class()
        patched.add(id(names))
        return patch_language(function)

    monkeypatch.setattr(scope_class, "restore", restore)
    monkeypatch.setattr(_INTERPRETER, "_patch_builtin", patch_builtins)
    monkeypatch.setattr(_INTERPRETER, "_patch_lang", patch_once)


def _builtin_names(package: Any) -> list[str]:
    return [name for name in dir(package) if _LANGUAGE.core.is_builtin(getattr(package, name, None))]
