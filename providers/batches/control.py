"""BatchControl: the changes of a batch as a whole, each by one worker at a time: validation, expiry, the files at the
end, cancellation.

Every step leaves the batch in a state from which another worker goes on. A file appears in the same write that names it
in the batch, so none is ever created twice.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Final

from apis.documents.files import CreateFile, FileExpiry, Files
from apis.errors import NotFound, Overloaded, StackError, StorageCorrupt
from apis.events import EventQueue
from apis.inference import Inference
from apis.storage.kv_store import Delete, KVStore, Op
from apis.storage.lease import Lease
from apis.storage.records import decode_record, delete_all
from providers.batches.execution import LineGate
from providers.batches.records import (
    ENDED,
    BatchRef,
    BatchState,
    BatchStatus,
    BlockCounts,
    LineError,
    ResultKind,
    stored_life_s,
)
from providers.batches.results import load_all_counts, read_results
from providers.batches.validation import BatchValidator
from providers.common.state.change import change
from providers.common.state.worker_signs import WorkerSign

_log = logging.getLogger(__name__)

_DELETE_BATCH: Final = 256
_MAX_LOSSES: Final = 3
"""Workers that the steps of one batch as a whole may cost until it fails."""
_WORKER_LOST: Final = LineError(
    "worker_lost",
    f"The processes that worked on this batch as a whole ended before they were done, {_MAX_LOSSES} times.",
)


class BatchControl:
    """Changes batches of all tenants in one store."""

    def __init__(
        self,
        kv: KVStore,
        files: Files,
        inference: Inference,
        events: EventQueue,
        sign: WorkerSign,
        *,
        lease_s: float,
        max_line_bytes: int,
    ) -> None:
        self._sign = sign
        self._kv = kv
        self._files = files
        self._inference = inference
        self._events = events
        self._lease_s = lease_s
        self._max_line_bytes = max_line_bytes

    async def load(self, ref: BatchRef) -> tuple[BatchState, int] | None:
        """Return the batch and the version of its record; None if there is none."""
        entry = await self._kv.get(ref.key)
        return None if entry is None else (decode_record(entry, BatchState), entry.version)

    async def change(
        self, ref: BatchRef, edit: Callable[[BatchState], bool], ops: Sequence[Op] = ()
    ) -> BatchState | None:
        """Apply `edit` to the record and store it with `ops`. Returns the record; None if there is none, or if `edit`
        returned False, and nothing was changed."""

        def edit_existing(record: BatchState | None) -> BatchState | None:
            return record if record is not None and edit(record) else None

        return await change(self._kv, ref.key, BatchState, edit_existing, also=ops, ttl_s=stored_life_s)

    async def end(self, ref: BatchRef, status: BatchStatus, before: Sequence[BatchStatus]) -> BatchState | None:
        """Let a batch that has one of the statuses `before` end, and report that to the webhooks."""

        def enter(record: BatchState) -> bool:
            if record.status not in before:
                return False
            record.enter(status)
            return True

        return await self._change_and_report(ref, enter, status)

    async def _change_and_report(
        self, ref: BatchRef, edit: Callable[[BatchState], bool], status: BatchStatus
    ) -> BatchState | None:
        """Apply a change that ends the batch with this status, and report that to the webhooks."""
        ops = [Delete(ref.active_key), *await self._events.event_ops(f"batch.{status}", ref.id, ref.tenant)]
        record = await self.change(ref, edit, ops)
        self._events.wake()
        return record

    async def count_results(self, ref: BatchRef, record: BatchState) -> BlockCounts:
        """Return the counts of all blocks as of now."""
        if record.counts is not None:
            return record.counts
        return await load_all_counts(self._kv, ref) if record.total else BlockCounts()

    async def advance(self, ref: BatchRef, gate: LineGate) -> bool:
        """Validate a new batch, or finish one whose blocks are all done. Returns False if another worker does that.
        Raises LeaseLost. The last worker that this may cost does it alone, as `gate` admits it: so nothing else is to
        blame if that worker ends."""
        lease = Lease(self._kv, ref.control_key, self._lease_s)
        if await lease.acquire() is None:
            return False
        async with lease.renew_in_background():
            try:
                if await self._is_last_try(ref):
                    async with gate.admit(ref.tenant, alone=True):
                        await self._advance(ref, lease)
                else:
                    await self._advance(ref, lease)
            finally:
                await lease.release(even_if_lost=True)
        return True

    async def _is_last_try(self, ref: BatchRef) -> bool:
        """Return True if the batch has cost all but one of the workers that it may."""
        loaded = await self.load(ref)
        if loaded is None:
            return False
        lost = [*loaded[0].lost_controllers, loaded[0].controller]
        return sum(worker not in ("", self._sign.name) for worker in lost) == _MAX_LOSSES - 1

    async def _advance(self, ref: BatchRef, lease: Lease) -> None:
        """Take the next step of a batch. It is stored before that this worker does, so that a batch which ends its
        workers is found out."""
        record = await self.change(ref, self._begin_control)
        if record is None:
            await self._kv.write([Delete(ref.active_key)])
            return
        try:
            if await self._has_lost_too_many(record):
                await self._give_up(ref)
            elif record.status == "validating":
                await self._validate(ref, record, lease)
            else:
                await self._finish(ref)
        finally:
            await self.change(ref, self._end_control)

    def _begin_control(self, record: BatchState) -> bool:
        if record.status in ENDED:
            return False
        if record.controller not in ("", self._sign.name):
            record.lost_controllers.append(record.controller)
        record.controller = self._sign.name
        return True

    async def _has_lost_too_many(self, record: BatchState) -> bool:
        lost = record.lost_controllers
        return len(lost) >= _MAX_LOSSES and len(await self._sign.list_ended(lost)) >= _MAX_LOSSES

    def _end_control(self, record: BatchState) -> bool:
        if record.controller != self._sign.name:
            return False
        record.controller, record.lost_controllers = "", []
        return True

    async def _give_up(self, ref: BatchRef) -> None:
        """Let a batch fail that has cost too many workers; what is executed of it already stays in no file."""
        _log.error("%s fails: %d processes have ended while they worked on it as a whole", ref.id, _MAX_LOSSES)

        def fail(record: BatchState) -> bool:
            if record.status in ENDED:
                return False
            record.errors = [*record.errors, _WORKER_LOST]
            record.enter("failed")
            return True

        await self._change_and_report(ref, fail, "failed")
        await self._delete_data_of_ended(ref)

    async def _validate(self, ref: BatchRef, record: BatchState, lease: Lease) -> None:
        if time.time() > record.expires_at:
            await self.end(ref, "expired", ("validating",))
            return
        validator = BatchValidator(ref, record, lease, await self._list_models(), self._max_line_bytes)
        try:
            async with aclosing(self._files.content(record.input_file_id, tenant=ref.tenant)) as data:
                await validator.run(data)
        except NotFound:
            validator.errors.append(LineError("invalid_input_file", "The input file was deleted.", None))
        except StorageCorrupt:
            validator.errors.append(LineError("invalid_input_file", "The input file cannot be read: it is damaged."))
        if validator.errors:
            await self._fail(ref, validator.errors)
            await self._delete_data_of_ended(ref)
            return

        def begin(record: BatchState) -> bool:
            if record.status != "validating":
                return False
            record.enter("in_progress")
            record.total, record.model = validator.line_count, validator.model
            return True

        if await self.change(ref, begin) is None:
            await self._delete_data_of_ended(ref)

    async def _fail(self, ref: BatchRef, errors: Sequence[LineError]) -> None:
        def add_errors(record: BatchState) -> bool:
            if record.status != "validating":
                return False
            record.errors = [*errors]
            record.enter("failed")
            return True

        await self._change_and_report(ref, add_errors, "failed")

    async def _list_models(self) -> set[str] | None:
        """Return the models of the server; None if they cannot be listed now, and then each line says what is wrong."""
        try:
            return {model.id for model in await self._inference.models()}
        except StackError as exc:
            _log.warning("the models of a batch are not checked: %s", exc.message)
            return None

    async def _finish(self, ref: BatchRef) -> None:
        """Write the files of a batch whose blocks are all done, and end it."""
        loaded = await self.load(ref)
        if loaded is None or await self._kv.scan(ref.block_prefix, limit=1):
            return
        counts = await self.count_results(ref, loaded[0])
        counts.done = []

        def finalize(record: BatchState) -> bool:
            record.counts = counts
            if record.status == "in_progress":
                record.enter("finalizing")
            return True

        record = await self.change(ref, finalize)
        if record is None:
            return
        if counts.completed and record.output_file_id is None:
            await self._create_file(ref, "output")
        if counts.failed and record.error_file_id is None:
            await self._create_file(ref, "error")
        await self._delete_data(ref)
        if record.status == "cancelling":
            await self.end(ref, "cancelled", ("cancelling",))
        else:
            await self.end(ref, "expired" if record.is_expiring else "completed", ("finalizing",))

    async def _create_file(self, ref: BatchRef, kind: ResultKind) -> None:
        """Create a file of the results and name it in the batch, in one write. Raises Overloaded if another did."""
        loaded = await self.load(ref)
        if loaded is None:
            return
        life_s = loaded[0].output_life_s

        async def commit(file_id: str) -> Sequence[Op]:
            current = await self.load(ref)
            if current is None or getattr(current[0], f"{kind}_file_id") is not None:
                raise Overloaded("Another worker has written the file.")
            record, version = current
            setattr(record, f"{kind}_file_id", file_id)
            return [ref.put(record, version)]

        # a purpose that no client may choose
        new_file = CreateFile.model_construct(
            filename=f"{ref.id}_{kind}.jsonl",
            purpose="batch_output",
            expires_after=None if life_s is None else FileExpiry(anchor="created_at", seconds=life_s),
        )
        async with aclosing(read_results(self._kv, ref, kind)) as results:
            await self._files.create(new_file, results, tenant=ref.tenant, source="server", commit=commit)

    async def _delete_data_of_ended(self, ref: BatchRef) -> None:
        """Delete the blocks of a batch unless it goes on: another worker may have validated it meanwhile."""
        loaded = await self.load(ref)
        if loaded is None or loaded[0].status in ENDED:
            await self._delete_data(ref)

    async def _delete_data(self, ref: BatchRef) -> None:
        await delete_all(self._kv, ref.block_prefix, page_size=_DELETE_BATCH)
        for kind in ("input", "output", "error", "progress"):
            await delete_all(self._kv, ref.data_prefix(kind), page_size=_DELETE_BATCH)
