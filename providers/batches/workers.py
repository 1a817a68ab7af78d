"""The queues of batches: batches to be validated or finished, and blocks of lines. BatchWorkers runs both."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass
from typing import Final

from apis.batches.batches import BatchOwner
from apis.errors import StackError, StoreUnavailable
from apis.fair_share import FairShare
from apis.storage.kv_store import Entry, KVStore
from apis.storage.records import decode_record, scan_groups
from providers.batches.control import BatchControl
from providers.batches.execution import (
    BatchBlock,
    BlockExecution,
    LineGate,
    LineLimits,
    abandon_reason,
)
from providers.batches.records import ACTIVE_PREFIX, BatchRef, BatchState, BlockRecord, block_life_s, decode_active_key
from providers.common.jobs import MAX_UNRETURNED, Claim, Job, JobQueue, JobRecord, LeasedJobs
from providers.common.state.scan import skipping_damaged
from providers.common.state.worker_signs import WorkerSign

_log = logging.getLogger(__name__)

_SCANNED_BLOCKS: Final = 128
_RETRY_S: Final = 2.0
"""Seconds until work that failed on a store, or on files, is tried again."""
_CLOSE_TIMEOUT_S: Final = 0.4
"""Seconds that cancelled work has to be given back."""


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The shares of this process, which are blocks that it has claimed, and batches that it validates or finishes; the
    limits of a line; the active batches of a tenant; and seconds of a lease, and between two looks."""

    blocks: FairShare
    controls: FairShare
    lines: LineLimits
    max_active: int
    lease_s: float
    poll_s: float


class ControlQueue(JobQueue[BatchRef, JobRecord]):
    """Batches to be validated or finished, as the last look for blocks has found them: `waiting`."""

    title = "batches"

    def __init__(
        self,
        kv: KVStore,
        control: BatchControl,
        gate: LineGate,
        places: FairShare,
        sign: WorkerSign,
        on_step: Callable[[], None],
    ) -> None:
        """`on_step` is called when a batch has taken a step: it may have blocks now."""
        super().__init__(kv, JobRecord, places, _RETRY_S)
        self._control = control
        self._gate = gate
        self._sign = sign
        self._on_step = on_step
        self.waiting: Sequence[Job[BatchRef]] = ()

    async def list_waiting(self) -> AsyncGenerator[Job[BatchRef]]:
        waiting, self.waiting = self.waiting, ()
        for job in waiting:
            yield job

    async def read_record(self, job: Job[BatchRef]) -> JobRecord:
        """Return the record; one that is damaged counts as one lost worker, and is replaced by the claim."""
        return await super().read_record(job) or JobRecord(1, workers=["unknown"])

    async def run(self, claim: Claim[BatchRef, JobRecord]) -> None:
        """Take the next step of a batch. The last worker that it may cost does so alone: then nothing else is to blame
        if that worker ends."""
        record = claim.record
        is_last_try = len(record.workers) == self.max_lost_workers
        if is_last_try:  # it waits, and is not to blame if the process ends meanwhile
            record.give_back(self._sign.name)
            await claim.lease.write(await self.build_record_ops(claim))
        async with self._gate.capacity.admit(claim.job.tenant, alone=True) if is_last_try else nullcontext():
            if is_last_try:
                record.begin_attempt(self._sign.name)
                await claim.lease.write(await self.build_record_ops(claim))
            await self._control.advance(claim.subject, claim.lease)
        record.workers = [self._sign.name]  # the next step may cost as many
        self._on_step()

    async def fail(self, claim: Claim[BatchRef, JobRecord], lost_workers: int) -> None:
        times = lost_workers or MAX_UNRETURNED
        ended = "ended" if lost_workers else "left it"
        message = f"The processes that worked on this batch as a whole {ended} before they were done, {times} times."
        await self._control.give_up(claim.subject, message)


