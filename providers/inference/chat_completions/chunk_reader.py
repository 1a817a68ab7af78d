"""ChunkReader: an incremental reader of the answer of one model call. Synchronous, no I/O."""

from abc import ABC, abstractmethod
from typing import Any, Final

import msgspec

from apis.deltas import Delta
from apis.errors import StackError
from apis.telemetry import Attributes

_MAX_NAME_CHARS: Final = 256
"""Length at which a name of the inference server's is cut: it goes into spans, and nothing bounds it."""


class _AnswerHead(msgspec.Struct):
    id: Any = None
    model: Any = None
    service_tier: Any = None
    system_fingerprint: Any = None


_decode_head = msgspec.json.Decoder(_AnswerHead).decode


class ChunkReader(ABC):
    """Call `feed` with each chunk from the socket, then `end` when the body ended cleanly.

    `failure` is set once the stream is invalid; deltas returned together with it are still valid. `is_finished` is set
    with the Finish; no delta follows. `saw_activity` is set by every sign of generation; the caller's watchdog clears
    it. `answer_bytes` and `delta_count` grow with the answer. `was_cut` says that the reader ended an answer that went
    on, so that its body has not been read to the end. While `keeps_head` is set, the next event is kept as
    `first_payload`, whose head `describe` reads; it stays empty for readers of other formats.
    """

    __slots__ = (
        "answer_bytes",
        "delta_count",
        "failure",
        "first_payload",
        "is_finished",
        "keeps_head",
        "saw_activity",
        "was_cut",
    )

    def __init__(self) -> None:
        self.failure: StackError | None = None
        self.is_finished = False
        self.saw_activity = False
        self.was_cut = False
        self.answer_bytes: int = 0
        self.delta_count: int = 0
        self.keeps_head = False
        self.first_payload: bytes = b""

    @abstractmethod
    def feed(self, data: bytes) -> list[Delta]:
        """Return the deltas that `data` completed, none after the Finish."""

    @abstractmethod
    def end(self) -> list[Delta]:
        """Return the last deltas after the body ended cleanly. Sets `failure` if the answer has no end."""

    def describe(self, *, is_openai: bool) -> Attributes:
        """Return the names in the answer's head as attributes of a span: id and model, and for a server of OpenAI's
        kind its tier and fingerprint. They are read once and at the end, so that no token pays for them."""
        try:
            head = _decode_head(self.first_payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return {}
        named = {"gen_ai.response.id": head.id, "gen_ai.response.model": head.model}
        if is_openai:
            named["openai.response.service_tier"] = head.service_tier
            named["openai.response.system_fingerprint"] = head.system_fingerprint
        return {name: value[:_MAX_NAME_CHARS] for name, value in named.items() if value and isinstance(value, str)}
