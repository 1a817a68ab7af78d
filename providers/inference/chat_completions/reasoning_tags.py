"""Reasoning that a model writes into its text between tags such as `<think>`, as reasoning deltas.

For servers that do not separate it themselves. Only blocks at the beginning of an answer are reasoning: tags further on
are text that the model writes about. A closing tag without an opening one ends a thought that the template has opened:
what was before it is reasoning. In a stream that text has left already, so the answer becomes a message of its own, and
later answers of the model are read as beginning within the reasoning. Each delta is read once, so the time is linear
however the tags are split.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from apis.chat import ChatRequest, Message, TextPart, share_of_salt
from apis.deltas import (
    DelayedOutput,
    Delta,
    DeltaBatch,
    Finish,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallStart,
    count_delayed,
)
from apis.sink import ConvertedSink, Sink
from apis.wire.base import Phase
from providers.common.recent import RecentEntries

TagText = Annotated[str, Field(min_length=1, max_length=64)]


class ReasoningTags(BaseModel):
    """Tags around a model's reasoning. `starts_open`: the template ends with the opening tag, so the output begins
    within the reasoning. `replay` says how the model's template takes earlier reasoning: `content`, within the tags and
    only since the last user message; `field`, in the message field that the server has for it; `none`, not at all."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    open: TagText = "<think>"
    close: TagText = "</think>"
    starts_open: bool = False
    replay: Literal["content", "field", "none"] = "content"


TagsPreset = Literal["think", "think-open", "deepseek-r1", "magistral", "seed-oss"]
TAGS_PRESETS: Final[Mapping[TagsPreset, ReasoningTags]] = {
    "think": ReasoningTags(),
    "think-open": ReasoningTags(starts_open=True),
    "deepseek-r1": ReasoningTags(starts_open=True, replay="none"),
    "magistral": ReasoningTags(open="[THINK]", close="[/THINK]"),
    "seed-oss": ReasoningTags(open="<seed:think>", close="</seed:think>"),
}
_MODEL_PRESETS: Final[Sequence[tuple[Sequence[str], TagsPreset]]] = [
    (("deepseek", "r1"), "deepseek-r1"),
    (("qwen3", "thinking"), "think-open"),
    *(((family,), "think-open") for family in ("qwq", "qwen3.5", "qwen3.6", "minimax-m2", "glm-4.7", "glm-5")),
    (("olmo-3", "think"), "think-open"),
    (("ernie", "thinking"), "think-open"),
    (("magistral",), "magistral"),
    (("seed-oss",), "seed-oss"),
    *(((family,), "think") for family in ("qwen3", "smollm3", "glm-4", "minimax-m", "ernie", "hunyuan")),
]
"""Presets by words that are all in the model's name, in lower case; the first that fits counts. Families whose
templates always open the tag have `think-open`."""
_QUOTES: Final = ("`", "'", '"')
"""Characters before a tag that a text quotes."""
TenantModel = tuple[str, str]
"""A tenant, by its share of the cache salt, and a model."""
_MAX_OPENING_MODELS: Final = 4096


_MAX_CUT_THOUGHTS: Final = 3
"""Answers in a row without a tag that were cut off, after which a model is no longer supposed to open its thought."""


class OpeningModels(RecentEntries[TenantModel, int]):
    """The models whose templates were found to open the thought, with the number of answers since the last one with a
    closing tag, of those that were cut off before it. They are kept for each tenant, because a prompt can ask for such
    a tag."""

    def __init__(self) -> None:
        super().__init__(_MAX_OPENING_MODELS)


TagsOption = ReasoningTags | TagsPreset | Literal["auto"]
"""The option `reasoning_tags` of a provider; `auto` chooses the preset by the model's name."""


def find_tags(option: TagsOption | None, model: str) -> ReasoningTags | None:
    """Return the tags of a model; None if its text has none."""
    if option is None or isinstance(option, ReasoningTags):
        return option
    if option != "auto":
        return TAGS_PRESETS[option]
    name = model.lower()
    return next((TAGS_PRESETS[preset] for words, preset in _MODEL_PRESETS if all(word in name for word in words)), None)


