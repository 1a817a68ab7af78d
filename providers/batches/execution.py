"""BlockExecution: executes the lines of one block that this process has claimed, and stores their results.

A line is executed when the tenant has a place for it and the process's own clients leave room. A block that ends
early leaves the results that it has, and another worker goes on with the other lines.

A line may end its process. So each is stored as begun before it is executed. The lines that were running when a worker
ended are executed one at a time by those that follow: a second worker that ends shows which line is to blame, and that
line fails alone. A worker that lost its lease and lives has not been ended by its lines.
"""

import asyncio
import hashlib
import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from apis.batches.batches import BatchOwner, LineAnswer, LineExecutor
from apis.batches.spare_capacity import SpareCapacity
from apis.errors import InvalidRequest, StorageCorrupt, StoredValueTooLarge
from apis.storage.kv_store import Delete, KVStore, Op, Put
from apis.storage.records import encode_record
from providers.batches.records import (
    KEY_REVOKED,
    KEY_REVOKED_MESSAGE,
    BatchRef,
    BatchState,
    BlockCounts,
    BlockRecord,
    block_life_s,
    parse_block_name,
)
from providers.batches.results import LineUsage, add_result, build_result, load_counts, read_usage
from providers.batches.validation import decode_body, decode_line, splice_fields
from providers.common.jobs import Claim
from providers.common.state.worker_signs import WorkerSign

_log = logging.getLogger(__name__)

StopReason = Literal["", "batch_cancelled", "batch_expired", "api_key_revoked", "storage_corrupt", "drain"]
ABANDON_MESSAGES: Final[Mapping[str, str]] = {
    "batch_expired": "This request could not be executed before the completion window expired.",
    "batch_cancelled": "This request was not executed because the batch was cancelled.",
    KEY_REVOKED: f"This request was not executed. {KEY_REVOKED_MESSAGE}",
    "storage_corrupt": "This request cannot be read from the store any more: it is damaged.",
}
_MAX_LOSSES: Final = 2
"""Workers that one line may cost until it fails."""
_WORKER_LOST: Final = {
    "code": "worker_lost",
    "message": f"The processes that executed this request ended before it was done, {_MAX_LOSSES} times.",
}
_MAX_RETRY_DELAY_S: Final = 60.0
_HTTP_OK: Final = 200


@dataclass(frozen=True, slots=True)
class LineLimits:
    """How lines are executed: `max_attempts` per line, the first retry after `retry_s`."""

    max_attempts: int
    retry_s: float


@dataclass(frozen=True, slots=True)
class BatchBlock:
    """A block of lines of a batch."""

    ref: BatchRef
    batch: BatchState
    name: str


@dataclass(frozen=True, slots=True)
class LineGate:
    """The capacity of this process by which lines of all blocks are admitted, and their executor."""

    capacity: SpareCapacity
    executor: LineExecutor


