"""The table of how engines deviate from chat completions, and how each deviation is read.

`chunks` decodes what nearly every server sends. A chunk of another form is brought into that form here:

    place of the answer    `message`, `text` or the choice itself in place of `delta`; `message` with `done`
    form of the text       a list of parts, one part, a number, a boolean
    form of the reasoning  `reasoning`, `reasoning_content`, `reasoning_text`, `thinking`, `thinking_blocks`,
                           `reasoning_details`: a text, an object, a list of them, or parts of the content
    calls                  `function_call`, one call that is no list, the call's fields without `function`, parts of the
                           content; arguments as an object; an index, an id or a name of another type
    finish reasons         in any letter case, with words of other APIs, empty, as an object
    errors                 `error` as text or object, `object: error`, `type: error`, `errors`, `detail`, `message`;
                           that of a choice; none where they are empty or say that all is well
    data of an event       several chunks one after another, each perhaps after a further `data:`, or in a list; control
                           characters in texts
    usage                  in a choice, in `x_groq`, in `timings`; the names that `usage` has

What calls say twice is in `streamed_calls`.

A picture, and a part that holds something of an unknown kind, end the answer with an error, because an answer of which
a part could not be read is not complete. The texts before and after it are read.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, cast

from apis.deltas import FinishReason
from apis.errors import UpstreamError

EndReason = FinishReason | Literal["error"]
"""A finish reason, or the failure of the generation."""
Fields = Mapping[str, Any]

_TEXT_FIELDS: Final = ("content", "text", "output_text")
_REASONING_FIELDS: Final = (
    *(
        "reasoning",
        "reasoning_content",
        "reasoning_text",
        "thinking",
        "thinking_blocks",
        "reasoning_details",
        "thought",
    ),
)
_MESSAGE_FIELDS: Final = frozenset(
    (*_TEXT_FIELDS, *_REASONING_FIELDS, "refusal", "tool_calls", "function_call", "tool_call")
)
UNREAD_FIELD: Final = "images"
"""Field of a message that is not read. That of a normalized one describes all that could not be read."""
_PART_TEXTS: Final = ("text", "content", "output_text", "value", "parts", "refusal", "thinking", "reasoning", "summary")
"""Fields of a part that may hold its text, as text or as parts again."""
_REASONING_PARTS: Final = re.compile("think|thought|reason", re.IGNORECASE)
_CALL_PARTS: Final = frozenset(("tool_use", "tool_call", "tool-call", "function", "function_call"))
_SILENT_PARTS: Final = frozenset(("reference", "citation", "annotation", "signature", "redacted_thinking"))
"""Types of parts that hold nothing to read."""
_ENCRYPTED_PARTS: Final = re.compile("encrypted", re.IGNORECASE)
_MAX_DEPTH: Final = 8
"""Levels of parts within parts."""

_SILENT_FIELDS: Final = frozenset(
    (
        *("role", "name", "id", "type", "object", "index", "finish_reason", "native_finish_reason", "stop_reason"),
        *(
            "finish_details",
            "matched_stop",
            "logprobs",
            "token_ids",
            "annotations",
            "citations",
            "content_filter_results",
        ),
        *("provider_specific_fields", "extra_content", "prefix", "delta", "message", "seed", "flags", "hidden_states"),
    )
)
"""Fields of a choice or a message that say something about the answer, and are no part of it."""

_UNFINISHED_WORDS: Final = re.compile(
    r"(?:null|none|nil|undefined|(?:finishreason)?unspecified|(?:not|un)(?:finished|stopped)|inprogress|running"
    r"|generating|streaming|pending|continue)?"
)
_LENGTH_WORDS: Final = re.compile(r"length|maxtoken|max.*token|limit|contextwindow|truncat|incomplete|cutoff")
_FILTER_WORDS: Final = re.compile(
    r"filter|safety|recitation|blocklist|blocked|prohibited|spii|sensitive|refusal|moderation|guardrail|policy"
)
_ERROR_WORDS: Final = re.compile(
    r"error|abort|cancel|fail|timeout|timedout|malformed|insufficient|interrupt|crash|overload|unavailable|disconnect"
    r"|kill|preempt|exception|invalid|ratelimit|quota|shutdown|broken|repetition|unexpected|evicted|rejected"
)
_CALL_WORDS: Final = re.compile(r"tool|function")
_MAX_REASON_CHARS: Final = 64


def read_finish_reason(said: str) -> EndReason | None:
    """Return what a server means by its finish reason: None for one that says nothing, and `stop` for one that names
    neither a limit nor a failure."""
    if said == "stop":
        return "stop"
    word = re.sub("[^a-z]", "", said[:_MAX_REASON_CHARS].lower())
    if _UNFINISHED_WORDS.fullmatch(word):
        return None
    if _ERROR_WORDS.search(word):
        return "error"
    if _LENGTH_WORDS.search(word):
        return "length"
    if _FILTER_WORDS.search(word):
        return "content_filter"
    return "tool_calls" if _CALL_WORDS.search(word) else "stop"


def find_stop_sequence(said: object, stop: str | Sequence[str] | None) -> str | None:
    """Return the text of the request's `stop` that a server names as the end of its answer."""
    sequences = [stop] if isinstance(stop, str) else stop or ()
    return said if isinstance(said, str) and said in sequences else None