def replay_reasoning(request: ChatRequest, tags: ReasoningTags) -> ChatRequest:
    """Return the request with earlier reasoning as the model's template takes it."""
    if tags.replay == "field" or not any(message.reasoning for message in request.messages):
        return request
    messages = request.messages
    last_user = max((at for at, message in enumerate(messages) if message.role == "user"), default=-1)
    replayed = [
        _write_reasoning(message, tags if at > last_user and tags.replay == "content" else None)
        for at, message in enumerate(messages)
    ]
    return request.model_copy(update={"messages": replayed})


def _write_reasoning(message: Message, tags: ReasoningTags | None) -> Message:
    if not message.reasoning:
        return message
    content = message.content
    if tags is not None:
        text = f"{tags.open}\n{message.reasoning}\n{tags.close}\n\n"
        content = [TextPart(text=text), *content] if isinstance(content, list) else text + (content or "")
    return message.model_copy(update={"reasoning": None, "content": content})


def _thinks_from_the_start(request: ChatRequest, *, is_open: bool) -> bool:
    """Return true if the output begins within the reasoning: not when the request turned it off."""
    options = request.chat_template_kwargs or {}
    return is_open and options.get("enable_thinking") is not False and options.get("thinking") is not False


def _demands_json(request: ChatRequest) -> bool:
    return request.response_format is not None and request.response_format.type != "text"


class TagSink(ConvertedSink[Delta, Delta]):
    """Passes on the batches of a chat with its tagged text as reasoning. `opening_models` are those whose answers had a
    closing tag only: it grows with each of them, and loses one whose answer has none. The tags that were found by the
    model's name are not `is_certain`."""

    def __init__(
        self,
        sink: Sink[Delta],
        request: ChatRequest,
        tags: ReasoningTags,
        opening_models: OpeningModels | None = None,
        *,
        is_certain: bool = True,
    ) -> None:
        super().__init__(sink, self._split_batch)
        self._models = OpeningModels() if opening_models is None else opening_models
        self._key = share_of_salt(request.cache_salt), request.model
        self._has_opened = self._key in self._models
        self._splitter = splitter = TagSplitter(
            tags,
            starts_open=_thinks_from_the_start(request, is_open=tags.starts_open or self._has_opened),
            json_answer=_demands_json(request),
            holds_text=not request.is_streamed,
            is_guess=self._has_opened or not is_certain,
        )
        self._feed = splitter.feed if request.is_streamed else splitter.feed_and_count

    def _split_batch(self, batch: DeltaBatch) -> DeltaBatch:
        output = self._feed(batch)
        if self._splitter.has_lone_close:
            self._models[self._key] = 0
        elif self._splitter.has_no_tag:
            self._models.pop(self._key, None)
        elif self._splitter.is_cut_thought and self._has_opened:
            cut_count = (self._models.find(self._key) or 0) + 1
            self._models[self._key] = cut_count
            if cut_count >= _MAX_CUT_THOUGHTS:
                del self._models[self._key]
        return output


