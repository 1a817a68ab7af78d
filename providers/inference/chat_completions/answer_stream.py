"""AnswerStream: the deltas of one answer, read from its connection. They are pulled batch by batch, or pushed as they
arrive: see `apis.live_batch`."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from functools import partial
from time import monotonic

from apis.deltas import Delta
from apis.errors import StackError, UpstreamError, UpstreamTimeout
from apis.live_batch import LiveBatch, Receiver
from providers.common.held_bytes import AnswerAllowance, too_many_bytes_error
from providers.inference.chat_completions.answer_limits import (
    DEFAULT_MAX_ANSWER_BYTES,
    MIN_DELTA_BYTES,
    AnswerTooLarge,
)
from providers.inference.chat_completions.chunk_reader import ChunkReader
from providers.inference.chat_completions.errors import UpstreamUnavailable
from providers.inference.http.connection import HttpConnection, HttpError


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
    """Reads one answer with `reader`, within `limits`. `server` names the server in errors."""

    __slots__ = (
        "_allowance",
        "_connection",
        "_deadline",
        "_has_started",
        "_limits",
        "_max_deltas",
        "_push_error",
        "_reader",
        "_receive",
        "_server",
        "_unpushed",
    )

    def __init__(self, connection: HttpConnection, reader: ChunkReader, limits: EndpointLimits, server: str) -> None:
        self._connection = connection
        self._reader = reader
        self._limits = limits
        self._server = server
        self._allowance = AnswerAllowance(limits.max_answer_bytes)
        self._max_deltas = limits.max_answer_bytes // MIN_DELTA_BYTES
        self._deadline = 0.0
        self._has_started = False
        self._receive: Receiver[Delta] | None = None
        self._unpushed: list[Delta] = []
        self._push_error: BaseException | None = None

    async def read(self, first_token_deadline: float) -> AsyncGenerator[LiveBatch[Delta]]:
        """Yield the batches that are not pushed, the last one with the Finish. Raises UpstreamTimeout, AnswerTooLarge,
        Overloaded, and the errors of the reader and of the connection: before the first batch as UpstreamUnavailable
        where a retry is safe."""
        reader = self._reader
        self._deadline = first_token_deadline
        while not reader.is_finished:
            try:
                batch = await (self._pull() if self._receive is None else self._push(self._receive))
            except TimeoutError as exc:
                raise token_timeout_error(self._limits, has_started=self._has_started) from exc
            except HttpError as exc:
                error = UpstreamError if self._has_started else UpstreamUnavailable
                raise error(f"The connection to the {self._server} broke before the answer ended.") from exc
            if self._is_too_large():
                raise self._size_error()
            if batch:
                yield LiveBatch(batch, self._push_to)
            if reader.failure is not None:
                raise reader.failure if self._has_started or batch else _to_retryable_error(reader.failure)
            if not self._record_progress(batch) and monotonic() > self._deadline:
                # while there is always data, no wait ends at the deadline
                raise token_timeout_error(self._limits, has_started=self._has_started)

    def _is_too_large(self) -> bool:
        size_bytes = self._reader.answer_bytes
        return (
            size_bytes > self._allowance.allowed_bytes
            and not self._allowance.extend(size_bytes, self._connection.turn.tenant)
        ) or self._reader.delta_count > self._max_deltas

    def _size_error(self) -> StackError:
        limit = self._limits.max_answer_bytes
        if self._reader.answer_bytes > limit or self._reader.delta_count > self._max_deltas:
            return AnswerTooLarge(f"The inference server sent more than max_answer_bytes ({limit}) of answer.")
        error = too_many_bytes_error()
        error.is_of_receiver = True  # the upstream has done nothing wrong
        return error

    def _record_progress(self, batch: list[Delta]) -> bool:
        """Move the deadline if the model has generated something."""
        if not batch and not self._reader.saw_activity:
            return False
        self._has_started = True
        self._reader.saw_activity = False
        self._deadline = monotonic() + self._limits.token_gap_s  # the event loop's own clock, without a call of it
        return True

    async def _pull(self) -> list[Delta]:
        """Return the next batch; an empty one where the data that arrived completes no delta."""
        connection = self._connection
        if not connection.is_ready:
            await connection.wait_for_data(self._deadline)
        data = connection.read_available()
        return self._reader.feed(data) if data else self._reader.end()

    def _push_to(self, receive: Receiver[Delta]) -> None:
        self._receive = receive

    async def _push(self, receive: Receiver[Delta]) -> list[Delta]:
        """Push batches as they arrive, until one needs control or the receiver is not ready; return the batch that was
        not pushed."""
        if not self._connection.is_ready:
            await self._connection.push_data(partial(self._push_data, receive), self._deadline)
        self._receive = None
        if self._push_error is not None:
            raise self._push_error
        batch, self._unpushed = self._unpushed, []
        return batch

    def _push_data(self, receive: Receiver[Delta], data: bytes) -> None:
        """Pass on what has arrived. Runs in the callback of the connection, and so must not raise."""
        reader = self._reader
        try:
            batch = reader.feed(data)
            if reader.is_finished or reader.failure is not None or self._is_too_large():
                self._unpushed = batch
            else:
                if self._record_progress(batch):
                    self._connection.deadline = self._deadline
                if not batch or receive(batch):
                    return
        except BaseException as exc:  # noqa: BLE001 - raised where the answer is read
            self._push_error = exc
            if isinstance(exc, StackError):
                exc.is_of_receiver = True
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
