"""Translate errors of an upstream for our clients. The upstream's own text is passed on only if it helps to correct the
request."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final, cast

import msgspec

from apis.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    ModelNotFound,
    PayloadTooLarge,
    RateLimited,
    StackError,
    UpstreamError,
    UpstreamTimeout,
)
from providers.inference.chat_completions.deviations import read_error

MAX_MESSAGE_CHARS: Final = 1024
MAX_REASON_CHARS: Final = 400
"""Characters of an upstream's own words that a client sees."""
MAX_RETRY_AFTER_S: Final = 3600.0

_CONTEXT_LENGTH_WORDS: Final = re.compile(
    r"context_length_exceeded|exceed_context_size|context[ _](?:length|window|size)|max_model_len"
    r"|(?:prompt|input) is too long|longer than the (?:maximum|max) model",
    re.IGNORECASE,
)
_CONTEXT_LIMIT: Final = re.compile(
    r"(?:maximum (?:context|model) length|context (?:length|window|size)|max_model_len|\bn_ctx)\D{0,40}?(\d{2,9})\b",
    re.IGNORECASE,
)
_NO_TOOL_PARSER: Final = re.compile("requires --enable-auto-tool-choice")
"""Words of vLLM without a parser of calls."""
_REFUSAL_TYPES: Final = re.compile("bad_?request|invalid_?request|validation", re.IGNORECASE)
_PRIVATE_WORDS: Final = re.compile(r"[a-z][a-z0-9+.-]{0,20}://\S+|(?<![\w.])(?:/[\w.-]+){2,}|[\w-]{40,}|Traceback.*")
_UNKNOWN_PATH_WORDS: Final = re.compile(rb'"detail" ?: ?"Not Found"|404 page not found|<html|<!doctype', re.IGNORECASE)
"""How servers and proxies say that they have no such path."""
_CONTROL_CHARS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


class UpstreamUnavailable(UpstreamError):
    """The upstream was unreachable, or failed before it generated anything; a retry is safe."""


class ConnectTimeout(UpstreamTimeout):
    """No connection within the limit; a retry is safe."""


def response_to_error(
    status: int, body: bytes, headers: Mapping[str, str], model: str, *, is_generation: bool = False
) -> StackError:
    """Return the error for a response other than 200. The names of `headers` are in lower case. A 404 to a request
    that `is_generation` means the model, unless the path itself is unknown to the server. The server's own words are
    notes of the error, for the log."""
    error = _map_response(status, body, headers, model, is_generation=is_generation)
    if text := clean_text(body.decode("utf-8", "replace"), MAX_MESSAGE_CHARS):
        error.add_note(text)
    return error


def _map_response(
    status: int, body: bytes, headers: Mapping[str, str], model: str, *, is_generation: bool
) -> StackError:
    detail = _parse_error_object(body)
    wait_s = parse_retry_after(headers.get("retry-after"))
    if status == 429:
        return RateLimited("The inference server is at its limit. Try again later.", retry_after_s=wait_s)
    if status == 404 and "model" in _join_error_fields(detail).lower():
        return ModelNotFound(model)
    if status == 404 and is_generation and not _UNKNOWN_PATH_WORDS.search(body[:MAX_MESSAGE_CHARS]):
        return ModelNotFound(model)
    if status == 413 and not _is_context_too_long(detail):
        return PayloadTooLarge("The request is larger than the inference server accepts.")
    if status in (400, 413, 422) and detail:
        return _build_invalid_request(detail)
    if status >= 500 or status in (408, 425):
        return UpstreamUnavailable(f"The inference server failed with HTTP status {status}.", retry_after_s=wait_s)
    hint = " Its api_key may be wrong." if status in (401, 403) else ""
    hint = " The base_url may be wrong: it usually ends with /v1." if status in (404, 405) else hint
    return UpstreamError(f"The inference server answered with HTTP status {status}.{hint}")


