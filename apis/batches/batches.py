"""Batches: files of requests that are executed when there is time, and their results as files."""

from dataclasses import dataclass
from typing import Final, Literal, Protocol

from pydantic import Field

from apis.wire.base import Metadata, Wire
from apis.wire.completion_window import BatchWindow

MAX_LINES: Final = 50_000
MAX_INPUT_BYTES: Final = 200 * 1024 * 1024
"""OpenAI's limits: requests per batch, bytes of its input file."""
MAX_EMBEDDING_INPUTS: Final = 50_000
"""Inputs of all requests of a batch for embeddings together."""

BatchEndpoint = Literal["/v1/responses", "/v1/chat/completions", "/v1/embeddings", "/v1/completions"]


class OutputExpiry(Wire):
    """Expiry of the output and error files, `seconds` after their creation."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=2592000)


class CreateBatch(Wire):
    """A batch of the requests in a file. OpenAI's one `completion_window` is `24h`; others are allowed here."""

    input_file_id: str = Field(min_length=1, max_length=256)
    endpoint: BatchEndpoint
    completion_window: BatchWindow
    metadata: Metadata | None = None
    output_expires_after: OutputExpiry | None = None


class BatchListParams(Wire):
    """Query of a listing, newest first; `after` is the id of the last batch of the previous page."""

    after: str | None = Field(default=None, max_length=256)
    limit: int = Field(default=20, ge=1, le=100)


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """The answer to one request of a batch: the status that HTTP would have, the id of the request, and the JSON body.
    Another attempt may have another answer if `is_transient`, after `retry_after_s` where that is known. With
    `is_limited` the line waits for room under the limits of its key, which is no failed attempt."""

    status: int
    request_id: str
    body: bytes
    is_transient: bool = False
    retry_after_s: float | None = None
    is_limited: bool = False


@dataclass(frozen=True, slots=True)
class BatchOwner:
    """The tenant of a batch, and the id of the key that created it, under whose rights and limits its lines are
    executed; empty where no key was needed."""

    tenant: str
    key_id: str = ""


class RequestExecutor(Protocol):
    """Executes requests of jobs as the routes of their endpoints do, with the rights and limits of a key."""

    async def execute(self, endpoint: str, body: bytes, *, owner: BatchOwner, response_id: str) -> LineAnswer:
        """Return the answer; an error is one, too. A response has the id `response_id`, and one that is stored under it
        already is returned without another call of the model. Raises StoreUnavailable: the request may have begun."""
        ...


class LineExecutor(RequestExecutor, Protocol):
    """Executes the requests of batches."""

    async def may_execute(self, owner: BatchOwner) -> bool:
        """Return false once the key of the batch was revoked or has expired. Raises StoreUnavailable."""
        ...

    def interactive_requests(self) -> int:
        """Return the number of requests of clients that this process answers now."""
        ...
