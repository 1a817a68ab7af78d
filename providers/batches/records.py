"""Records of batches in a KVStore, their keys, and the object that a client sees.

    TENANT/batch/BATCH                     the batch
    /batch_active/TENANT/BATCH             the attempts at a step of the batch as a whole; present until it has ended
    /batch_lease/TENANT/BATCH/control      held by the worker that validates or finishes the batch
    /batch_block/TENANT/BATCH/BLOCK        a block of lines without all its results; BLOCK names them: FIRST-COUNT
    /batch_lease/TENANT/BATCH/BLOCK        held by the worker that executes the block; gone when not renewed in time
    TENANT/batch_input/BATCH/BLOCK         the lines of the block, as they were in the file
    TENANT/batch_progress/BATCH/BLOCK      the counts of the block's results
    TENANT/batch_output/BATCH/LINE         the result of a line that succeeded
    TENANT/batch_error/BATCH/LINE          the result of a line that failed

    validating --> in_progress --> finalizing --> completed, or expired
         |  \\--> failed   \\--> cancelling --> cancelled

The record of the batch is only written on the condition that it is as it was read. The result of a line, the counts
of its block and the renewal of the block's lease are one write: a worker that lost the lease adds nothing. That a line
begins is stored before it does, so that one which ends its workers is found out.
"""

import time
from typing import Any, Final, Literal

import msgspec
from openai.types.batch import Batch

from apis.storage.keys import new_id_key
from apis.storage.kv_store import Put
from apis.storage.records import encode_record

BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
ResultKind = Literal["output", "error"]
ENDED: Final = frozenset({"failed", "completed", "expired", "cancelled"})
ACTIVE_PREFIX: Final = "/batch_active/"
RETENTION_S: Final = 30 * 86_400.0
"""Seconds for which a batch can be retrieved after its creation, beyond its window."""


KEY_REVOKED: Final = "api_key_revoked"
KEY_REVOKED_MESSAGE: Final = "The API key that created this batch was revoked or has expired."


class LineError(msgspec.Struct, omit_defaults=True):
    """A fault of the input file. `line` is counted from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BlockCounts(msgspec.Struct, array_like=True):
    """The numbers of results of a block so far, or of all blocks, and the tokens that they used."""

    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    done: list[int] = msgspec.field(default_factory=list[int])
    """The numbers of the lines that have a result, of one block."""

    def add(self, other: "BlockCounts") -> None:
        """Add the counts of another block."""
        self.completed += other.completed
        self.failed += other.failed
        self.input_tokens += other.input_tokens
        self.cached_tokens += other.cached_tokens
        self.output_tokens += other.output_tokens
        self.reasoning_tokens += other.reasoning_tokens


class BlockRecord(msgspec.Struct, omit_defaults=True):
    """The progress of workers in a block: `begun` are the lines that its last `worker` began, each stored before it is
    executed; `losses` names by line the workers that left it without an end."""

    worker: str = ""
    begun: list[int] = msgspec.field(default_factory=list[int])
    losses: dict[int, list[str]] = msgspec.field(default_factory=dict[int, list[str]])

    def begin_attempt(self, worker: str) -> None:
        """Note the worker that executes the block now. Each line that another one has begun and not ended may have
        ended that one."""
        for number in self.begun if self.worker != worker else ():
            self.losses.setdefault(number, []).append(self.worker)
        self.begun, self.worker = [], worker

    def give_back(self, worker: str) -> None:
        """Note that none of its lines is being executed."""
        self.begun = []


class BatchState(msgspec.Struct, omit_defaults=True):
    """The state of a batch. Times are seconds since the epoch. `counts` are final once the batch is finalizing;
    `is_expiring` says that its window has passed; `key_id` is the key that created it."""

    input_file_id: str
    endpoint: str
    completion_window: str
    created_at: int
    expires_at: int
    status: BatchStatus = "validating"
    metadata: dict[str, str] | None = None
    output_life_s: int | None = None
    model: str | None = None
    total: int = 0
    times: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    errors: list[LineError] = msgspec.field(default_factory=list[LineError])
    counts: BlockCounts | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    is_expiring: bool = False
    key_id: str = ""

    def enter(self, status: BatchStatus) -> None:
        """Change the status and set the time of it."""
        self.status = status
        self.times[f"{status}_at"] = int(time.time())

    def revoke(self) -> bool:
        """Begin to end a batch whose key is no longer valid. Returns false if it is not in progress."""
        if self.status != "in_progress":
            return False
        self.errors = [*self.errors, LineError(KEY_REVOKED, KEY_REVOKED_MESSAGE)]
        self.enter("cancelling")
        return True

    @property
    def abandons_lines(self) -> bool:
        """True if lines that have not been executed will not be."""
        return self.is_expiring or self.status == "cancelling"


class BatchRef(msgspec.Struct, frozen=True):
    """The tenant and id of a batch, and its keys."""

    tenant: str
    id: str

    @property
    def key(self) -> str:
        return f"{self.tenant}/batch/{self.id}"

    @property
    def active_key(self) -> str:
        return f"{ACTIVE_PREFIX}{self.tenant}/{self.id}"

    @property
    def lease_prefix(self) -> str:
        return f"/batch_lease/{self.tenant}/{self.id}/"

    @property
    def control_key(self) -> str:
        return f"{self.lease_prefix}control"

    @property
    def block_prefix(self) -> str:
        return f"/batch_block/{self.tenant}/{self.id}/"

    def data_prefix(self, kind: Literal["input", "progress"] | ResultKind) -> str:
        """Return the prefix of the keys of one kind of the batch's own data."""
        return f"{self.tenant}/batch_{kind}/{self.id}/"

    def put(self, record: BatchState, expect: int) -> Put:
        """Return the operation that stores the record."""
        return Put(self.key, encode_record(record), stored_life_s(record), expect)