def failure_to_error(failure: object, model: str, *, is_whole_answer: bool = False) -> StackError:
    """Return the error for an `error` in a stream, in any form. One that `is_whole_answer` came with status 200 in
    place of an answer: unless it names a failure of the server, its reason is shown like that of a status 400."""
    detail = cast(dict[str, Any], failure) if isinstance(failure, dict) else {"message": failure}
    code = _read_code(detail)
    is_refusal = code in (400, 413, 422, "context_length_exceeded", "invalid_request_error")
    is_refusal = is_refusal or bool(not isinstance(code, int) and _REFUSAL_TYPES.search(str(detail.get("type"))))
    if is_refusal or _is_context_too_long(detail):
        return _build_invalid_request(detail)
    if code in (404, "model_not_found") and "model" in _join_error_fields(detail).lower():
        return ModelNotFound(model)
    if code in (429, "rate_limit_exceeded"):
        return RateLimited("The inference server is at its limit. Try again later.")
    reason = _read_reason(detail) if is_whole_answer and not isinstance(code, int) else ""
    error = UpstreamError(
        f"The inference server answered with an error: {reason}"
        if reason
        else "The inference server reported a failure while it generated."
    )
    error.add_note(_read_message(detail, MAX_MESSAGE_CHARS))
    return error


def _read_code(detail: Mapping[str, Any]) -> int | str | None:
    """Return the status or the code of an error, as a number where it is one."""
    code = next((code for name in ("code", "status") if (code := detail.get(name)) not in (None, "")), None)
    if isinstance(code, str) and code.strip().isdecimal():
        return int(code)
    return int(code) if isinstance(code, int | float) and code == code else code if isinstance(code, str) else None  # noqa: PLR0124 - not for NaN


def parse_retry_after(value: str | None) -> float | None:
    """Return the seconds of a Retry-After header, a number or a date, between 0 and one hour; None when it is
    neither."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            at = parsedate_to_datetime(value)
        except ValueError:
            return None
        seconds = (at.replace(tzinfo=at.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    return min(max(seconds, 0.0), MAX_RETRY_AFTER_S) if seconds == seconds else None  # noqa: PLR0124 - not for NaN


def _build_invalid_request(detail: dict[str, Any]) -> InvalidRequest:
    """Return the error for a request that the server refuses. Its reason helps to correct the request, so a short part
    of it is shown, without addresses, paths and long names, which are the operator's. The server's own words are a note
    of the error."""
    if _is_context_too_long(detail):
        limit = _CONTEXT_LIMIT.search(_join_error_fields(detail))
        tokens = f" of {limit[1]} tokens" if limit else ""
        error: InvalidRequest = ContextLengthExceeded(f"The input is longer than the model's context window{tokens}.")
    else:
        reason = _read_reason(detail)
        if _NO_TOOL_PARSER.search(reason):
            reason = f"{reason} Start that server with these options, or send no tools."
        error = InvalidRequest(
            f"The inference server refused the request: {reason}" if reason else "The inference server refused it."
        )
    error.add_note(_read_message(detail, MAX_MESSAGE_CHARS))
    return error


def _read_reason(detail: Mapping[str, Any]) -> str:
    return _PRIVATE_WORDS.sub("[...]", _read_message(detail, MAX_REASON_CHARS))


def _read_message(detail: Mapping[str, Any], limit: int) -> str:
    """Return the message of an error; that of FastAPI is a list with one for each field."""
    message = detail.get("message") or detail.get("msg") or detail.get("detail") or ""
    if isinstance(message, list):
        entries = cast(list[object], message)
        texts = [_read_entry(cast(dict[str, Any], each)) if isinstance(each, dict) else each for each in entries[:4]]
        message = "; ".join(str(text) for text in texts if text)
    elif isinstance(message, dict):
        message = cast(dict[str, Any], message).get("message") or ""
    return clean_text(str(message), limit)


def _read_entry(entry: Mapping[str, Any]) -> str:
    """Return the message of one field, with the path of the field."""
    path = entry.get("loc")
    names = [str(name) for name in cast(list[object], path) if name != "body"] if isinstance(path, list) else []
    text = str(entry.get("msg") or "")
    return f"{'.'.join(names)}: {text}" if names and text else text


def clean_text(text: str, limit: int) -> str:
    """Return at most `limit` characters of a text on one line, without control characters."""
    return " ".join(_CONTROL_CHARS.sub(" ", text[: 4 * limit]).split())[:limit]


def _is_context_too_long(detail: dict[str, Any]) -> bool:
    return _CONTEXT_LENGTH_WORDS.search(_join_error_fields(detail)) is not None


def _join_error_fields(detail: dict[str, Any]) -> str:
    return " ".join(str(detail.get(key, ""))[:4096] for key in ("code", "type", "param", "message"))


def _parse_error_object(body: bytes) -> dict[str, Any]:
    """Return the error object of a body in any form, or its fields; empty for a body that is no object."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    if not isinstance(value, dict):
        return {}
    fields = cast(dict[str, Any], value)
    error = read_error(fields, is_body=True)
    return cast(dict[str, Any], error) if isinstance(error, dict) else fields
