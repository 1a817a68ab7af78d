"""What stands in a Harmony message, as deltas while it is made: something said, a call, or what is to be ignored."""

from codecs import getincrementaldecoder
from collections import deque
from collections.abc import Sequence
from typing import Final, Literal

from apis.chat import CustomTool, GrammarFormat, Native, NativeTool, Tool
from apis.deltas import Delta, Reasoning, Text, TokenLogprob, ToolArguments, ToolCallStart
from apis.wire.base import Phase
from providers.inference.chat_completions.custom_tools import CustomInput
from providers.inference.harmony.header import Callee, Channel
from providers.inference.harmony.token_cache import MessageKey, call_to_key, name_to_recipient, said_to_key
from providers.inference.harmony.vocabulary import CALL, END

WRAPPING: Final = '{"input":"'
MAX_WRAPPING_CHARS: Final = 64
PHASES: Final[dict[Channel, Phase]] = {"commentary": "commentary", "final": "final_answer"}

_Decoder: Final = getincrementaldecoder("utf-8")
_Kind = tuple[Literal["said", "called"], str]


class Outlet:
    """Deltas in the making: what is added to the same message before it is taken becomes one."""

    def __init__(self) -> None:
        self._done: list[Delta] = []
        self._kind: _Kind | None = None
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._last: _Kind | None = None

    def start(self, delta: ToolCallStart) -> None:
        self._settle()
        self._done.append(delta)
        self._last = ("called", delta.id)

    def add(self, kind: _Kind, text: str, logprobs: Sequence[TokenLogprob] = ()) -> None:
        if kind != self._kind:
            self._settle()
        self._kind = self._last = kind
        self._texts.append(text)
        self._logprobs += logprobs

    def part(self, kind: _Kind) -> None:
        """A message begins: if it will be read on from the one before, then in a new line."""
        if kind == self._last:
            self.add(kind, "\n")

    def take(self) -> list[Delta]:
        self._settle()
        done, self._done = self._done, []
        return done

    def _settle(self) -> None:
        text, logprobs = "".join(self._texts), tuple(self._logprobs)
        match self._kind:
            case None:
                pass
            case ("called", id_):
                self._done.append(ToolArguments(id_, text))
            case (_, "analysis"):
                self._done.append(Reasoning(text))
            case (_, channel):
                self._done.append(Text(text, logprobs, PHASES["commentary" if channel == "commentary" else "final"]))
        self._kind, self._texts, self._logprobs = None, [], []


class Ignored:
    """The model speaks for a user or a tool."""

    mark_wanted: Final = END
    stopped: Final = False

    def feed(self, data: bytes, out: Outlet, logprob: TokenLogprob | None = None) -> None:
        pass

    def finish(self, out: Outlet) -> None:
        pass

    def key(self) -> MessageKey | None:
        return None


class Said:
    """A thought, a preamble or the answer. An answer is `stopped` where the first of the stop strings begins."""

    mark_wanted: Final = END

    def __init__(self, channel: Channel, stops: Sequence[str]) -> None:
        self.channel: Channel = channel
        self.stopped = False
        self._stops = stops if channel == "final" else ()
        self._decoder = _Decoder("replace")
        self._held = ""
        self._texts: list[str] = []
        self._released = 0
        self._marks: deque[tuple[int, TokenLogprob]] = deque()

    def feed(self, data: bytes, out: Outlet, logprob: TokenLogprob | None = None) -> None:
        if logprob is not None and self.channel == "final":
            self._marks.append((self._released + len(self._held), logprob))
        self._held += self._decoder.decode(data)
        found = min((at for stop in self._stops if stop and (at := self._held.find(stop)) >= 0), default=-1)
        self.stopped = found >= 0
        self._release(found if self.stopped else self._certain(), out)

    def finish(self, out: Outlet) -> None:
        self._held += self._decoder.decode(b"", final=True)
        self._release(len(self._held), out)

    def key(self) -> MessageKey | None:
        return said_to_key(self.channel, "".join(self._texts))

    def _certain(self) -> int:
        """Up to where no stop string may have begun."""
        held = self._held
        for at in range(len(held)):
            if any(stop.startswith(held[at:]) for stop in self._stops):
                return at
        return len(held)

    def _release(self, count: int, out: Outlet) -> None:
        if not count:
            return
        text, self._held = self._held[:count], self._held[count:]
        self._released += count
        logprobs: list[TokenLogprob] = []
        while self._marks and self._marks[0][0] < self._released:
            logprobs.append(self._marks.popleft()[1])
        if not self._texts:
            out.part(("said", self.channel))
        self._texts.append(text)
        out.add(("said", self.channel), text, logprobs)


class Called:
    """A call. What a custom tool is given is raw text, also where the model wrapped it up as JSON."""

    mark_wanted: Final = CALL
    stopped: Final = False

    def __init__(self, id_: str, callee: Callee, content_type: str | None, out: Outlet) -> None:
        self._id = id_
        self._callee = callee
        self._input = _raw_input(callee.tool, content_type)
        self._decoder = _Decoder("replace")
        self._texts: list[str] = []
        out.start(ToolCallStart(id_, callee.name, callee.custom))

    def feed(self, data: bytes, out: Outlet, logprob: TokenLogprob | None = None) -> None:
        self._add(self._input.feed(self._decoder.decode(data)), out)

    def finish(self, out: Outlet) -> None:
        self._add(self._input.feed(self._decoder.decode(b"", final=True)), out)
        self._add(self._input.finish(), out)

    def key(self) -> MessageKey | None:
        tool = self._callee.tool
        recipient = name_to_recipient(self._callee.name, {tool.type} if isinstance(tool, NativeTool) else set[Native]())
        return call_to_key(recipient, "".join(self._texts), custom=self._callee.custom)

    def _add(self, text: str, out: Outlet) -> None:
        if text:
            self._texts.append(text)
            out.add(("called", self._id), text)


Body = Said | Called | Ignored


class _Plain:
    def feed(self, text: str) -> str:
        return text

    def finish(self) -> str:
        return ""


class _MaybeWrapped:
    """Text as it is, unless it turns out to be JSON with the text in it."""

    def __init__(self) -> None:
        self._held = ""
        self._input: CustomInput | _Plain | None = None

    def feed(self, text: str) -> str:
        if self._input is not None:
            return self._input.feed(text)
        self._held += text
        start = "".join(self._held[:MAX_WRAPPING_CHARS].split())
        if WRAPPING.startswith(start) and len(self._held) < MAX_WRAPPING_CHARS:
            return ""
        self._input = CustomInput() if start.startswith(WRAPPING) else _Plain()
        held, self._held = self._held, ""
        return self._input.feed(held)

    def finish(self) -> str:
        return self._held if self._input is None else self._input.finish()


def _raw_input(tool: Tool | None, content_type: str | None) -> CustomInput | _MaybeWrapped | _Plain:
    if not isinstance(tool, CustomTool):
        return _Plain()
    if content_type == "json":
        return CustomInput()
    return _Plain() if isinstance(tool.custom.format, GrammarFormat) else _MaybeWrapped()
