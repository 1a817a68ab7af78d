"""The names that a model calls tools of a namespace by."""

import hashlib
from typing import Final

_OUTERMOST: Final = "functions"
"""As models know it, what is in no namespace is in this one."""
_TAKEN: Final = (_OUTERMOST, "browser", "python")
_LONGEST: Final = 64


def group_of(namespace: str, *, grouped: bool) -> str | None:
    """The namespace as the model is offered it; None where the model knows none, or has one of its own so named."""
    return namespace if grouped and namespace not in _TAKEN else None


def called_name(namespace: str | None, name: str, *, grouped: bool) -> str:
    """`ns.name` for a model that knows namespaces, `ns__name` for others, shortened where it would be too long."""
    if namespace is None or namespace == _OUTERMOST:
        return name
    if group_of(namespace, grouped=grouped) is not None:
        return f"{namespace}.{name}"
    return flat_name(namespace, name)


def flat_name(namespace: str, name: str) -> str:
    """`ns__name`, of at most 64 characters."""
    flat = f"{namespace}__{name}"
    if len(flat) <= _LONGEST:
        return flat
    return f"{flat[: _LONGEST - 9]}_{hashlib.sha256(flat.encode()).hexdigest()[:8]}"
