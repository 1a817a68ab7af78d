"""Harmony's message headers as models really write them: author, channel and recipient of a message."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from apis.chat import ChatCustomTool, ChatTool, NativeTool
from providers.inference.harmony.token_cache import name_to_recipient
from providers.inference.harmony.vocabulary import CHANNEL, CONSTRAIN, Vocabulary

Channel = Literal["analysis", "commentary", "final"]

BROWSER_CALLS: Final = frozenset({"browser.search", "browser.open", "browser.find"})
FUNCTIONS_PREFIX: Final = "functions."
PARALLEL_RECIPIENTS: Final = ("multi_tool_use.parallel", "functions.multi_tool_use.parallel")
"""The recipients of several calls in one message, as models write it that were trained with that tool."""
MAX_CHANNEL_CHARS: Final = 32
"""Characters in the place of a channel that are taken for its name; more of them are text."""

_TOOL_PREFIXES: Final = (FUNCTIONS_PREFIX, "browser.", "python")
_OTHER_AUTHORS: Final = ("user", "system", "developer", "tool", *_TOOL_PREFIXES)
_NON_TOOL_RECIPIENTS: Final = frozenset({"assistant", "user", "all"})
_TYPES: Final = r"(?:json|code|text)"
_RECIPIENT: Final = r"""to\s*+=\s*+([^\s{}\[\]()<>"',;]*+)"""
_RECIPIENT_PATTERN: Final = re.compile(_RECIPIENT)
_TYPE_PATTERN: Final = re.compile(_TYPES, re.IGNORECASE)
_GLUED_WORDS: Final = re.compile(rf"(?:{_TYPES}|commentary|analysis|final|constrain|channel|message|\W)*+")
"""The words that models write directly after a recipient's name, instead of control tokens and blanks."""
# The fields of a header that has no end, one after the other.
_NEXT_CHANNEL: Final = re.compile(r"\s*+(final|analysis|comment(?:ary)?)")
_NEXT_RECIPIENT: Final = re.compile(rf"\s*+{_RECIPIENT}")
_NEXT_TYPE: Final = re.compile(rf"\s*+({_TYPES})(?!\w)", re.IGNORECASE)
_NEXT_GLUED_TYPE: Final = re.compile(rf"\s*+({_TYPES})", re.IGNORECASE)
_NEXT_JSON: Final = re.compile(r"\s*+(json)(?=\s*+[{\[])")
_BEGUN_FIELD: Final = re.compile(r"\s*+(?:to?)?\s*+")


@dataclass(frozen=True, slots=True)
class HarmonyHeader:
    """Parsed header. `is_malformed` says that the model deviated from its training. A header that is not from the
    assistant begins a message in the name of a user or a tool. `text` is what a header without `<|message|>` goes on
    with, as it was written. `names_unknown_channel` says that it has a channel, and none of the three."""

    channel: Channel | None
    recipient: str | None
    content_type: str | None
    is_assistant: bool
    is_malformed: bool
    text: bytes = b""
    names_unknown_channel: bool = False


@dataclass(frozen=True, slots=True)
class Callee:
    """Tool of a call: `name` as clients know it; `tool` is None if the request does not declare it."""

    name: str
    custom: bool
    tool: ChatTool | None
    is_malformed: bool


def ids_to_header(vocabulary: Vocabulary, ids: Sequence[int], *, has_role: bool) -> HarmonyHeader:
    """Parse the tokens between `<|start|>` and `<|message|>`; without `has_role` the role was in the prompt.

    Accepts any ids. The parts may come in any order: models use more orders than that of the prompt. The first
    recipient counts, and the last channel.
    """
    sections = [(kind, data.decode("utf-8", "replace")) for kind, data in _split_sections(vocabulary, ids)]
    role, before = _split_role(sections[0][1]) if has_role else ("assistant", sections[0][1])
    sections[0] = (0, before)
    recipients = (name for _, text in sections for name in _RECIPIENT_PATTERN.findall(text) if name)
    words = [(kind, _RECIPIENT_PATTERN.sub(" ", text).split()) for kind, text in sections]
    places = [*(each for kind, each in reversed(words) if kind == CHANNEL), words[0][1]]
    channel = _find_channel(each[0] for each in places if each)
    spare = [word for _, each in words for word in each if _word_to_channel(word) is None]
    constrained = (each[0] for kind, each in words if kind == CONSTRAIN and each)
    content_type = next(constrained, None) or next(filter(_is_content_type, spare), None)
    recipient = next(recipients, None) or next((word for word in spare if word.startswith(_TOOL_PREFIXES)), None)
    odd_words = [word for _, each in words for word in each if word not in (content_type, recipient)]
    named = (word for kind, each in words if kind == CHANNEL for word in each)
    return HarmonyHeader(
        channel,
        None if recipient in _NON_TOOL_RECIPIENTS else recipient,
        content_type,
        is_assistant=not role.startswith(_OTHER_AUTHORS),
        is_malformed=role != "assistant" or sum(kind == CHANNEL for kind, _ in words) != 1 or odd_words != [channel],
        names_unknown_channel=channel is None and any(word in odd_words for word in named),
    )


def ids_to_open_header(vocabulary: Vocabulary, ids: Sequence[int], *, has_role: bool, is_ended: bool) -> HarmonyHeader:
    """Parse a header without `<|message|>`, which a control token ended, or the end of the output. It has fields at its
    beginning, and all that follows is the text. A few words that are no channel are none."""
    sections = [(kind, data.decode("utf-8", "surrogateescape")) for kind, data in _split_sections(vocabulary, ids)]
    first = sections[0][1].lstrip()
    role, before = _split_role(sections[0][1]) if has_role else ("assistant", sections[0][1])
    is_glued = has_role and first.startswith("assistant") and _NEXT_CHANNEL.match(first, len("assistant")) is not None
    sections[0] = (CHANNEL if is_glued else 0, before)
    has_channel = any(kind == CHANNEL for kind, _ in sections)
    is_long = sum(len(text) for kind, text in sections if kind) > MAX_CHANNEL_CHARS
    fields, text = _OpenFields(), ""
    for kind, section in sections:
        rest = section if text else fields.read(kind, section)
        has_reader = fields.channel or fields.recipient or not has_channel or (is_long and kind)
        is_begun = not is_ended and _BEGUN_FIELD.fullmatch(rest)
        if text or (has_reader and rest.strip() and not is_begun):
            text += rest
    recipient = None if fields.recipient in _NON_TOOL_RECIPIENTS else fields.recipient
    return HarmonyHeader(
        fields.channel,
        recipient,
        fields.content_type,
        is_assistant=not role.startswith(_OTHER_AUTHORS),
        is_malformed=True,
        text=(text.removeprefix(" ") if has_role or has_channel else text).encode("utf-8", "surrogateescape"),
    )


class _OpenFields:
    """Fields at the beginning of a header without an end."""

    def __init__(self) -> None:
        self.channel: Channel | None = None
        self.recipient: str | None = None
        self.content_type: str | None = None

    def read(self, kind: int, section: str) -> str:
        """Read the fields at the beginning of a section; return what follows them."""
        at = 0
        while (end := self._read_field(kind if at == 0 else 0, section, at)) is not None:
            at = end
        return section[at:]

    def _read_field(self, kind: int, text: str, at: int) -> int | None:
        """Read the next field; return the place after it, None where the text begins."""
        if (kind == CHANNEL or self.recipient) and (named := _NEXT_CHANNEL.match(text, at)):
            self.channel = _word_to_channel(named[1])
            return named.end()
        if called := _NEXT_RECIPIENT.match(text, at):
            self.recipient = self.recipient or called[1] or None
            return called.end()
        if self.content_type is not None:
            return None
        typed = None
        if kind == CONSTRAIN:
            typed = _NEXT_GLUED_TYPE.match(text, at)
        elif self.recipient:
            typed = _NEXT_TYPE.match(text, at)
        elif self.channel:
            typed = _NEXT_JSON.match(text, at)
        if typed is None:
            return None
        self.content_type = typed[1].lower()
        return typed.end()


def _split_sections(vocabulary: Vocabulary, ids: Sequence[int]) -> list[tuple[int, bytes]]:
    """Return the bytes of a header, each part with the control token that it follows, 0 for the first."""
    sections: list[tuple[int, bytearray]] = [(0, bytearray())]
    for token in ids:
        if token in (CHANNEL, CONSTRAIN):
            sections.append((token, bytearray()))
        else:
            sections[-1][1].extend(vocabulary.decode_bytes(token))
    return [(kind, bytes(data)) for kind, data in sections]


def _split_role(text: str) -> tuple[str, str]:
    """Return the role and the text after it; without a role it is the assistant's."""
    role, _, remainder = text.lstrip().partition(" ")
    if role.startswith("assistant"):
        return "assistant", f"{role.removeprefix('assistant')} {remainder}"
    return (role, remainder) if role.startswith(_OTHER_AUTHORS) else ("", text)


def _find_channel(words: Iterable[str]) -> Channel | None:
    for word in words:
        channel = _word_to_channel(word)
        if channel is not None:
            return channel
    return None


def _word_to_channel(word: str) -> Channel | None:
    if word.startswith("final"):
        return "final"
    if word.startswith("comment"):
        return "commentary"
    return "analysis" if word.startswith("analysis") else None


def _is_content_type(word: str) -> bool:
    return _TYPE_PATTERN.fullmatch(word) is not None


def recipient_to_callee(recipient: str, tools: Sequence[ChatTool]) -> Callee:
    """Return the tool that the recipient means. Known misspellings of the models are corrected; an unknown tool keeps
    its name, so that the error can name it."""
    declared = {tool.name: tool for tool in tools if not isinstance(tool, NativeTool)}
    native = {tool.type: tool for tool in tools if isinstance(tool, NativeTool)}
    bare = recipient.removeprefix(FUNCTIONS_PREFIX)
    tool = declared.get(recipient) or declared.get(bare)
    if tool is not None:
        odd = recipient != name_to_recipient(tool.name, frozenset())
        return Callee(tool.name, isinstance(tool, ChatCustomTool), tool, odd)
    if bare == "python" and bare in native:
        return Callee(bare, custom=True, tool=native["python"], is_malformed=bare != recipient)
    if bare in BROWSER_CALLS and "browser" in native:
        return Callee(bare, custom=False, tool=native["browser"], is_malformed=bare != recipient)
    names: list[str] = [*declared, *native.keys() & {"python"}, *(BROWSER_CALLS if "browser" in native else ())]
    if (name := _find_glued_name(recipient, names) or _find_glued_name(bare, names)) is not None:
        return replace(recipient_to_callee(name, tools), is_malformed=True)
    return Callee(bare or recipient, custom=False, tool=None, is_malformed=True)


def _find_glued_name(recipient: str, names: Sequence[str]) -> str | None:
    """Return the longest name that the recipient begins with, if only words of headers follow it."""
    fitting = (name for name in names if recipient.startswith(name) and _GLUED_WORDS.fullmatch(recipient, len(name)))
    return max(fitting, key=len, default=None)