# --- chunks ----------------------------------------------------------------------------------------------------------


def load_json(payload: bytes) -> Any:
    """Return a JSON text that may have lone surrogates, control characters and wrong UTF-8. Raises ValueError and
    RecursionError."""
    return _DECODER.decode(payload.decode("utf-8", "replace"))


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


_DECODER: Final = json.JSONDecoder(parse_constant=_refuse_constant, strict=False)
_BETWEEN_TEXTS: Final = re.compile(r"(?:\s|data:)*")


def split_texts(payload: bytes) -> list[bytes]:
    """Return the JSON texts of the data of an event that holds several, one after another or in a list, each perhaps
    after another `data:`, and `[DONE]` after them. The list is empty where the data are no such texts."""
    text = payload.decode("utf-8", "replace").strip()
    body = text.removesuffix("[DONE]")
    at = _skip_between(body, 0)
    is_split = at > 0 or body != text
    texts: list[bytes] = []
    try:
        while at < len(body):
            value, end = _DECODER.raw_decode(body, at)
            entries = cast(list[object], value) if isinstance(value, list) else []
            if not (isinstance(value, dict) or (entries and all(isinstance(entry, dict) for entry in entries))):
                return []
            is_split = is_split or bool(texts or entries)
            texts += [json.dumps(entry).encode() for entry in entries] or [body[at:end].encode("utf-8", "replace")]
            at = _skip_between(body, end)
    except (ValueError, RecursionError):
        return []
    if body != text:
        texts.append(b"[DONE]")
    return texts if is_split else []


def _skip_between(text: str, at: int) -> int:
    match = _BETWEEN_TEXTS.match(text, at)
    return match.end() if match else at


def normalize_chunk(value: object, *, is_whole: bool = False) -> dict[str, Any]:
    """Return a chunk, or a completion that `is_whole`, in the form that the reader decodes. Raises UpstreamError for a
    value that is no chunk, and for a part of an unknown kind."""
    if not isinstance(value, dict):
        raise _invalid_chunk()
    fields = cast(Fields, value)
    choices = fields.get("choices")
    if choices is None and isinstance(fields.get("message"), dict) and "done" in fields:
        choices = [{"message": fields["message"], "finish_reason": _done_reason(fields)}]
    if isinstance(choices, dict) and choices:
        choices = [cast(Fields, choices)]
    if choices is not None and not isinstance(choices, list):
        raise _invalid_chunk()
    is_whole = is_whole and "done" not in fields and fields.get("object") != "chat.completion.chunk"
    return {
        "choices": [_normalize_choice(choice, is_whole=is_whole) for choice in cast(list[object], choices or [])],
        "usage": fields.get("usage") or _counts(fields),
        "error": None
        if choices and not fields.get("error")
        else read_error(fields, has_answer=bool(cast(object, choices)) or bool(fields.get("usage"))),
    }


