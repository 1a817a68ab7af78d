"""BatchControl: the changes of a batch as a whole, each by one worker at a time: validation, expiry, the files at the
end, cancellation.

Every step leaves the batch in a state from which another worker goes on. A file appears in the same write that names it
in the batch, so none is ever created twice.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Final

from apis.documents.files import CreateFile, FileExpiry, Files
from apis.errors import NotFound, Overloaded, StackError, StorageCorrupt
from apis.inference import Inference
from apis.storage.kv_store import Delete, KVStore, Op
from apis.storage.lease import Lease
from apis.storage.records import decode_record, delete_all
from apis.webhooks import Webhooks
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

_log = logging.getLogger(__name__)

_DELETE_BATCH: Final = 256


class BatchControl:
    """Changes batches of all tenants in one store."""

    def __init__(
        self,
        kv: KVStore,
        files: Files,
        inference: Inference,
        webhooks: Webhooks,
        *,
        max_line_bytes: int,
    ) -> None:
        self._kv = kv
        self._files = files
        self._inference = inference
        self._webhooks = webhooks
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
        ops = [Delete(ref.active_key), *await self._webhooks.event_ops(f"batch.{status}", ref.id, ref.tenant)]
        record = await self.change(ref, edit, ops)
        self._webhooks.wake(ops)
        return record

    async def count_results(self, ref: BatchRef, record: BatchState) -> BlockCounts:
        """Return the counts of all blocks as of now."""
        if record.counts is not None:
            return record.counts
        return await load_all_counts(self._kv, ref) if record.total else BlockCounts()

    async def advance(self, ref: BatchRef, lease: Lease) -> None:
        """Validate a new batch, or finish one whose blocks are all done, as the holder of the lease. Raises
        LeaseLost."""
        loaded = await self.load(ref)
        if loaded is None or loaded[0].status in ENDED:
            await self._kv.write([Delete(ref.active_key)])
        elif loaded[0].status == "validating":
            await self._validate(ref, loaded[0], lease)
        else:
            await self._finish(ref)

    async def give_up(self, ref: BatchRef, message: str) -> None:
        """Let a batch fail that has cost too many workers; what is executed of it already stays in no file."""

        def fail(record: BatchState) -> bool:
            if record.status in ENDED:
                return False
            record.errors = [*record.errors, LineError("worker_lost", message)]
            record.enter("failed")
            return True

        await self._change_and_report(ref, fail, "failed")
        await self._delete_data_of_ended(ref)

    async def _validate(self, ref: BatchRef, record: BatchState, lease: Lease) -> None:
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
