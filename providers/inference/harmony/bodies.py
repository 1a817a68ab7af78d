"""Bodies of Harmony messages, streamed as deltas: text, a call, or content to ignore."""

import json
import re
from codecs import getincrementaldecoder
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Literal

from apis.chat import ChatCustomTool, ChatGrammarFormat, NativeTool, NativeToolName
from apis.deltas import Delta, ReasoningDelta, TextDelta, TokenLogprob, ToolArgumentsDelta, ToolCallStart
from apis.wire.base import Phase
from providers.inference.chat_completions.custom_tools import CustomInputReader
from providers.inference.harmony.header import Callee, Channel
from providers.inference.harmony.token_cache import MessageKey, call_to_key, name_to_recipient, text_to_key
from providers.inference.harmony.vocabulary import CALL, END

WRAPPED_INPUT_PREFIX: Final = '{"input":"'
MAX_WRAPPED_PREFIX_CHARS: Final = 64
NO_ARGUMENTS: Final = "{}"
_FENCE: Final = re.compile(r"`{3,}+(?:json)?\s*+(\{.*\})\s*`{3,}+\s*+", re.DOTALL | re.IGNORECASE)
PHASES: Final[dict[Channel, Phase]] = {"commentary": "commentary", "final": "final_answer"}

_Decoder: Final = getincrementaldecoder("utf-8")
_TextTarget = tuple[Literal["said", "called"], str]


class DeltaBuffer:
    """Collects deltas; text added to the same message before the next `take_deltas` becomes one delta."""

    def __init__(self) -> None:
        self._deltas: list[Delta] = []
        self._target: _TextTarget | None = None
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._last_target: _TextTarget | None = None
        self._begins_message = False

    def start_call(self, call_start: ToolCallStart) -> None:
        self._flush()
        self._deltas.append(call_start)
        self._last_target = ("called", call_start.id)

    def add_text(self, target: _TextTarget, text: str, logprobs: Sequence[TokenLogprob] = ()) -> None:
        if target != self._target:
            self._flush()
        self._target = self._last_target = target
        self._texts.append(text)
        self._logprobs += logprobs

    def begin_message(self, target: _TextTarget) -> None:
        """Begin a message. If clients would see it as a continuation of the previous one, its first delta says so."""
        if target == self._last_target:
            self._flush()
            self._begins_message = True

    def take_deltas(self) -> list[Delta]:
        self._flush()
        done, self._deltas = self._deltas, []
        return done

    def _flush(self) -> None:
        text, logprobs = "".join(self._texts), tuple(self._logprobs)
        match self._target:
            case None:
                pass
            case ("called", id_):
                self._deltas.append(ToolArgumentsDelta(id_, text))
            case (_, "analysis"):
                self._deltas.append(ReasoningDelta(text, self._begins_message))
            case (_, channel):
                phase = PHASES["commentary" if channel == "commentary" else "final"]
                self._deltas.append(TextDelta(text, logprobs, phase, self._begins_message))
        if self._target is not None:
            self._target, self._texts, self._logprobs, self._begins_message = None, [], [], False


class IgnoredBody:
    """Body of a message that the model writes in the name of a user or a tool."""

    end_token: Final = END
    is_stopped: Final = False

    def feed(self, data: bytes, buffer: DeltaBuffer, logprob: TokenLogprob | None = None) -> None:
        pass

    def finish(self, buffer: DeltaBuffer) -> None:
        pass

    def message_key(self) -> MessageKey | None:
        return None


class DeferredBody:
    """Body whose end says what it is: text on a channel that the format does not have, or several calls at once."""

    end_token: Final = END
    is_stopped: Final = False

    def __init__(self, recipient: str | None) -> None:
        self.recipient = recipient
        self.pieces: list[tuple[bytes, TokenLogprob | None]] = []

    def feed(self, data: bytes, buffer: DeltaBuffer, logprob: TokenLogprob | None = None) -> None:
        self.pieces.append((data, logprob))

    def finish(self, buffer: DeltaBuffer) -> None:
        pass

    def message_key(self) -> MessageKey | None:
        return None

    def read_calls(self) -> list[tuple[str, bytes]]:
        """Return the recipient and the arguments of each call, or an empty list where the body is no whole list."""
        try:
            value: Any = json.loads(_remove_fence(b"".join(data for data, _ in self.pieces).decode()))
            return [_read_use(use) for use in value["tool_uses"]]
        except (ValueError, TypeError, KeyError, RecursionError):
            return []