def _normalize_choice(value: object, *, is_whole: bool) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _invalid_chunk()
    choice = cast(Fields, value)
    reason = _normalize_reason(choice.get("finish_reason"))
    places = (
        choice.get("delta"),
        choice.get("message"),
        {name: choice[name] for name in _MESSAGE_FIELDS & choice.keys()},
    )
    at = next((at for at, place in enumerate(places) if _holds_something(place)), 0)
    is_message = at > 0
    if is_whole and is_message and not reason:
        reason = "stop"  # a message that is whole has its end
    return {
        "index": read_whole_number(choice.get("index")) or 0,
        "delta": _normalize_message(places[at]),
        "is_message": is_message,
        "finish_reason": reason,
        "logprobs": _normalize_logprobs(choice.get("logprobs")),
        "usage": choice.get("usage"),
        "error": choice.get("error"),
    }


def _holds_something(place: object) -> bool:
    """Return true if there is a part of the answer in this place."""
    if isinstance(place, dict):
        fields = cast(Fields, place)
        return any(fields.get(name) not in (None, "", []) for name in _MESSAGE_FIELDS)
    return place not in (None, "", [])


def _normalize_reason(reason: object) -> str | None:
    if isinstance(reason, dict):
        fields = cast(Fields, reason)
        reason = next((fields[name] for name in ("type", "reason", "value") if isinstance(fields.get(name), str)), None)
    if isinstance(reason, str):
        return reason
    return "stop" if reason else None


def _done_reason(fields: Fields) -> object:
    return (fields.get("done_reason") or "stop") if fields.get("done") else None


def _counts(fields: Fields) -> dict[str, Any] | None:
    """Return the counts that Ollama's own API sends next to the message."""
    if "eval_count" not in fields:
        return None
    return {"prompt_tokens": fields.get("prompt_eval_count"), "completion_tokens": fields["eval_count"]}


def _normalize_logprobs(logprobs: object) -> object:
    """Return log probabilities of the usual form. Others are left out: they are no part of the answer."""
    if not isinstance(logprobs, dict):
        return None
    content = cast(Fields, logprobs).get("content")
    return {"content": cast(object, content)} if isinstance(content, list) else None


def has_unread_fields(value: object) -> bool:
    """Return true if a choice of this chunk holds something of which the reader knows nothing."""
    choices = cast(Fields, value).get("choices") if isinstance(value, dict) else None
    for choice in cast(list[object], choices) if isinstance(choices, list) else []:
        if not isinstance(choice, dict):
            return True
        fields = cast(Fields, choice)
        for holder in (fields, fields.get("delta"), fields.get("message")):
            if isinstance(holder, dict) and any(
                entry and isinstance(entry, str | list | dict) and name not in _SILENT_FIELDS
                for name, entry in cast(Fields, holder).items()
            ):
                return True
    return False


# --- messages --------------------------------------------------------------------------------------------------------


def _normalize_message(message: object) -> dict[str, Any]:
    if not isinstance(message, dict):
        return {"content": _scalar_to_text(message)}
    fields = cast(Fields, message)
    reader = _MessageReader()
    if fields.get("images"):
        reader.unread = "a picture"
    text = next((fields[name] for name in _TEXT_FIELDS if fields.get(name) not in (None, "")), None)
    reasoning = next((fields[name] for name in _REASONING_FIELDS if fields.get(name)), None)
    if reasoning is not None:
        reader.read(reasoning, "reasoning")
    if text is not None:
        reader.read(text, "content")
    if fields.get("refusal"):
        reader.read(fields["refusal"], "refusal")
    for name in ("tool_calls", "tool_call", "function_call"):
        calls = fields.get(name)
        reader.calls += cast(list[object], calls) if isinstance(calls, list) else [calls] if calls else []
    delta: dict[str, Any] = {name: "".join(texts) for name, texts in reader.texts.items() if texts}
    delta.setdefault("content", "" if "content" in fields else None)
    delta["tool_calls"] = reader.calls
    delta[UNREAD_FIELD] = reader.unread
    return delta