class BlockExecution:
    """The execution of one claimed block. `stop` ends it early."""

    def __init__(
        self, kv: KVStore, claim: Claim[BatchBlock, BlockRecord], gate: LineGate, limits: LineLimits, sign: WorkerSign
    ) -> None:
        self._kv = kv
        self._claim = claim
        self._block = claim.subject
        self._sign = sign
        self._gate = gate
        self._limits = limits
        self._first_line, self._line_count = parse_block_name(self._block.name)
        self._counts = BlockCounts()
        self._count_lock = asyncio.Lock()
        self._tasks: dict[asyncio.Task[None], int] = {}
        self._running: set[int] = set()
        self._storing: set[int] = set()
        self._stored_begun: frozenset[int] = frozenset()
        self._begun_lock = asyncio.Lock()
        self._stop_reason: StopReason = abandon_reason(self._block.batch) if self._block.batch.abandons_lines else ""

    @property
    def ref(self) -> BatchRef:
        return self._block.ref

    def stop(self, reason: StopReason) -> None:
        """End the execution: with `drain`, when the lines in progress have ended, for another worker to go on; else at
        once, and the lines without a result fail for that reason."""
        if self._stop_reason and self._stop_reason != "drain":
            return
        self._stop_reason = reason
        for task, number in self._tasks.items():
            # a result that may be stored already must be counted, so that the line gets no second one
            if number not in self._storing and (reason != "drain" or number not in self._running):
                task.cancel()

    async def run(self) -> None:
        """Execute the lines, and remove a block that is done. Raises LeaseLost if another worker has it."""
        try:
            await self._run_lines()
        finally:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)
        if len(self._counts.done) >= self._line_count:
            await self._claim.lease.release([Delete(self._claim.job.key), Delete(self._data_key("input"))])

    async def _run_lines(self) -> None:
        lines = await self._load_lines()
        for number, line in lines.items():
            task = asyncio.create_task(self._run_line(number, line))
            self._tasks[task] = number
        if self._stop_reason:
            for task in self._tasks:
                task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        errors = [task.exception() for task in self._tasks if task.done() and not task.cancelled()]
        for error in errors:
            if error is not None:
                raise error
        if self._stop_reason in ABANDON_MESSAGES:
            fields = {"code": self._stop_reason, "message": ABANDON_MESSAGES[self._stop_reason]}
            for number, line in lines.items():
                if number not in self._counts.done:
                    await self._store_error(number, line, fields)

    async def _load_lines(self) -> dict[int, bytes]:
        """Return the lines without a result, by their numbers."""
        ref = self._block.ref
        self._counts = await load_counts(self._kv, ref, self._block.name)
        try:
            input_entry = await self._kv.get(self._data_key("input"))
            if input_entry is None:
                raise StorageCorrupt
            lines = input_entry.value.split(b"\n")
            if len(lines) != self._line_count or not all(map(_is_readable, lines)):
                raise StorageCorrupt
        except StorageCorrupt:
            _log.error("the lines of a block of %s are damaged", ref.id)
            self._stop_reason = self._stop_reason or "storage_corrupt"
            lines = [b"{}"] * self._line_count
        numbered = dict(enumerate(lines, self._first_line))
        return {number: line for number, line in numbered.items() if number not in self._counts.done}

    async def _run_line(self, number: int, line: bytes) -> None:
        """Execute a line until it has a result, and store that. Raises StoreUnavailable: an outage of the store fails
        no line."""
        losses = await self._count_losses(number)
        if losses >= _MAX_LOSSES:
            await self._store_error(number, line, _WORKER_LOST)
            return
        try:
            await self._kv.require_room(self._block.ref.tenant)
        except InvalidRequest as exc:
            await self._store_error(number, line, {"code": exc.code or exc.type, "message": exc.message})
            return
        attempt = 0
        while True:
            async with self._gate.capacity.admit(self._block.ref.tenant, alone=losses > 0):
                self._running.add(number)
                await self._store_begun()
                answer = await self._execute_line(number, line, attempt + 1)
            attempt += not answer.is_limited
            if not answer.is_limited and (not answer.is_transient or attempt == self._limits.max_attempts):
                await self._store_answer(number, line, answer)
                return
            self._running.discard(number)
            if self._stop_reason == "drain":
                return
            await self._store_begun()  # no worker that ends while it waits is lost to it
            delay_s = min(_MAX_RETRY_DELAY_S, self._limits.retry_s * 2 ** max(0, attempt - 1))
            await asyncio.sleep(max(answer.retry_after_s or 0, delay_s) * random.uniform(0.5, 1))  # noqa: S311 - spreads attempts, not a secret

    async def _count_losses(self, number: int) -> int:
        """Return the number of workers that the line may have ended. Before it fails for them, those that live are
        found out, and do not count. Raises StoreUnavailable."""
        block = self._claim.record
        workers = block.losses.get(number, [])
        if len(workers) >= _MAX_LOSSES:
            workers = block.losses[number] = await self._sign.list_ended(workers)
        return len(workers)

    async def _execute_line(self, number: int, line: bytes, attempt: int) -> LineAnswer:
        batch, body = self._block.batch, bytes(decode_line(line).body)
        engine_priority = self._gate.capacity.engine_priority
        if engine_priority is not None and batch.endpoint != "/v1/embeddings":
            fields = decode_body(body)
            body = body if fields.priority is not None else splice_fields(body, {"priority": engine_priority})
        owner = BatchOwner(self._block.ref.tenant, batch.key_id)
        response_id = self._response_id(number, attempt)
        return await self._gate.executor.execute(batch.endpoint, body, owner=owner, response_id=response_id)

    async def _store_begun(self) -> None:
        """Store which lines are running, as the holder of the lease; lines that begin together share a write."""
        claim = self._claim
        async with self._begun_lock:
            begun = frozenset(self._running)
            if begun == self._stored_begun:
                return
            claim.record.begun = sorted(begun)
            await claim.lease.write([Put(claim.job.key, encode_record(claim.record), block_life_s(self._block.batch))])
            self._stored_begun = begun

    def _response_id(self, number: int, attempt: int) -> str:
        """Return the id of the response of an attempt, the same for every worker that executes the line."""
        name = f"{self._block.ref.id}/{number}/{attempt}".encode()
        digest = hashlib.blake2b(name, digest_size=16).hexdigest()
        return f"resp_{self._block.batch.created_at * 1000:012x}{digest}"

    async def _store_answer(self, number: int, line: bytes, answer: LineAnswer) -> None:
        body = answer.body
        if b"\n" in body or b"\r" in body:
            body = msgspec.json.encode(msgspec.json.decode(body))
        is_success = answer.status == _HTTP_OK
        usage = read_usage(body) if is_success else LineUsage()
        fields = {"status_code": answer.status, "request_id": answer.request_id, "body": msgspec.Raw(body)}
        try:
            await self._store_result(
                number, build_result(decode_line(line).custom_id, fields, None), usage, is_success=is_success
            )
        except StoredValueTooLarge as exc:
            await self._store_error(number, line, {"code": exc.code or "", "message": exc.message})

    async def _store_error(self, number: int, line: bytes, error: Mapping[str, str]) -> None:
        await self._store_result(
            number, build_result(decode_line(line).custom_id, None, error), LineUsage(), is_success=False
        )

    async def _store_result(self, number: int, result: bytes, usage: LineUsage, *, is_success: bool) -> None:
        """Store a result and the counts with it, as the holder of the lease. It survives the end of the process; a loss
        of power may take it along with its count, and then the line is executed again."""
        claim = self._claim
        self._storing.add(number)
        prefix = self._block.ref.data_prefix("output" if is_success else "error")
        ttl_s = block_life_s(self._block.batch)
        async with self._count_lock:
            counts = BlockCounts(**{name: getattr(self._counts, name) for name in BlockCounts.__struct_fields__})
            add_result(counts, number, usage, is_success=is_success)
            ops: list[Op] = [
                Put(f"{prefix}{number:06d}", result, ttl_s),
                Put(self._data_key("progress"), encode_record(counts), ttl_s),
            ]
            await claim.lease.write(ops)
            self._counts = counts
        self._running.discard(number)

    def _data_key(self, kind: Literal["input", "progress"]) -> str:
        return f"{self._block.ref.data_prefix(kind)}{self._block.name}"


def _is_readable(line: bytes) -> bool:
    try:
        decode_line(line)
    except (msgspec.MsgspecError, ValueError):
        return False
    return True


def abandon_reason(batch: BatchState) -> StopReason:
    """Return why the lines of the batch that have no result are not executed."""
    if any(error.code == KEY_REVOKED for error in batch.errors):
        return KEY_REVOKED
    return "batch_cancelled" if batch.status == "cancelling" else "batch_expired"
