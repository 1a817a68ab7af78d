"""Look up one header of a request in ASGI's list of pairs: Starlette's own look-up takes several times as long, above
all for a header that is not there, and each request makes several."""

from collections.abc import Iterable


def find_header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> str | None:
    """Return the first value of a header, whose name is in lower case; None without one."""
    for key, value in headers:
        if key == name:
            return value.decode("latin-1")
    return None
