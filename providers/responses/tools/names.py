"""The names that a model calls tools of a namespace by."""

import hashlib
import re
from typing import Final

DEFAULT_NAMESPACE: Final = "functions"
"""As models know it, what is in no namespace is in this one."""
_RESERVED_NAMESPACES: Final = (DEFAULT_NAMESPACE, "browser", "python")
_MAX_NAME_CHARS: Final = 64
_UNSAFE_CHAR: Final = re.compile(r"[^A-Za-z0-9_-]")


def model_namespace(namespace: str, *, supports_namespaces: bool) -> str | None:
    """The namespace as the model is offered it; None where the model knows none, or has one of its own so named."""
    return namespace if supports_namespaces and namespace not in _RESERVED_NAMESPACES else None


def qualified_name(namespace: str | None, name: str, *, supports_namespaces: bool) -> str:
    """`ns.name` for a model that knows namespaces, `ns__name` for others, shortened where it would be too long."""
    if namespace is None:
        return name
    if namespace == DEFAULT_NAMESPACE:
        return safe_name(name)
    if model_namespace(namespace, supports_namespaces=supports_namespaces) is not None:
        return f"{namespace}.{safe_name(name)}"
    return flat_name(namespace, name)


def flat_name(namespace: str, name: str) -> str:
    """`ns__name`, as a safe name."""
    return safe_name(f"{namespace}__{name}")


def safe_name(name: str) -> str:
    """The name as any model may be offered it: letters, digits, `_` and `-`, 64 of them at most. One that is another
    by that ends in a digest of what it was, so that two never become one."""
    safe = _UNSAFE_CHAR.sub("_", name)
    if safe == name and len(name) <= _MAX_NAME_CHARS:
        return name
    return f"{safe[: _MAX_NAME_CHARS - 9]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"