def _read_use(use: Any) -> tuple[str, bytes]:
    match use:
        case {"recipient_name": str(recipient), "parameters": {**parameters}}:
            return recipient, json.dumps(parameters, ensure_ascii=False).encode()
        case _:
            raise ValueError("no call")


class TextBody:
    """Reasoning, a preamble or the answer. An answer is stopped where the first of the stop strings begins."""

    end_token: Final = END

    def __init__(self, channel: Channel, stop_strings: Sequence[str]) -> None:
        self.channel: Channel = channel
        self.is_stopped = False
        self.stop_string: str | None = None
        """The one that stopped it."""
        self._stop_strings = stop_strings if channel == "final" else ()
        self._decoder = _Decoder("replace")
        self._pending_text = ""
        self._texts: list[str] = []
        self._released_chars = 0
        self._pending_logprobs: deque[tuple[int, TokenLogprob]] = deque()

    def feed(self, data: bytes, buffer: DeltaBuffer, logprob: TokenLogprob | None = None) -> None:
        if logprob is not None and self.channel == "final":
            self._pending_logprobs.append((self._released_chars + len(self._pending_text), logprob))
        self._pending_text += self._decoder.decode(data)
        stop_at, self.stop_string = min(
            ((at, stop) for stop in self._stop_strings if stop and (at := self._pending_text.find(stop)) >= 0),
            default=(-1, None),
        )
        self.is_stopped = stop_at >= 0
        self._release(stop_at if self.is_stopped else self._certain_chars(), buffer)

    def finish(self, buffer: DeltaBuffer) -> None:
        self._pending_text += self._decoder.decode(b"", final=True)
        self._release(len(self._pending_text), buffer)

    def message_key(self) -> MessageKey | None:
        return text_to_key(self.channel, "".join(self._texts))

    def _certain_chars(self) -> int:
        """Return the number of characters before the first place where a stop string may have begun."""
        pending = self._pending_text
        for at in range(len(pending)):
            if any(stop.startswith(pending[at:]) for stop in self._stop_strings):
                return at
        return len(pending)

    def _release(self, count: int, buffer: DeltaBuffer) -> None:
        if not count:
            return
        text, self._pending_text = self._pending_text[:count], self._pending_text[count:]
        self._released_chars += count
        logprobs: list[TokenLogprob] = []
        while self._pending_logprobs and self._pending_logprobs[0][0] < self._released_chars:
            logprobs.append(self._pending_logprobs.popleft()[1])
        if not self._texts:
            buffer.begin_message(("said", self.channel))
        self._texts.append(text)
        buffer.add_text(("said", self.channel), text, logprobs)


