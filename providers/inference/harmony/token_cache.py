"""Keys of Harmony messages, and a cache of their tokens, so that a conversation is encoded only once."""

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
"""Weight of an entry in addition to its ids: its key and its place in the table."""


@dataclass(frozen=True, slots=True)
class MessageKey:
    """Identity of a rendered message. `author` is a role, or a tool's full name such as `functions.add`.

    The model's own messages are keyed by the content that a client sends back, independent of how the header was
    spelled: use `text_to_key` or `call_to_key`.
    """

    author: str
    channel: str | None
    recipient: str | None
    content_type: str | None
    text: str


def text_to_key(channel: Literal["analysis", "commentary", "final"], text: str) -> MessageKey:
    """Return the key of assistant text without a recipient: reasoning, a preamble or the answer."""
    return MessageKey("assistant", channel, None, None, text)


def call_to_key(recipient: str, text: str, *, custom: bool) -> MessageKey:
    """Return the key of a call, with its arguments or input as sent to the client. Native tools have the recipients of
    the model's training."""
    if recipient == "python" or recipient.startswith("browser."):
        return MessageKey("assistant", "analysis", recipient, "code", text)
    return MessageKey("assistant", "commentary", recipient, None if custom else JSON_CONTENT_TYPE, text)


def name_to_recipient(name: str, native: AbstractSet[NativeToolName]) -> str:
    """Return the full name of the tool of a call. A header is split at blanks, so a name has none."""
    name = re.sub(r"\s", "_", name)
    if "." in name or (name == "python" and "python" in native):
        return name
    return f"functions.{name}"


class TokenCache:
    """LRU cache of a message's ids, from `<|start|>` to the token that ends it. Thread-safe.

    The model's own output is stored with its exact ids: encoding its text again may result in others, and then the
    prefix cache would miss everything after that message.
    """

    def __init__(self, max_tokens: int = 2_000_000) -> None:
        self._max_tokens = max_tokens
        self._tokens = 0
        self._entries: OrderedDict[MessageKey, array[int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: MessageKey) -> Sequence[int] | None:
        """Return the ids, or None. The caller must not change them."""
        with self._lock:
            ids = self._entries.get(key)
            if ids is not None:
                self._entries.move_to_end(key)
            return ids

    def put(self, key: MessageKey, ids: Sequence[int]) -> None:
        """Store the ids, replacing those of an existing entry. A message larger than the whole cache is not stored."""
        with self._lock:
            old_ids = self._entries.pop(key, None)
            if old_ids is not None:
                self._tokens -= len(old_ids) + ENTRY_OVERHEAD_TOKENS
            weight = len(ids) + ENTRY_OVERHEAD_TOKENS
            if weight > self._max_tokens:
                return
            self._entries[key] = array("I", ids)
            self._tokens += weight
            while self._tokens > self._max_tokens:
                _, oldest = self._entries.popitem(last=False)
                self._tokens -= len(oldest) + ENTRY_OVERHEAD_TOKENS
