"""Responses of a connection to bytes that never become a request of the app: OpenAI's error body, then the end."""

from http import HTTPStatus
from typing import Final

from apis.errors import InvalidRequest, Overloaded, StackError
from stack.http.answers import error_response


class _HeadTooLarge(InvalidRequest):
    """The head of a request exceeds a limit of the connection."""

    status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE


class _TooSlow(InvalidRequest):
    """A request did not arrive in time."""

    status = HTTPStatus.REQUEST_TIMEOUT


def render_refusal(error: StackError) -> bytes:
    """Return the whole HTTP/1.1 response to an error, after which the connection is closed."""
    response = error_response(error)
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode()]
    lines += [b"%b: %b" % header for header in response.raw_headers]
    return b"\r\n".join([*lines, b"connection: close", b"", bytes(response.body)])


BAD_REQUEST: Final = render_refusal(InvalidRequest("We could not parse your request as HTTP/1.1."))
HEAD_TOO_LARGE: Final = render_refusal(
    _HeadTooLarge("The head of your request is too large: send at most 64 KiB in at most 256 headers and trailers.")
)
TOO_SLOW: Final = render_refusal(_TooSlow("The rest of your request did not come in time."))
OVERLOADED: Final = render_refusal(
    Overloaded("Too many connections wait here for their first request. Try again in a moment.", retry_after_s=1)
)