class BlockQueue(JobQueue[BatchBlock, BlockRecord]):
    """Blocks of the batches that are in progress. Poison among them is found line by line."""

    title = "blocks of batches"

    def __init__(
        self,
        kv: KVStore,
        control: BatchControl,
        gate: LineGate,
        settings: WorkerSettings,
        sign: WorkerSign,
        on_controls: Callable[[Sequence[Job[BatchRef]]], None],
    ) -> None:
        """`on_controls` is called with the batches that have to be validated or finished, at each look."""
        super().__init__(kv, BlockRecord, settings.blocks, _RETRY_S)
        self._control = control
        self._gate = gate
        self._settings = settings
        self._sign = sign
        self._on_controls = on_controls
        self.executions: dict[str, BlockExecution] = {}

    async def list_waiting(self) -> AsyncGenerator[Job[BatchBlock]]:
        controls: list[Job[BatchRef]] = []
        async with aclosing(scan_groups(self.kv, ACTIVE_PREFIX, limit=self._settings.max_active)) as groups:
            async for tenant, rows in groups:
                refs, block_count = [decode_active_key(key) for key, _ in rows], 0
                entries = await self.kv.get_many([ref.key for ref in refs])
                for ref, entry, (key, active) in zip(refs, entries, rows, strict=True):
                    blocks = await self._try_list_blocks(ref, entry, is_enough=block_count >= _SCANNED_BLOCKS)
                    if blocks is None:
                        controls.append(Job(tenant, ref, ref.control_key, self._settings.lease_s, key, active))
                    else:
                        block_count += len(blocks)
                        for block in blocks:
                            yield block
        self._on_controls(controls)

    async def _try_list_blocks(
        self, ref: BatchRef, entry: Entry | None, *, is_enough: bool
    ) -> Sequence[Job[BatchBlock]] | None:
        """Return what `_list_blocks` does, and nothing of a batch that cannot be read or changed now."""
        try:
            with skipping_damaged(self.kv, ref.key, "BatchState"):
                return await self._list_blocks(ref, entry, is_enough=is_enough)
        except StoreUnavailable:
            raise
        except StackError as exc:
            _log.warning("%s waits: %s", ref.id, exc.message)
        return ()

    async def _list_blocks(
        self, ref: BatchRef, entry: Entry | None, *, is_enough: bool
    ) -> Sequence[Job[BatchBlock]] | None:
        """Return the blocks of a batch; None if it has to be validated or finished. With `is_enough`, only those whose
        lines are abandoned are read."""
        record = None if entry is None else decode_record(entry, BatchState)
        if record is None or record.status == "validating":
            return None
        if record.status == "in_progress" and not record.is_expiring and time.time() > record.expires_at:
            record = await self._control.change(ref, _begin_expiry) or record
        owner = BatchOwner(ref.tenant, record.key_id)
        if record.status == "in_progress" and not await self._gate.executor.may_execute(owner):
            record = await self._control.change(ref, BatchState.revoke) or record
        if record.abandons_lines:
            for execution in self.executions.values():
                if execution.ref == ref:
                    execution.stop(abandon_reason(record))
        if is_enough and not record.abandons_lines:
            return ()
        rows = await self.kv.scan(ref.block_prefix, limit=_SCANNED_BLOCKS)
        jobs: list[Job[BatchBlock]] = []
        for key, block_entry in rows:
            name = key.removeprefix(ref.block_prefix)
            lease_key = f"{ref.lease_prefix}{name}"
            block = BatchBlock(ref, record, name)
            jobs.append(Job(ref.tenant, block, lease_key, self._settings.lease_s, key, block_entry))
        return jobs or None

    async def read_record(self, job: Job[BatchBlock]) -> BlockRecord:
        return await super().read_record(job) or BlockRecord()

    def find_record_life_s(self, job: Job[BatchBlock], record: BlockRecord) -> float:
        return block_life_s(job.subject.batch)

    async def run(self, claim: Claim[BatchBlock, BlockRecord]) -> None:
        key = claim.job.lease_key
        self.executions[key] = BlockExecution(self.kv, claim, self._gate, self._settings.lines, self._sign)
        try:
            await self.executions[key].run()
        finally:
            del self.executions[key]


class BatchWorkers:
    """The work of this process at the batches of all tenants."""

    def __init__(
        self, kv: KVStore, control: BatchControl, gate: LineGate, settings: WorkerSettings, sign: WorkerSign
    ) -> None:
        self._sign = sign
        self._control_queue = ControlQueue(kv, control, gate, settings.controls, sign, self.wake)
        self._block_queue = BlockQueue(kv, control, gate, settings, sign, self._begin_controls)
        self._controls = LeasedJobs(self._control_queue, sign, settings.poll_s)
        self._blocks = LeasedJobs(self._block_queue, sign, settings.poll_s)

    def start(self) -> None:
        self._sign.start()
        self._controls.start()
        self._blocks.start()

    def wake(self) -> None:
        """Look for work now instead of after the poll interval."""
        self._blocks.wake()

    def _begin_controls(self, jobs: Sequence[Job[BatchRef]]) -> None:
        self._control_queue.waiting = jobs
        if jobs:
            self._controls.wake()

    async def drain(self, *, at_once: bool = False) -> None:
        """Begin no more lines, and return when those in progress have ended; with `at_once` they are broken off, and
        other workers execute them."""
        await asyncio.gather(self._blocks.stop_claiming(), self._controls.stop_claiming())
        await asyncio.sleep(0)  # a block that was just claimed begins
        for execution in self._block_queue.executions.values():
            execution.stop("drain")
        if at_once:
            await self._blocks.cancel([claim.job.lease_key for claim in self._blocks.claims])
        await asyncio.gather(self._blocks.drain(), self._controls.drain())

    async def close(self) -> None:
        """Cancel all work, so that other workers can go on at once."""
        await asyncio.gather(self._blocks.close(_CLOSE_TIMEOUT_S), self._controls.close(_CLOSE_TIMEOUT_S))
        await self._sign.close()


def _begin_expiry(record: BatchState) -> bool:
    if record.status != "in_progress" or record.is_expiring:
        return False
    record.is_expiring = True
    return True