class _MessageReader:
    """Collects the texts by kind, and the calls, of a message's fields. `unread` describes a part that cannot be
    read."""

    def __init__(self) -> None:
        self.texts: dict[str, list[str]] = {"content": [], "reasoning": [], "refusal": []}
        self.calls: list[object] = []
        self.unread = ""

    def read(self, value: object, kind: str, depth: int = 0) -> None:
        """Read a text, a part or a list of parts."""
        if depth > _MAX_DEPTH:
            raise _invalid_chunk()
        if isinstance(value, list):
            parts = cast(list[object], value)
            if kind == "content" and parts and not any(map(_is_part, parts)):
                self.texts[kind].append(_value_to_json(parts))
                return
            for part in parts:
                self.read(part, kind, depth + 1)
        elif isinstance(value, dict):
            self._read_part(cast(Fields, value), kind, depth)
        elif (text := _scalar_to_text(value)) is not None:
            self.texts[kind].append(text)

    def _read_part(self, part: Fields, kind: str, depth: int) -> None:
        part_type = part.get("type") if isinstance(part.get("type"), str) else ""
        assert isinstance(part_type, str)
        if part_type in _CALL_PARTS:
            self.calls.append(part)
            return
        if part_type in _SILENT_PARTS or _ENCRYPTED_PARTS.search(part_type):
            return
        if part_type == "refusal":
            kind = "refusal"
        elif kind == "content" and (_REASONING_PARTS.search(part_type) or part.get("thought") is True):
            kind = "reasoning"
        name = next((name for name in _PART_TEXTS if part.get(name) is not None), None)
        if name is not None:
            is_thought = kind == "content" and not part_type and name in ("thinking", "reasoning")
            self.read(part[name], "reasoning" if is_thought else kind, depth + 1)
        elif kind == "content" and not part_type and depth == 0:
            self.texts[kind].append(_value_to_json(part))  # an answer in JSON that was not written as text
        elif kind == "content" and len(part) > 1 and part.keys().isdisjoint(_PART_TEXTS):
            self.unread = f"a part of type '{part_type[:32]}'" if part_type else "a part of an unknown kind"


def _is_part(value: object) -> bool:
    """Return true for a text, and for an object with a type or a text of its own."""
    if isinstance(value, dict):
        fields = cast(Fields, value)
        return "type" in fields or not fields.keys().isdisjoint(_PART_TEXTS)
    return isinstance(value, str)


