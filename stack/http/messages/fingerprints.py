"""Fingerprints of prompts: the first difference between a prompt and that of an earlier message.

The fingerprint of a message that asks for diagnostics is a part of its id. So every worker can compare, and nothing is
stored. It holds hashes and a count of tokens, and no text.
"""

import base64
import binascii
import hashlib
import struct
from typing import Any, Final, Self

import msgspec

from apis.messages import CreateMessage
from stack.http.messages.json_text import to_json

_LAYOUT: Final = struct.Struct(">BII8s8s8s8s8s")
_VERSION: Final = 1
_SEPARATOR: Final = "."


class Fingerprint(msgspec.Struct, frozen=True):
    """The parts of a prompt, hashed; `messages` is the hash of the first `count` messages."""

    count: int
    tokens: int
    model: bytes
    system: bytes
    tools: bytes
    options: bytes
    messages: bytes

    @classmethod
    def of(cls, message: CreateMessage, system: str, tokens: int) -> Self:
        """Return the fingerprint of a request whose prompt has about so many tokens. `system` are the instructions as
        the model reads them."""
        options = [message.tool_choice, message.thinking, message.output_config, message.output_format]
        return cls(
            len(message.messages),
            tokens,
            _hash(message.model),
            _hash(system),
            _hash([message.tools, message.mcp_servers]),
            _hash(options),
            _hash(message.messages),
        )

    @classmethod
    def read(cls, message_id: str) -> Self | None:
        """Return the fingerprint in the id of a message; None where there is none."""
        _, separator, text = message_id.rpartition(_SEPARATOR)
        if not separator:
            return None
        try:
            version, *parts = _LAYOUT.unpack(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        except (binascii.Error, struct.error, ValueError):
            return None
        return cls(*parts) if version == _VERSION else None

    def add_to(self, message_id: str) -> str:
        """Return the id with the fingerprint."""
        packed = _LAYOUT.pack(_VERSION, *(getattr(self, name) for name in self.__struct_fields__))
        return f"{message_id}{_SEPARATOR}{base64.urlsafe_b64encode(packed).decode().rstrip('=')}"


def find_miss_reason(message: CreateMessage, current: Fingerprint) -> dict[str, Any] | None:
    """Return why the prompt does not continue that of the message that the request names, as Anthropic's
    `cache_miss_reason`; None where it does, or where the request names none."""
    previous_id = message.diagnostics.previous_message_id if message.diagnostics else None
    if previous_id is None:
        return None
    earlier = Fingerprint.read(previous_id)
    if earlier is None:
        return {"type": "previous_message_not_found"}
    changed = next(
        (name for name in ("model", "system", "tools") if getattr(earlier, name) != getattr(current, name)), ""
    )
    if not changed and _hash(message.messages[: earlier.count]) != earlier.messages:
        changed = "messages"
    if changed:
        return {"type": f"{changed}_changed", "cache_missed_input_tokens": earlier.tokens}
    return None if earlier.options == current.options else {"type": "unavailable"}


def _hash(value: Any) -> bytes:
    return hashlib.sha256(to_json(_to_plain(value))).digest()[:8]


def _to_plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_to_plain(each) for each in value]  # pyright: ignore[reportUnknownVariableType] - of any type
    return value.model_dump(mode="json", exclude_none=True) if hasattr(value, "model_dump") else value
