"""The answers of an images server, checked before anything is believed: size, base64, and the image itself."""

import base64
import binascii
import math
from collections.abc import Mapping
from typing import Any, Final, cast

import orjson

from apis.documents.reader import UnreadableFile, image_media_type
from apis.errors import ImageRefused, ToolFailed
from apis.image_generator import MAX_PROMPT_CHARS, GeneratedImage, ImageUsage

_MAX_NOTE_CHARS: Final = 500
_MAX_TOKENS: Final = 10**9
_QUALITIES: Final = ("low", "medium", "high", "xhigh", "max", "auto")
_BACKGROUNDS: Final = ("transparent", "opaque", "auto")


def encoded_size(size_bytes: int) -> int:
    """Return the bytes of base64 that stand for so many bytes."""
    return 4 * math.ceil(size_bytes / 3)


def parse_answer(body: bytes) -> dict[str, Any]:
    """Return the object of an answer or of an event. Raises ToolFailed for an error in its place."""
    answer = parse_json(body)
    if answer.get("type") == "error" or answer.get("error"):
        message, code = parse_error(answer.get("error") or answer)
        raise ToolFailed(message or "The images server failed.", code=code)
    return answer


def parse_json(body: bytes) -> dict[str, Any]:
    """Return the object that a body holds. Raises ToolFailed for any other body."""
    try:
        value: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise ToolFailed("The images server answered with something that is no JSON object.")
    return cast(dict[str, Any], value)


def find_image(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the first image of an answer without a stream. Raises ToolFailed if there is none."""
    images: Any = answer.get("data")
    first = cast(list[Any], images)[0] if isinstance(images, list) and images else None
    if not isinstance(first, dict):
        raise ToolFailed("The images server answered without an image.")
    return cast(dict[str, Any], first)


def check_image(base64_data: Any, max_bytes: int) -> tuple[str, str]:
    """Return the base64 of an image and the media type that its bytes have. Raises ToolFailed for anything else, and
    for an image of more than `max_bytes`."""
    if not isinstance(base64_data, str):
        raise ToolFailed("The images server answered without an image.")
    head, comma, rest = base64_data.partition(",")
    text = rest if comma and head.startswith("data:") else base64_data
    if len(text) > encoded_size(max_bytes):
        raise ToolFailed(f"The image of the images server has more than {max_bytes} bytes.")
    try:
        return text, image_media_type(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError):
        raise ToolFailed("The images server sent an image that is not base64.") from None
    except UnreadableFile as exc:
        raise ToolFailed(f"The images server sent something that is no image. {exc.message}") from None


def build_image(
    base64_data: str, media_type: str, image: Mapping[str, Any], answer: Mapping[str, Any]
) -> GeneratedImage:
    """Return a checked image with the facts that the server adds, in `image` or in the `answer` around it."""
    facts = {**answer, **image}
    size, prompt = facts.get("size"), facts.get("revised_prompt")
    return GeneratedImage(
        base64_data,
        media_type,
        size=size if isinstance(size, str) and len(size) <= 16 else None,
        quality=_one_of(facts.get("quality"), _QUALITIES),
        background=_one_of(facts.get("background"), _BACKGROUNDS),
        revised_prompt=prompt[:MAX_PROMPT_CHARS] if isinstance(prompt, str) and prompt else None,
        usage=_parse_usage(facts.get("usage")),
    )


def error_of_answer(status: int, body: bytes) -> ToolFailed:
    """Return the error of an answer that is not a 200. The server's own words are passed on for a wrong request only:
    others may show private facts."""
    if status in (401, 403):
        return ToolFailed("The images server refused the key.")
    if status == 429:
        return ToolFailed("The images server allows no more images just now; try again later.")
    if status >= 500:
        return ToolFailed(f"The images server failed (HTTP {status}); try again later.")
    try:
        error: Any = parse_json(body).get("error")
    except ToolFailed:
        error = None
    message, code = parse_error(error)
    kind = ImageRefused if status >= 400 else ToolFailed
    return kind(message or f"The images server answered with HTTP {status}.", code=code)


def parse_error(error: Any) -> tuple[str | None, str | None]:
    """Return the message and the code of an error object, each on one line and of bounded length."""
    if not isinstance(error, dict):
        return (f"The images server refused the request: {_line(error)}" if isinstance(error, str) else None), None
    fields = cast(dict[str, Any], error)
    message, code = fields.get("message"), fields.get("code")
    return (
        f"The images server refused the request: {_line(message)}" if isinstance(message, str) and message else None,
        _line(code)[:64] if isinstance(code, str) and code else None,
    )


def _parse_usage(usage: Any) -> ImageUsage | None:
    if not isinstance(usage, dict):
        return None
    fields = cast(dict[str, Any], usage)
    details: Any = fields.get("input_tokens_details")
    parts = cast(dict[str, Any], details) if isinstance(details, dict) else {}
    return ImageUsage(
        input_tokens=_count(fields.get("input_tokens")),
        input_image_tokens=_count(parts.get("image_tokens")),
        input_text_tokens=_count(parts.get("text_tokens")),
        output_tokens=_count(fields.get("output_tokens")),
    )


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_TOKENS else 0


def _one_of(value: Any, choices: tuple[str, ...]) -> str | None:
    return value if isinstance(value, str) and value in choices else None


def _line(text: str) -> str:
    return " ".join(text[: 4 * _MAX_NOTE_CHARS].split())[:_MAX_NOTE_CHARS]
