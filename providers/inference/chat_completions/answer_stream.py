"""AnswerStream: the deltas of one answer, read from its connection and written into a sink as they arrive."""

from dataclasses import dataclass
from time import monotonic

from apis.deltas import Delta
from apis.errors import StackError, UpstreamError, UpstreamTimeout
from apis.sink import Sink
from providers.common.held_bytes import AnswerAllowance, too_many_bytes_error
from providers.common.net.http.connection import HttpConnection, HttpError
from providers.inference.chat_completions.answer_limits import (
    DEFAULT_MAX_ANSWER_BYTES,
    MIN_DELTA_BYTES,
    AnswerTooLarge,
)
from providers.inference.chat_completions.chunk_reader import ChunkReader
from providers.inference.chat_completions.errors import UpstreamUnavailable


@dataclass(frozen=True, slots=True)
class EndpointLimits:
    """Limits of one model call, in seconds and bytes. The first-token limit starts when the request is sent; keep-alive
    comments and deltas that hold nothing do not count as tokens. `max_answer_bytes` bounds text, reasoning and
    arguments of one answer together; a delta counts at least MIN_DELTA_BYTES. All answers of a tenant count together in
    the share of `providers.common.held_bytes`, too."""

    connect_s: float = 5
    headers_s: float = 60
    first_token_s: float = 120
    token_gap_s: float = 60
    max_answer_bytes: int = DEFAULT_MAX_ANSWER_BYTES


class AnswerStream:
    """Reads one answer with `reader`, within `limits`. `server` names the server in errors. `has_output` is true once a
    batch has been passed on."""

    __slots__ = (
        "_allowance",
        "_connection",
        "_deadline",
        "_exceeds_limits",
        "_has_started",
        "_is_sink_ready",
        "_last_batch",
        "_limits",
        "_max_deltas",
        "_push_error",
        "_reader",
        "_server",
        "_sink",
        "has_output",
    )

    def __init__(
        self, connection: HttpConnection, reader: ChunkReader, limits: EndpointLimits, server: str, sink: Sink[Delta]
    ) -> None:
        self.has_output = False
        self._sink = sink
        self._connection = connection
        self._reader = reader
        self._limits = limits
        self._server = server
        self._allowance = AnswerAllowance(limits.max_answer_bytes)
        self._max_deltas = limits.max_answer_bytes // MIN_DELTA_BYTES
        self._deadline = 0.0
        self._has_started = self._exceeds_limits = False
        self._is_sink_ready = True
        self._last_batch: list[Delta] = []
        self._push_error: BaseException | None = None

    async def read(self, first_token_deadline: float) -> None:
        """Write the batches as they arrive, and put the last one, which has the Finish. Raises UpstreamTimeout,
        AnswerTooLarge, Overloaded, and the errors of the reader and of the connection: before the first batch as
        UpstreamUnavailable where a retry is safe."""
        reader, connection = self._reader, self._connection
        self._deadline = first_token_deadline
        while not reader.is_finished:
            try:
                if connection.is_ready:
                    self._take(connection.read_available())
                else:
                    await connection.push_data(self._take_pushed, self._deadline)
            except TimeoutError as exc:
                raise token_timeout_error(self._limits, has_started=self._has_started) from exc
            except HttpError as exc:
                error = UpstreamError if self._has_started else UpstreamUnavailable
                raise error(f"The connection to the {self._server} broke before the answer ended.") from exc
            if self._push_error is not None:
                raise self._push_error
            if self._exceeds_limits:
                raise self._size_error()
            if self._last_batch:
                self.has_output = True
                await self._sink.put(self._last_batch)
            if reader.failure is not None:
                is_final = self._has_started or self._last_batch
                raise reader.failure if is_final else _to_retryable_error(reader.failure)
            if not self._is_sink_ready:
                await self._sink.ready()
                self._is_sink_ready = True
                self._deadline = monotonic() + self._limits.token_gap_s
            elif not reader.is_finished and monotonic() > self._deadline:
                # while there is always data, no wait ends at the deadline
                raise token_timeout_error(self._limits, has_started=self._has_started)

    def _take(self, data: bytes) -> bool:
        """Write what has arrived, the end of the answer where `data` is empty; return true if more may be taken at
        once. The last batch is kept, to be put."""
        reader = self._reader
        batch = reader.feed(data) if data else reader.end()
        size_bytes, allowance = reader.answer_bytes, self._allowance
        self._exceeds_limits = reader.delta_count > self._max_deltas or (
            size_bytes > allowance.allowed_bytes and not allowance.extend(size_bytes, self._connection.turn.tenant)
        )
        if reader.is_finished or reader.failure is not None or self._exceeds_limits:
            self._last_batch = batch
            return False
        if batch or reader.saw_activity:
            self._has_started = True
            reader.saw_activity = False
            self._deadline = monotonic() + self._limits.token_gap_s  # the event loop's own clock, without a call of it
        if not batch:
            return True
        self.has_output = True
        self._is_sink_ready = self._sink.write(batch)
        return self._is_sink_ready

    def _size_error(self) -> StackError:
        limit = self._limits.max_answer_bytes
        if self._reader.answer_bytes > limit or self._reader.delta_count > self._max_deltas:
            return AnswerTooLarge(f"The inference server sent more than max_answer_bytes ({limit}) of answer.")
        error = too_many_bytes_error()
        error.is_of_receiver = True  # the upstream has done nothing wrong
        return error

    def _take_pushed(self, data: bytes) -> None:
        """Take what has arrived. Runs in the callback of the connection, and so must not raise."""
        try:
            if self._take(data):
                self._connection.deadline = self._deadline
                return
        except BaseException as exc:  # noqa: BLE001 - raised where the answer is read
            self._push_error = exc
        self._connection.wake()


def token_timeout_error(limits: EndpointLimits, *, has_started: bool) -> UpstreamTimeout:
    """Return the error of a server that sent no token in time."""
    name, limit_s = ("token_gap", limits.token_gap_s) if has_started else ("first_token", limits.first_token_s)
    return UpstreamTimeout(f"The inference server sent no token within {name}_timeout_s ({limit_s:g} s).")


def _to_retryable_error(failure: StackError) -> StackError:
    """Return the error of a stream that failed before its first delta as one that allows a retry."""
    if type(failure) is not UpstreamError:
        return failure
    error = UpstreamUnavailable(failure.message)
    for note in getattr(failure, "__notes__", ()):
        error.add_note(note)
    return error
