"""What identifies a Harmony message, and its tokens remembered, so that a conversation is encoded only once."""

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal

from apis.chat import NativeToolName

JSON_CONTENT_TYPE = "<|constrain|>json"
ENTRY_OVERHEAD_TOKENS = 64
"""What an entry weighs beside its ids: its key and its place in the table."""


@dataclass(frozen=True, slots=True)
class MessageKey:
    """A message as it is rendered. `author` is a role, or a tool's full name such as `functions.add`.

    What the model wrote is keyed by what a client will send back, however its header was really spelled: build the
    key with `said_to_key` or `call_to_key`.
    """

    author: str
    channel: str | None
    recipient: str | None
    content_type: str | None
    text: str


def text_to_key(channel: Literal["analysis", "commentary", "final"], text: str) -> MessageKey:
    """What the assistant said to nobody in particular: a thought, a preamble or the answer."""
    return MessageKey("assistant", channel, None, None, text)


def call_to_key(recipient: str, text: str, *, custom: bool) -> MessageKey:
    """A call, its arguments or input as the client got them. The model's own tools are called as it was trained to."""
    if recipient == "python" or recipient.startswith("browser."):
        return MessageKey("assistant", "analysis", recipient, "code", text)
    return MessageKey("assistant", "commentary", recipient, None if custom else JSON_CONTENT_TYPE, text)


def name_to_recipient(name: str, native: AbstractSet[NativeToolName]) -> str:
    """The full name of the tool that a call names. A header is split at blanks, so a name has none."""
    name = re.sub(r"\s", "_", name)
    if "." in name or (name == "python" and "python" in native):
        return name
    return f"functions.{name}"


class TokenCache:
    """Message -> ids, from `<|start|>` to the token that ends it. Least recently used go first; safe in threads.

    What the model itself generated is put here with its very ids: encoding its text again may give others, and then
    nothing after that message would be found in the prefix cache.
    """

    def __init__(self, max_tokens: int = 2_000_000) -> None:
        self._max_tokens = max_tokens
        self._tokens = 0
        self._entries: OrderedDict[MessageKey, array[int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: MessageKey) -> Sequence[int] | None:
        """The ids, or None. Not to be changed by the caller."""
        with self._lock:
            ids = self._entries.get(key)
            if ids is not None:
                self._entries.move_to_end(key)
            return ids

    def put(self, key: MessageKey, ids: Sequence[int]) -> None:
        """Remember; a message that is already known takes these ids. One larger than the whole memo is not kept."""
        with self._lock:
            known = self._entries.pop(key, None)
            if known is not None:
                self._tokens -= len(known) + ENTRY_OVERHEAD_TOKENS
            weight = len(ids) + ENTRY_OVERHEAD_TOKENS
            if weight > self._max_tokens:
                return
            self._entries[key] = array("I", ids)
            self._tokens += weight
            while self._tokens > self._max_tokens:
                _, oldest = self._entries.popitem(last=False)
                self._tokens -= len(oldest) + ENTRY_OVERHEAD_TOKENS
