"""ChunkReader: an incremental reader of the answer of one model call. Synchronous, no I/O."""

from abc import ABC, abstractmethod

from apis.deltas import Delta
from apis.errors import StackError


class ChunkReader(ABC):
    """Call `feed` with each chunk from the socket, then `end` when the body ended cleanly.

    `failure` is set once the stream is invalid; deltas returned together with it are still valid. `is_finished` is set
    with the Finish; no delta follows. `saw_activity` is set by every sign of generation; the caller's watchdog clears
    it. `answer_bytes` and `delta_count` grow with the answer. `was_cut` says that the reader ended an answer that went
    on, so that its body has not been read to the end.
    """

    def __init__(self) -> None:
        self.failure: StackError | None = None
        self.is_finished = False
        self.saw_activity = False
        self.was_cut = False
        self.answer_bytes: int = 0
        self.delta_count: int = 0

    @abstractmethod
    def feed(self, data: bytes) -> list[Delta]:
        """Return the deltas that `data` completed, none after the Finish."""

    @abstractmethod
    def end(self) -> list[Delta]:
        """Return the last deltas after the body ended cleanly. Sets `failure` if the answer has no end."""