def _scalar_to_text(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return _value_to_json(value)


def _value_to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


_CALL_MARKS: Final = re.compile(
    r"<\|?/?(?:tool_call|tool_use|tool▁call|｜tool▁call|function_call|function=|invoke\b|python_tag\||action_start\|)"
    r"|<｜tool▁call|\[/?TOOL_(?:CALLS?|REQUEST)\]|\bfunctools\[|\bto=functions\.|<\|plugin\|>",
    re.IGNORECASE,
)
_JSON_CALL: Final = re.compile(
    r'(?:```(?:json)?\s*)?(?:\[\s*)?\{\s*"(?:name|function|tool|tool_name|type)"\s*:.*"(?:arguments|parameters|args|input)"\s*:',
    re.DOTALL,
)


def holds_call(text: str) -> bool:
    """Return true for a text with the marks of a call that its server did not take out of it, or that is one in
    JSON."""
    return _CALL_MARKS.search(text) is not None or _JSON_CALL.match(text.lstrip()) is not None


# --- calls -----------------------------------------------------------------------------------------------------------


class CallPart:
    """One entry of `tool_calls`: a call, or a piece of one. `index` is None, and the texts are empty, where the server
    sent nothing that can be used."""

    __slots__ = ("arguments", "call_id", "index", "name")

    def __init__(self, entry: object) -> None:
        fields = cast(Fields, entry if isinstance(entry, dict) else {})
        function: object = fields.get("function")
        inner = cast(Fields, function) if isinstance(function, dict) else fields
        self.index = read_whole_number(fields.get("index"))
        self.call_id = _read_label(fields.get("id") or inner.get("id") or fields.get("call_id"))
        self.name = _read_label(inner.get("name") or (function if isinstance(function, str) else fields.get("name")))
        self.arguments = _read_arguments(inner) or _read_arguments(fields)


def _read_arguments(fields: Fields) -> str:
    for name in ("arguments", "parameters", "input", "args"):
        arguments = fields.get(name)
        if arguments is not None and arguments != "":
            return arguments if isinstance(arguments, str) else _value_to_json(arguments)
    return ""


def _read_label(value: object) -> str:
    if isinstance(value, str):
        return value.strip()
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else ""


def read_whole_number(value: object) -> int | None:
    """Return a number that a server sent as a number of any kind, a boolean or a text; None for anything else."""
    if isinstance(value, str):
        try:
            value = float(value[:32])
        except ValueError:
            return None
    if isinstance(value, int | float) and value == value and abs(value) < 2**31 and value == int(value):  # noqa: PLR0124 - not for NaN
        return int(value)
    return None


# --- errors ----------------------------------------------------------------------------------------------------------


_SUCCESS_WORDS: Final = re.compile(r"(?:ok|okay|success(?:ful)?|succeeded|none|null|no[ _]?error)?", re.IGNORECASE)
_SUCCESS_CODES: Final = re.compile(r"200|ok|success", re.IGNORECASE)


def read_error(fields: Fields, *, is_body: bool = False, has_answer: bool = False) -> Any:
    """Return the error in an object, in any form; None where it is none. In an object that is a body of its own, a
    message alone is one. The code of success is believed next to a part of the answer."""
    error = fields.get("error")
    if not error and isinstance(fields.get("errors"), list) and fields["errors"]:
        error = fields["errors"][0]
    if not _is_no_error(error, has_answer=has_answer):
        return {**_error_codes(fields), **cast(Fields, error)} if isinstance(error, dict) else _named(error, fields)
    if "error" in (fields.get("object"), fields.get("type")):
        return _named(_find_message(fields), fields)
    if fields.get("detail"):
        return _named(_find_message(fields), fields)
    message = _find_message(fields)
    if not is_body and _is_no_error(fields, has_answer=has_answer):
        return None
    return _named(message, fields) if message and (is_body or _error_codes(fields)) else None


def _is_no_error(error: object, *, has_answer: bool) -> bool:
    """Return true for an error that is empty, or that says that all is well."""
    if not isinstance(error, dict):
        return not error or (isinstance(error, str) and _SUCCESS_WORDS.fullmatch(error.strip()) is not None)
    fields = cast(Fields, error)
    code, message = _error_codes(fields).get("code"), _find_message(fields)
    if not (code or message or fields.get("type")):
        return True
    if _SUCCESS_CODES.fullmatch(str(code)) and (has_answer or not message):
        return True
    says_success = message and _SUCCESS_WORDS.fullmatch(str(message).strip()) is not None
    return bool(says_success) and (code in (None, "", 0, "0") or _SUCCESS_CODES.fullmatch(str(code)) is not None)


def _named(message: object, fields: Fields) -> dict[str, Any]:
    return {**_error_codes(fields), "message": message, "type": fields.get("type"), "param": fields.get("param")}


def _error_codes(fields: Fields) -> dict[str, Any]:
    names = ("code", "status", "status_code", "statusCode", "error_code", "errorCode")
    name = next((name for name in names if fields.get(name) not in (None, "")), None)
    return {} if name is None else {"code": fields[name]}


def _find_message(fields: Fields) -> object:
    names = ("message", "detail", "msg", "error_msg", "error_message", "errorMessage", "title", "reason")
    return next((fields[name] for name in names if fields.get(name)), "")


def _invalid_chunk() -> UpstreamError:
    return UpstreamError("The inference server sent a chunk that is not valid.")