class CallBody:
    """Body of a call. A custom tool receives raw text, even if the model wrapped it as JSON."""

    end_token: Final = CALL
    is_stopped: Final = False

    def __init__(self, id_: str, callee: Callee, content_type: str | None, buffer: DeltaBuffer) -> None:
        self._id = id_
        self._callee = callee
        self._input_reader = _build_input_reader(callee, content_type)
        self._decoder = _Decoder("replace")
        self._written: list[str] = []
        self._texts: list[str] = []
        buffer.start_call(ToolCallStart(id_, callee.name, callee.custom))

    def feed(self, data: bytes, buffer: DeltaBuffer, logprob: TokenLogprob | None = None) -> None:
        self._read(data, buffer)

    def finish(self, buffer: DeltaBuffer) -> None:
        self._read(b"", buffer, final=True)
        self._add_text(self._input_reader.finish(), buffer)

    def is_whole(self, *, is_ended: bool) -> bool:
        """Return true if nothing can be missing in a call that its own token does not end. Another token ends what is
        no JSON, or blank."""
        written = "".join(self._written)
        if not written.strip() or not self._is_json:
            return is_ended
        try:
            json.loads(_remove_fence(written))
        except (ValueError, RecursionError):
            return False
        return True

    def complete(self, buffer: DeltaBuffer) -> None:
        """Give a whole call of a function without arguments an empty object."""
        if not self._callee.custom and not self._texts:
            self._add_text(NO_ARGUMENTS, buffer)

    def message_key(self) -> MessageKey | None:
        tool = self._callee.tool
        recipient = name_to_recipient(
            self._callee.name, {tool.type} if isinstance(tool, NativeTool) else set[NativeToolName]()
        )
        return call_to_key(recipient, "".join(self._texts), custom=self._callee.custom)

    @property
    def _is_json(self) -> bool:
        reader = self._input_reader
        return isinstance(reader, CustomInputReader | _ArgumentsReader) or (
            isinstance(reader, _MaybeWrappedInputReader) and reader.is_wrapped
        )

    def _read(self, data: bytes, buffer: DeltaBuffer, *, final: bool = False) -> None:
        text = self._decoder.decode(data, final=final)
        self._written.append(text)
        self._add_text(self._input_reader.feed(text), buffer)

    def _add_text(self, text: str, buffer: DeltaBuffer) -> None:
        if text:
            self._texts.append(text)
            buffer.add_text(("called", self._id), text)


MessageBody = TextBody | CallBody | IgnoredBody | DeferredBody


class _PlainInputReader:
    def feed(self, text: str) -> str:
        return text

    def finish(self) -> str:
        return ""


class _ArgumentsReader:
    """Passes JSON through, without blanks before it: of a call without arguments nothing else may remain. A fence of
    Markdown around a whole object is taken off."""

    def __init__(self) -> None:
        self._is_begun = False
        self._fenced = ""

    def feed(self, text: str) -> str:
        text = text if self._is_begun else text.lstrip()
        if self._fenced or (not self._is_begun and text.startswith("`")):
            self._fenced += text
            text = ""
        self._is_begun = self._is_begun or bool(text or self._fenced)
        return text

    def finish(self) -> str:
        return _remove_fence(self._fenced)


def _remove_fence(text: str) -> str:
    """Return the JSON object in the fence; a text that is none in a fence stays as it is."""
    fenced = _FENCE.fullmatch(text.strip())
    try:
        if fenced is not None and json.loads(fenced[1]) is not None:
            return fenced[1]
    except (ValueError, RecursionError):
        pass
    return text


class _MaybeWrappedInputReader:
    """Passes text through, unless it turns out to be JSON that wraps the text."""

    def __init__(self) -> None:
        self._buffer = ""
        self._input_reader: CustomInputReader | _PlainInputReader | None = None

    def feed(self, text: str) -> str:
        if self._input_reader is not None:
            return self._input_reader.feed(text)
        self._buffer += text
        start = "".join(self._buffer[:MAX_WRAPPED_PREFIX_CHARS].split())
        if WRAPPED_INPUT_PREFIX.startswith(start) and len(self._buffer) < MAX_WRAPPED_PREFIX_CHARS:
            return ""
        self._input_reader = CustomInputReader() if start.startswith(WRAPPED_INPUT_PREFIX) else _PlainInputReader()
        pending, self._buffer = self._buffer, ""
        return self._input_reader.feed(pending)

    def finish(self) -> str:
        return self._buffer if self._input_reader is None else self._input_reader.finish()

    @property
    def is_wrapped(self) -> bool:
        """True once the text has turned out to be wrapped."""
        return isinstance(self._input_reader, CustomInputReader)


def _build_input_reader(
    callee: Callee, content_type: str | None
) -> CustomInputReader | _MaybeWrappedInputReader | _PlainInputReader | _ArgumentsReader:
    tool = callee.tool
    if not isinstance(tool, ChatCustomTool):
        return _PlainInputReader() if callee.custom else _ArgumentsReader()
    if content_type == "json":
        return CustomInputReader()
    return _PlainInputReader() if isinstance(tool.custom.format, ChatGrammarFormat) else _MaybeWrappedInputReader()
