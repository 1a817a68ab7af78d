"""The names by which a model calls the tools of a namespace."""

import hashlib
import re
from typing import Final

DEFAULT_NAMESPACE: Final = "functions"
"""The namespace in which models see tools that have none."""
_RESERVED_NAMESPACES: Final = (DEFAULT_NAMESPACE, "browser", "python")
_MAX_NAME_CHARS: Final = 64
_UNSAFE_CHAR: Final = re.compile(r"[^A-Za-z0-9_-]")


def model_namespace(namespace: str, *, supports_namespaces: bool) -> str | None:
    """Return the namespace to offer; None if the model supports none, or has a native one of that name."""
    return namespace if supports_namespaces and namespace not in _RESERVED_NAMESPACES else None


def qualified_name(namespace: str | None, name: str, *, supports_namespaces: bool) -> str:
    """Return `ns.name` for a model that supports namespaces, else `ns__name`; both as safe names."""
    if namespace is None:
        return name
    if namespace == DEFAULT_NAMESPACE:
        return safe_name(name)
    if model_namespace(namespace, supports_namespaces=supports_namespaces) is not None:
        return f"{namespace}.{safe_name(name)}"
    return flat_name(namespace, name)


def flat_name(namespace: str, name: str) -> str:
    """Return `ns__name` as a safe name."""
    return safe_name(f"{namespace}__{name}")


def safe_name(name: str) -> str:
    """Return a name of at most 64 letters, digits, `_` and `-`, which every model accepts. A changed name ends in a
    digest of the original one, so that two names never become one."""
    safe = _UNSAFE_CHAR.sub("_", name)
    if safe == name and len(name) <= _MAX_NAME_CHARS:
        return name
    return f"{safe[: _MAX_NAME_CHARS - 9]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"
