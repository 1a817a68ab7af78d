"""BatchWorkers: the batches and blocks that this process works on, claimed in turns of the tenants."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from apis.batches.batches import BatchOwner
from apis.errors import StackError, StoreUnavailable
from apis.fair_share import FairShare, Place
from apis.storage.kv_store import Entry, KVStore
from apis.storage.lease import LeaseLost
from apis.storage.records import decode_record, scan_groups
from apis.ticks import wait_for_tick
from providers.batches.control import BatchControl
from providers.batches.execution import (
    BlockExecution,
    LineGate,
    LineLimits,
    abandon_reason,
    claim_block,
)
from providers.batches.records import ACTIVE_PREFIX, BatchRef, BatchState, decode_active_key
from providers.common.state.scan import skipping_damaged
from providers.common.state.worker_signs import WorkerSign
from providers.common.supervision import supervise

_log = logging.getLogger(__name__)

_SCANNED_BLOCKS: Final = 64
_RETRY_S: Final = 2.0
"""Seconds until a batch whose files could not be read or written is tried again."""
_REST_FACTOR: Final = 4
"""A look at all batches pauses for this many times its duration, so that it takes a fifth of the process's time."""
_CLOSE_TIMEOUT_S: Final = 0.4
"""Seconds that cancelled blocks have to release their leases."""


@dataclass(slots=True)
class _TenantWork:
    """The work that is there for one tenant, in its order."""

    unchanged: list[BatchRef] = field(default_factory=list[BatchRef])
    """Batches to be validated or finished."""
    blocks: list[tuple[BatchRef, BatchState, tuple[str, Entry]]] = field(
        default_factory=list[tuple[BatchRef, BatchState, tuple[str, Entry]]]
    )


@dataclass(frozen=True, slots=True)
class WorkerShares:
    """The shares of this process: blocks that it has claimed, and batches that it validates or finishes."""

    blocks: FairShare
    controls: FairShare
    max_active: int


