"""LeasedBatches: batches whose lines are leased in blocks to the workers of all processes that share a store."""

import time
from collections.abc import Sequence
from typing import Final, get_args

from openai.types.batch import Batch
from pydantic import Field

from apis.batches.batches import MAX_INPUT_BYTES, BatchEndpoint, BatchListParams, CreateBatch, LineExecutor
from apis.batches.spare_capacity import SpareCapacity
from apis.documents.files import Files
from apis.errors import InvalidRequest, NotFound, RateLimited
from apis.fair_share import ONE_TENANT, FairShare, Tenants
from apis.inference import Inference
from apis.provider import Provider
from apis.storage.kv_store import ABSENT, KVStore, Put
from apis.storage.pages import Page
from apis.storage.records import encode_record
from apis.webhooks import Webhooks
from apis.wire.completion_window import window_to_seconds
from providers.batches.control import BatchControl
from providers.batches.execution import LineGate, LineLimits
from providers.batches.records import (
    ACTIVE_PREFIX,
    BatchRef,
    BatchState,
    BlockCounts,
    batch_to_wire,
    new_batch_ref,
)
from providers.batches.validation import BLOCK_LINES
from providers.batches.workers import BatchWorkers, WorkerSettings
from providers.common.jobs import JobRecord
from providers.common.state.scan import list_page
from providers.common.state.worker_signs import WorkerSign

_CONTROL_PLACES: Final = 2
_BLOCK_TENANTS: Final = 4
"""Tenants of which a process holds blocks at a time: a block is no more than work that is at hand."""


