"""Harmony's message headers as models really write them: author, channel and recipient of a message."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from apis.chat import ChatCustomTool, ChatTool, NativeTool
from providers.inference.harmony.token_cache import name_to_recipient
from providers.inference.harmony.vocabulary import CHANNEL, CONSTRAIN, Vocabulary

Channel = Literal["analysis", "commentary", "final"]

BROWSER_CALLS: Final = frozenset({"browser.search", "browser.open", "browser.find"})
FUNCTIONS_PREFIX: Final = "functions."

_TOOL_PREFIXES: Final = (FUNCTIONS_PREFIX, "browser.", "python")
_OTHER_AUTHORS: Final = ("user", "system", "developer", "tool", *_TOOL_PREFIXES)
_NON_TOOL_RECIPIENTS: Final = frozenset({"assistant", "user", "all"})
_RECIPIENT_PATTERN: Final = re.compile(r"to=\s*(\S*)")
_CONTENT_TYPE_PATTERN: Final = re.compile(r"json|code|text", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class HarmonyHeader:
    """Parsed header. `text` is the part of the header that belongs to no field; `is_malformed` says that the model
    deviated from its training. A header that is not from the assistant begins a message in the name of a user or a
    tool."""

    channel: Channel | None
    recipient: str | None
    content_type: str | None
    extra_text: str
    is_assistant: bool
    is_malformed: bool


@dataclass(frozen=True, slots=True)
class Callee:
    """Tool of a call: `name` as clients know it; `tool` is None if the request does not declare it."""

    name: str
    custom: bool
    tool: ChatTool | None
    is_malformed: bool


def ids_to_header(vocabulary: Vocabulary, ids: Sequence[int], *, has_role: bool) -> HarmonyHeader:
    """Parse the tokens between `<|start|>` and `<|message|>`; without `has_role` the role was in the prompt.

    Accepts any ids. The parts may come in any order: models use more orders than that of the prompt.
    """
    before, channel, constrain = _split_sections(vocabulary, ids)
    role, before = _split_role(before) if has_role else ("assistant", before)
    recipient = next(
        (word for word in _RECIPIENT_PATTERN.findall(f"{before} {channel or ''} {constrain}") if word), None
    )
    spare = [*_split_words(channel), *_split_words(before)]
    named = _word_to_channel(spare[0]) if spare else None
    words = spare[1:] if named else spare
    content_type = next(iter(_split_words(constrain)), None) or next(
        filter(_CONTENT_TYPE_PATTERN.fullmatch, words), None
    )
    if recipient is None:
        recipient = next((word for word in words if word.startswith(_TOOL_PREFIXES)), None)
    extra_words = [word for word in words if word not in (content_type, recipient)]
    return HarmonyHeader(
        named,
        None if recipient in _NON_TOOL_RECIPIENTS else recipient,
        content_type,
        before if channel is None and "to=" not in before else " ".join(extra_words),
        is_assistant=not role.startswith(_OTHER_AUTHORS),
        is_malformed=bool(extra_words) or channel is None or spare[:1] != [named] or role != "assistant",
    )


def _split_sections(vocabulary: Vocabulary, ids: Sequence[int]) -> tuple[str, str | None, str]:
    """Return the text before the channel token, after it, and after the constrain token; the last of each counts."""
    sections: dict[int, bytearray] = {0: bytearray()}
    at = 0
    for token in ids:
        if token in (CHANNEL, CONSTRAIN):
            at = token
            sections[at] = bytearray()
        else:
            sections[at].extend(vocabulary.decode_bytes(token))
    before, channel, constrain = (
        None if data is None else data.decode("utf-8", "replace") for data in map(sections.get, (0, CHANNEL, CONSTRAIN))
    )
    return before or "", channel, constrain or ""


def _split_role(text: str) -> tuple[str, str]:
    """Return the role and the text after it; without a role it is the assistant's."""
    role, _, remainder = text.lstrip().partition(" ")
    if role.startswith("assistant"):
        return "assistant", f"{role.removeprefix('assistant')} {remainder}"
    return (role, remainder) if role.startswith(_OTHER_AUTHORS) else ("", text)


def _split_words(text: str | None) -> list[str]:
    return _RECIPIENT_PATTERN.sub(" ", text or "").split()


def _word_to_channel(word: str) -> Channel | None:
    if word.startswith("final"):
        return "final"
    if word.startswith("comment"):
        return "commentary"
    return "analysis" if word.startswith("analysis") else None


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
    return Callee(bare or recipient, custom=False, tool=None, is_malformed=True)
