"""The form of what the Messages API sends outside a message: its errors, and who speaks it."""

from collections.abc import Mapping
from typing import Any, Final

from starlette.types import Scope

from apis.errors import ContextLengthExceeded, Overloaded, StackError
from stack.http.parsing import find_header

VERSION_HEADER: Final = b"anthropic-version"
OVERLOADED_STATUS: Final = 529
_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED_STATUS: "overloaded_error",
}
"""The types of errors by status. Those of the client's other errors are `invalid_request_error`."""
_TOO_LONG: Final = "prompt is too long"


def speaks_messages(scope: Scope) -> bool:
    """Return true if a request is one of the Messages API: by its path, or by the version that its clients name."""
    path = scope["path"].removeprefix("/v1")
    return path == "/messages" or path.startswith("/messages/") or has_version(scope)


def has_version(scope: Scope) -> bool:
    """Return true if the sender names a version of Anthropic's API, for paths that OpenAI's API has, too."""
    return find_header(scope, VERSION_HEADER) is not None


def message_status(error: StackError) -> int:
    """Return the status of an error: a server with too much work has one of its own."""
    return OVERLOADED_STATUS if isinstance(error, Overloaded) else error.status


def error_to_message_body(error: StackError, request_id: str = "") -> dict[str, Any]:
    """Return Anthropic's error body, with our code in the `details`. That a prompt does not fit is said in the words by
    which clients know it."""
    status, message = message_status(error), error.message
    if isinstance(error, ContextLengthExceeded) and not message.startswith(_TOO_LONG):
        message = f"{_TOO_LONG}: {message}"
    error_type = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    details = {"error_code": error.code} if error.code else None
    body: dict[str, Any] = {
        "type": "error",
        "error": {"type": error_type, "message": message[:1024], "details": details},
    }
    return {**body, "request_id": request_id} if request_id else body