class LeasedBatches(Provider):
    """Batches over the stack's Files, whose requests the stack executes itself, on all workers that share the store. A
    tenant's id is unknown to every other tenant.

    Promises:
    - Each line of a validated batch has exactly one result, in the output file or in the error file, in the order of
      the input, also where processes end. A line whose process was killed is executed again, alone, and fails if a
      second one is: so a line that ends its process fails alone.
    - Requests of clients go before lines, and no tenant's lines wait for all of another's.
    - No file, input or output, is ever in memory as a whole.
    """

    class Config(Provider.Config):
        """`max_running` lines, and background responses with a completion window, are executed at a time in this
        process. One tenant has at most half of these places once there are several, and while the process answers
        requests of clients, `busy_running` are used (by default a quarter). A line that fails for want of capacity is
        tried `max_attempts` times, first after `retry_s`. A tenant may have `max_active` batches that have not ended,
        and a line `max_line_bytes`. `engine_priority` is sent with each request that has no `priority`, for engines
        that rank requests by it (vLLM with `--scheduling-policy priority`). A process that does not renew a lease
        within `lease_s` loses its lines to another one."""

        max_running: int = Field(default=32, ge=1, le=4096)
        busy_running: int | None = Field(default=None, ge=1)
        max_attempts: int = Field(default=5, ge=1, le=100)
        retry_s: float = Field(default=2, gt=0, le=600)
        max_active: int = Field(default=100, ge=1, le=1000)
        max_line_bytes: int = Field(default=32 * 1024 * 1024, ge=1024)
        engine_priority: int | None = Field(default=None, ge=-(2**31), le=2**31 - 1)
        lease_s: float = Field(default=10, gt=0, le=60)
        poll_s: float = Field(default=1, gt=0, le=10)

    def __init__(
        self,
        config: Config,
        kv_store: KVStore,
        files: Files,
        inference: Inference,
        webhooks: Webhooks,
        tenants: Tenants = ONE_TENANT,
    ) -> None:
        self._config = config
        self._kv = kv_store
        self._files = files
        self._tenants = tenants
        self._sign = WorkerSign(kv_store, config.lease_s)
        self._control = BatchControl(kv_store, files, inference, webhooks, max_line_bytes=config.max_line_bytes)
        self._workers: BatchWorkers | None = None

    @property
    def endpoints(self) -> Sequence[str]:
        """The paths that lines may have."""
        return get_args(BatchEndpoint)

    def execute_with(self, executor: LineExecutor) -> SpareCapacity:
        """Execute lines in this process from now on, until it drains or closes. Returns the capacity that they use, for
        other work that may wait."""
        config, several = self._config, self._tenants.are_several
        capacity = SpareCapacity(
            FairShare("lines of batches", config.max_running, several_tenants=several),
            executor.interactive_requests,
            busy_places=config.busy_running or max(1, config.max_running // 4),
            engine_priority=config.engine_priority,
        )
        block_places = 2 * -(-config.max_running // BLOCK_LINES)
        settings = WorkerSettings(
            FairShare(
                "blocks of batches",
                _BLOCK_TENANTS * block_places,
                tenant_places=block_places // 2 if several else block_places,
                several_tenants=True,
            ),
            FairShare("batches", _CONTROL_PLACES, several_tenants=several),
            LineLimits(config.max_attempts, config.retry_s),
            config.max_active,
            config.lease_s,
            config.poll_s,
        )
        gate = LineGate(capacity, executor)
        self._workers = BatchWorkers(self._kv, self._control, gate, settings, self._sign)
        self._workers.start()
        return capacity

    async def drain(self, *, at_once: bool = False) -> None:
        """Begin no more lines, and return when those of this process have ended; other workers go on with the rest.
        With `at_once` they are broken off, to be executed again."""
        if self._workers is not None:
            await self._workers.drain(at_once=at_once)

    async def close(self) -> None:
        if self._workers is not None:
            await self._workers.close()

    async def create(self, request: CreateBatch, *, tenant: str, key_id: str = "") -> Batch:
        """Queue a batch of the key with this id; its file is validated afterwards. Raises InvalidRequest for a file
        that cannot be one, and RateLimited if too many batches of the tenant have not ended."""
        try:
            file = await self._files.get(request.input_file_id, tenant=tenant)
        except NotFound as exc:
            raise InvalidRequest(exc.message, param="input_file_id", code="invalid_value") from None
        if file.purpose != "batch":
            message = f"The input file has the purpose '{file.purpose}': upload it with the purpose 'batch'."
            raise InvalidRequest(message, param="input_file_id", code="invalid_purpose")
        if file.bytes > MAX_INPUT_BYTES:
            message = f"The input file is larger than {MAX_INPUT_BYTES} bytes, the limit of a batch."
            raise InvalidRequest(message, param="input_file_id", code="file_too_large")
        await self._kv.require_room(tenant)
        active = await self._kv.scan(f"{ACTIVE_PREFIX}{tenant}/", limit=self._config.max_active)
        if len(active) >= self._config.max_active:
            message = f"{self._config.max_active} of your batches have not ended yet (`batches.max_active`)."
            raise RateLimited(message, retry_after_s=60)
        now, window_s = int(time.time()), window_to_seconds(request.completion_window)
        record = BatchState(
            file.id,
            request.endpoint,
            request.completion_window,
            now,
            now + window_s,
            metadata=request.metadata,
            output_life_s=request.output_expires_after.seconds if request.output_expires_after else None,
            key_id=key_id,
        )
        ref = new_batch_ref(tenant)
        await self._kv.write([ref.put(record, ABSENT), Put(ref.active_key, encode_record(JobRecord()))])
        self._wake()
        return batch_to_wire(ref.id, record, BlockCounts())

    async def get(self, batch_id: str, *, tenant: str) -> Batch:
        """Return the batch with its counts as of now. Raises NotFound."""
        ref = _parse_ref(batch_id, tenant)
        loaded = await self._control.load(ref)
        if loaded is None:
            raise _not_found()
        return await self._to_wire(ref, loaded[0])

    async def list(self, params: BatchListParams, *, tenant: str) -> Page[Batch]:
        """List the tenant's batches, newest first."""
        prefix = f"{tenant}/batch/"
        before = f"{prefix}{_parse_ref(params.after, tenant, param='after').id}" if params.after else ""
        page = await list_page(self._kv, prefix, BatchState, before, order="desc", limit=params.limit)
        batches = [await self._to_wire(BatchRef(tenant, row.key.removeprefix(prefix)), row.record) for row in page.data]
        return Page(batches, page.has_more)

    async def cancel(self, batch_id: str, *, tenant: str) -> Batch:
        """Begin to cancel the batch; finished lines stay. Raises NotFound; InvalidRequest for one that has ended."""
        ref = _parse_ref(batch_id, tenant)

        def begin_cancel(record: BatchState) -> bool:
            if record.status != "in_progress":
                return False
            record.enter("cancelling")
            return True

        record = await self._control.change(ref, begin_cancel)
        # nothing of it has been executed yet
        record = record or await self._control.end(ref, "cancelled", ("validating",))
        self._wake()
        if record is not None:
            return await self._to_wire(ref, record)
        batch = await self.get(batch_id, tenant=tenant)
        if batch.status in ("cancelling", "finalizing", "in_progress"):
            return batch
        raise InvalidRequest(f"Cannot cancel a batch with status '{batch.status}'.", param="batch_id")

    async def _to_wire(self, ref: BatchRef, record: BatchState) -> Batch:
        return batch_to_wire(ref.id, record, await self._control.count_results(ref, record))

    def _wake(self) -> None:
        if self._workers is not None:
            self._workers.wake()


def _parse_ref(batch_id: str, tenant: str, *, param: str = "batch_id") -> BatchRef:
    name = batch_id.removeprefix("batch_")
    if len(name) != 44 or len(batch_id) != 50 or not set(name) <= set("0123456789abcdef"):
        raise _not_found(param)
    return BatchRef(tenant, batch_id)


def _not_found(param: str = "batch_id") -> NotFound:
    return NotFound("No batch has this id.", param=param)