class TagSplitter:
    """Splits the text of one answer. After `is_done` every further delta is as it was.

    `starts_open`: text without an opening tag is reasoning. With `json_answer`, text that begins as JSON does is the
    answer all the same: a server that enforces a schema does so from the first token. With `holds_text`, a text without
    tags is kept until its end, because it may be a thought. `is_guess`: the answer may begin otherwise than
    `starts_open` says, so an answer without a tag is a text, if it is whole or goes on with a call: a model closes its
    thought before that. `has_lone_close` and `has_no_tag` say which tags there were; `is_cut_thought`, that a limit cut
    the answer off before any.
    """

    def __init__(
        self,
        tags: ReasoningTags,
        *,
        starts_open: bool,
        json_answer: bool = False,
        holds_text: bool = False,
        is_guess: bool = False,
    ) -> None:
        self.is_done = False
        self.has_lone_close = self.has_no_tag = self.is_cut_thought = False
        self._tags = tags
        self._starts_open = starts_open
        self._json_answer = json_answer
        self._holds_text = holds_text
        self._is_guess = is_guess and starts_open
        self._is_open = False
        self._is_closed = False
        self._is_text = False
        self._delayed: list[Delta] = []
        self._thought: list[str] = []
        self._last_char = ""
        self._phase: Phase | None = None
        # Text that may be the beginning of a tag, and blanks before it, of which there may be any number.
        self._tag_start = ""
        self._blanks: list[str] = []
        self._newline_count = 0
        self._has_reasoning = False
        self._logprobs: list[TokenLogprob] = []

    def feed(self, deltas: Sequence[Delta]) -> Sequence[Delta]:
        """Return the deltas that these make certain."""
        if self.is_done:
            return deltas if self._phase is None else [*map(self._with_phase, deltas)]
        out: list[Delta] = []
        for delta in deltas:
            if self.is_done:
                out.append(self._with_phase(delta))
            elif isinstance(delta, TextDelta):
                self._logprobs += delta.logprobs
                self._feed_text(delta.text, delta, out)
            elif isinstance(delta, DelayedOutput):
                out.append(delta)
            else:
                # Anything else ends the text before it; a server that sends reasoning separates it itself.
                self._flush(out, delta)
                self.is_done = self.is_done or isinstance(delta, Finish | ReasoningDelta)
                out.append(delta)
        return out

    def feed_and_count(self, deltas: Sequence[Delta]) -> Sequence[Delta]:
        """Return the deltas that these make certain, and the count of those that are delayed."""
        return count_delayed(deltas, self.feed(deltas))

    def _with_phase(self, delta: Delta) -> Delta:
        if self._phase is None or not isinstance(delta, TextDelta):
            return delta
        return msgspec.structs.replace(delta, phase=self._phase)

    def _feed_text(self, text: str, delta: TextDelta, out: list[Delta]) -> None:
        if self._is_text:
            text = self._read_text(text, delta, out)
        elif not self._is_open and not self._is_closed:
            text = self._read_start(text, delta, out)
        while text and (self._is_open or self._is_closed) and not self.is_done:
            text = self._read_reasoning(text, out) if self._is_open else self._read_answer_start(text, delta, out)

    def _read_answer_start(self, text: str, delta: TextDelta, out: list[Delta]) -> str:
        """Look for a tag directly after a thought, which begins another one or closes the thought once more; return
        the text after it. What is no tag is the answer."""
        data, self._tag_start = (self._tag_start + text).lstrip("\n"), ""
        for tag in (self._tags.open, self._tags.close):
            if data.startswith(tag):
                self._is_open = tag == self._tags.open
                self._is_closed = not self._is_open
                self._newline_count = max(self._newline_count, 1)
                self._logprobs.clear()
                return data[len(tag) :]
            if data and tag.startswith(data):
                self._tag_start = data
                return ""
        if data:
            self.is_done = True
            self._add_text(data, delta, out)
        self._logprobs.clear()
        return ""

    def _read_text(self, text: str, delta: TextDelta, out: list[Delta]) -> str:
        """Look for a closing tag without an opening one in a text; return the text after it."""
        tags, data = self._tags, self._tag_start + text
        self._tag_start = ""
        at, opening = data.find(tags.close), data.find(tags.open)
        if (at < 0 and opening < 0) or 0 <= opening < at:
            self.is_done = opening >= 0
            pending = 0 if self.is_done else max(_count_tag_start(data, tags.close), _count_tag_start(data, tags.open))
            self._tag_start = data[len(data) - pending :]
            self._hold_text(data[: len(data) - pending], delta, out)
            return ""
        before = data[:at]
        if at < 0 or (before or self._last_char)[-1:] in _QUOTES:  # the model writes about its tags
            self.is_done = True
            self._hold_text(data, delta, out)
            return ""
        self._is_text, self._is_closed, self.has_lone_close = False, True, True
        if self._holds_text:
            texts = [delta.text for delta in self._delayed if isinstance(delta, TextDelta)]
            self._delayed.clear()
            self._logprobs.clear()
            self._add_reasoning("".join([*texts, before]), out)
        else:
            if before:
                self._add_text(before, TextDelta(""), out)
            self._phase = "final_answer"
        return data[at + len(tags.close) :]

    def _hold_text(self, text: str, delta: TextDelta, out: list[Delta]) -> None:
        """Add text that may be a thought: later, where it can be held."""
        if text:
            self._last_char = text[-1]
            self._add_text(text, delta, self._delayed if self._holds_text else out)
        if self.is_done:
            out += self._delayed
            self._delayed.clear()

    def _read_start(self, text: str, delta: TextDelta, out: list[Delta]) -> str:
        """Look for the opening tag; return the text after it. What is no tag is reasoning or text, as it is."""
        data = self._tag_start + text
        if not self._tag_start and not (data := data.lstrip()):
            self._blanks.append(text)
            return ""
        if not self._tag_start:
            self._blanks.append(text[: len(text) - len(data)])
        tag = self._tags.open
        if len(data) < len(tag) and tag.startswith(data):
            self._tag_start = data
            return ""
        self._tag_start = ""
        if data.startswith(tag):
            self._is_open, self._is_guess = True, False
            self._blanks.clear()
            self._logprobs.clear()
            return data[len(tag) :]
        is_json = self._json_answer and data[0] in "{["
        data = "".join(self._blanks) + data
        self._blanks.clear()
        if is_json:
            self.is_done = True
            self._add_text(data, delta, out)
            return ""
        if self._starts_open:
            self._is_open = True
            return data
        self._is_text = True
        return self._read_text(data, delta, out)

    def _read_reasoning(self, text: str, out: list[Delta]) -> str:
        """Add reasoning up to the closing tag; return the text after it."""
        tag, data = self._tags.close, self._tag_start + text
        end = data.find(tag)
        if end < 0:
            self._logprobs.clear()
            pending = _count_tag_start(data, tag)
            self._tag_start = data[len(data) - pending :]
            self._add_reasoning(data[: len(data) - pending], out)
            return ""
        self._tag_start = ""
        self._add_reasoning(data[:end], out)
        self._is_open, self._is_closed = False, True
        self.has_lone_close = self._is_guess
        self._release_thought(out)
        return data[end + len(tag) :]

    def _add_reasoning(self, text: str, out: list[Delta]) -> None:
        """Add reasoning without the newlines around it, which belong to the tags."""
        if not self._has_reasoning:
            text = text.lstrip("\n")
        body = text.rstrip("\n")
        if body:
            self._has_reasoning = True
            thought = ReasoningDelta("\n" * self._newline_count + body)
            self._newline_count = 0
            if self._is_guess:
                self._thought.append(thought.text)
            (self._delayed if self._is_guess and self._holds_text else out).append(thought)
        if self._has_reasoning:
            self._newline_count += len(text) - len(body)

    def _release_thought(self, out: list[Delta]) -> None:
        """Add the reasoning that is certain to be some."""
        out += self._delayed
        self._delayed.clear()
        self._thought.clear()
        self._is_guess = False

    def _add_text(self, text: str, delta: TextDelta, out: list[Delta]) -> None:
        logprobs = _logprobs_of_end(self._logprobs, len(text))
        out.append(msgspec.structs.replace(delta, text=text, logprobs=logprobs, phase=self._phase or delta.phase))
        self._logprobs.clear()

    def _flush(self, out: list[Delta], following: Delta) -> None:
        """Add what was pending, when no more text can complete a tag. A thought that was only supposed to be one is the
        answer, if the answer ends by itself or a call follows it."""
        pending, self._tag_start = self._tag_start, ""
        if self._is_open:
            if pending:
                self._add_reasoning(pending, out)
            if self._is_guess and self._thought:
                is_finish = isinstance(following, Finish)
                self.has_no_tag = following.reason == "stop" if is_finish else isinstance(following, ToolCallStart)
                self.is_cut_thought = is_finish and not self.has_no_tag
            if self.has_no_tag:
                self.is_done = True
                self._delayed.clear()
                self._add_text("".join(self._thought), TextDelta(""), out)
            self._release_thought(out)
            return
        if self._is_text:
            self.is_done = True
            self._hold_text(pending, TextDelta(""), out)
            return
        text = "".join(self._blanks) + pending
        self._blanks.clear()
        if not text:
            return
        if self._starts_open and not self._is_closed:
            self._is_open = True
            self._add_reasoning(text, out)
        else:
            self.is_done = True
            self._add_text(text, TextDelta(""), out)


def _logprobs_of_end(logprobs: Sequence[TokenLogprob], length: int) -> Sequence[TokenLogprob]:
    """Return those of the last tokens, of which the last `length` characters are."""
    start = len(logprobs)
    while start and length > 0:
        start -= 1
        length -= len(logprobs[start].token)
    return tuple(logprobs[start:])


def _count_tag_start(data: str, tag: str) -> int:
    """Return the length of the longest end of `data` with which the tag begins."""
    longest = min(len(data), len(tag) - 1)
    if tag[0] not in data[len(data) - longest :]:
        return 0
    return next((length for length in range(longest, 0, -1) if tag.startswith(data[len(data) - length :])), 0)