def stored_life_s(record: BatchState) -> float:
    """Return the seconds after which the store may forget the record."""
    return max(1.0, record.expires_at + RETENTION_S - time.time())


def block_life_s(batch: BatchState) -> float:
    """Return the seconds after which the store may forget a block."""
    return max(1.0, 2.0 * (batch.expires_at - batch.created_at) + 86_400)


def new_batch_ref(tenant: str) -> BatchRef:
    """Return the reference of a new batch, whose id sorts by its creation."""
    return BatchRef(tenant, f"batch_{new_id_key()}")


def decode_active_key(key: str) -> BatchRef:
    """Return the batch whose key this is among the active ones."""
    tenant, _, batch_id = key.removeprefix(ACTIVE_PREFIX).partition("/")
    return BatchRef(tenant, batch_id)


def build_block_name(first_line: int, line_count: int) -> str:
    """Return the name of a block, from which its lines are known, also where its record is damaged."""
    return f"{first_line:06d}-{line_count}"


def parse_block_name(name: str) -> tuple[int, int]:
    """Return the number of the first line of a block, counted from 1, and the number of its lines."""
    first_line, _, line_count = name.partition("-")
    return int(first_line), int(line_count)


def batch_to_wire(batch_id: str, record: BatchState, counts: BlockCounts) -> Batch:
    """Return the object that a client sees."""
    errors = [msgspec.to_builtins(error) for error in record.errors]
    fields: dict[str, Any] = {
        "id": batch_id,
        "object": "batch",
        "endpoint": record.endpoint,
        "model": record.model,
        "errors": {"object": "list", "data": [{"line": None, "param": None, **error} for error in errors]}
        if errors
        else None,
        "input_file_id": record.input_file_id,
        "completion_window": record.completion_window,
        "status": record.status,
        "output_file_id": record.output_file_id,
        "error_file_id": record.error_file_id,
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        "request_counts": {"total": record.total, "completed": counts.completed, "failed": counts.failed},
        "metadata": record.metadata,
        "usage": {
            "input_tokens": counts.input_tokens,
            "input_tokens_details": {"cached_tokens": counts.cached_tokens},
            "output_tokens": counts.output_tokens,
            "output_tokens_details": {"reasoning_tokens": counts.reasoning_tokens},
            "total_tokens": counts.input_tokens + counts.output_tokens,
        },
        **record.times,
    }
    return Batch.model_validate(fields)