class BatchWorkers:
    """Claims blocks of all tenants' batches, and executes each in a task of its own."""

    def __init__(
        self,
        kv: KVStore,
        control: BatchControl,
        gate: LineGate,
        limits: LineLimits,
        shares: WorkerShares,
        sign: WorkerSign,
    ) -> None:
        self._kv = kv
        self._control = control
        self._gate = gate
        self._limits = limits
        self._shares = shares
        self._sign = sign
        self._wakeup = asyncio.Event()
        self._executions: dict[asyncio.Task[None], BlockExecution] = {}
        self._controls: dict[BatchRef, asyncio.Task[None]] = {}
        self._retry_at: dict[BatchRef, float] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._is_draining = False
        self._claiming = asyncio.Lock()

    def start(self, poll_s: float, lease_s: float) -> None:
        self._sign.start()
        self._watcher = supervise("the watcher of batches", lambda: self._watch(poll_s, lease_s))

    def wake(self) -> None:
        """Look for work now instead of after the poll interval."""
        self._wakeup.set()

    async def drain(self, *, at_once: bool = False) -> None:
        """Begin no more lines, and return when those in progress have ended; with `at_once` they are broken off, and
        other workers execute them."""
        self._is_draining = True
        self._wakeup.set()
        async with self._claiming:  # a block that was just claimed is executed
            if self._watcher is not None:
                self._watcher.cancel()
        for task, execution in self._executions.items():
            execution.stop("drain")
            if at_once:
                task.cancel()
        while tasks := [*self._executions, *self._controls.values()]:
            await asyncio.wait(tasks)

    async def close(self) -> None:
        """Cancel all work, so that other workers can go on at once."""
        self._is_draining = True
        tasks = [*self._executions, *self._controls.values(), *([self._watcher] if self._watcher else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_TIMEOUT_S)
        await self._sign.close()

    async def _watch(self, poll_s: float, lease_s: float) -> None:
        while not self._is_draining:
            self._wakeup.clear()
            began_at = time.monotonic()
            try:
                work = await self._list_work()
                async with self._claiming:
                    self._start_controls(work)
                    await self._claim_blocks(work, lease_s)
            except StackError as exc:
                _log.warning("batches wait: %s", exc.message)
            await asyncio.sleep(_REST_FACTOR * (time.monotonic() - began_at))
            await wait_for_tick(self._wakeup, poll_s)

    async def _list_work(self) -> dict[str, _TenantWork]:
        work: dict[str, _TenantWork] = {}
        async for tenant, rows in scan_groups(self._kv, ACTIVE_PREFIX, limit=self._shares.max_active):
            refs = [decode_active_key(key) for key, _ in rows]
            entries = await self._kv.get_many([ref.key for ref in refs])
            tenant_work = work.setdefault(tenant, _TenantWork())
            for ref, entry in zip(refs, entries, strict=True):
                try:
                    with skipping_damaged(self._kv, ref.key, "BatchState"):
                        await self._list_work_of(ref, entry, tenant_work)
                except StoreUnavailable:
                    raise
                except StackError as exc:
                    _log.warning("%s waits: %s", ref.id, exc.message)
        return work

    async def _list_work_of(self, ref: BatchRef, entry: Entry | None, work: _TenantWork) -> None:
        record = None if entry is None else decode_record(entry, BatchState)
        if record is None or record.status == "validating":
            work.unchanged.append(ref)
            return
        if record.status == "in_progress" and not record.is_expiring and time.time() > record.expires_at:
            record = await self._control.change(ref, _begin_expiry) or record
        if record.status == "in_progress" and not await self._gate.may_execute(BatchOwner(ref.tenant, record.key_id)):
            record = await self._control.change(ref, BatchState.revoke) or record
        if record.abandons_lines:
            for execution in self._executions.values():
                if execution.ref == ref:
                    execution.stop(abandon_reason(record))
        if len(work.blocks) >= _SCANNED_BLOCKS and not record.abandons_lines:
            return
        rows = await self._kv.scan(ref.block_prefix, limit=_SCANNED_BLOCKS)
        if not rows:
            work.unchanged.append(ref)
            return
        leases = await self._kv.get_many([f"{ref.lease_prefix}{_block_name(key)}" for key, _ in rows])
        work.blocks += [(ref, record, row) for row, lease in zip(rows, leases, strict=True) if lease is None]

    def _start_controls(self, work: dict[str, _TenantWork]) -> None:
        """Validate or finish batches, of each tenant its oldest first; one that failed, or that another worker has,
        after a pause."""
        if self._is_draining:
            return
        active = {ref for each in work.values() for ref in each.unchanged}
        self._retry_at = {ref: retry_at for ref, retry_at in self._retry_at.items() if ref in active}
        for tenant in sorted(work, key=self._shares.controls.used_by):
            for ref in work[tenant].unchanged:
                if ref in self._controls or self._retry_at.get(ref, 0) > time.monotonic():
                    continue
                place = self._shares.controls.try_acquire(tenant)
                if place is None:
                    break
                task = asyncio.create_task(self._run(ref.id, partial(self._advance, ref)))
                self._controls[ref] = task
                task.add_done_callback(lambda _, ref=ref, place=place: self._end_control(ref, place))

    async def _advance(self, ref: BatchRef) -> None:
        self._retry_at[ref] = time.monotonic() + _RETRY_S
        if await self._control.advance(ref, self._gate):
            self._retry_at.pop(ref, None)
            self._wakeup.set()

    def _end_control(self, ref: BatchRef, place: Place) -> None:
        _log_bug(self._controls[ref])
        del self._controls[ref]
        place.release()

    async def _claim_blocks(self, work: dict[str, _TenantWork], lease_s: float) -> None:
        """Claim blocks while there are places; the tenant that uses the fewest comes first."""
        waiting = {tenant: each.blocks for tenant, each in work.items() if each.blocks}
        while waiting and not self._is_draining:
            tenant = min(waiting, key=self._shares.blocks.used_by)
            place = self._shares.blocks.try_acquire(tenant) if waiting[tenant] else None
            if place is None:
                del waiting[tenant]
                continue
            with ExitStack() as claim_stack:
                claim_stack.enter_context(place)
                ref, record, row = waiting[tenant].pop(0)
                claim = None
                with skipping_damaged(self._kv, row[0], "BlockRecord"):
                    claim = await claim_block(self._kv, ref, record, row, lease_s, self._sign)
                if claim is not None:
                    self._start_execution(BlockExecution(self._kv, claim, self._gate, self._limits), place)
                    claim_stack.pop_all()

    def _start_execution(self, execution: BlockExecution, place: Place) -> None:
        task = asyncio.create_task(self._run(execution.ref.id, execution.run))
        self._executions[task] = execution
        task.add_done_callback(lambda ended: self._end_execution(ended, place))

    def _end_execution(self, task: "asyncio.Task[None]", place: Place) -> None:
        _log_bug(task)
        del self._executions[task]
        place.release()
        self._wakeup.set()

    async def _run(self, batch_id: str, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except LeaseLost:
            _log.info("a part of %s has ended, or another worker has it now", batch_id)
        except StackError as exc:
            _log.warning("a part of %s is done again later: %s", batch_id, exc.message)


def _log_bug(task: "asyncio.Task[None]") -> None:
    """Log the exception of a part of a batch that no provider should raise. The part is done again later."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("a part of a batch failed on a bug", exc_info=error)


def _begin_expiry(record: BatchState) -> bool:
    if record.status != "in_progress" or record.is_expiring:
        return False
    record.is_expiring = True
    return True


def _block_name(key: str) -> str:
    return key.rpartition("/")[2]
