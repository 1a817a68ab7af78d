"""BatchValidator: reads the input file of a batch once, checks every line, and stores the lines in blocks.

Faults are worded as OpenAI words them. A batch with any fault executes nothing.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterable, Collection, Mapping
from typing import Any, Final

import msgspec

from apis.batches.batches import MAX_EMBEDDING_INPUTS, MAX_LINES
from apis.storage.kv_store import Put
from apis.storage.lease import Lease
from apis.storage.records import encode_record
from providers.batches.records import BatchRef, BatchState, BlockRecord, LineError, block_life_s, build_block_name

MAX_CUSTOM_ID_CHARS: Final = 512
MAX_ERRORS: Final = 100
"""Faults that a batch reports; reading stops there."""
BLOCK_LINES: Final = 16
BLOCK_BYTES: Final = 1024 * 1024
"""Lines of a block, and bytes from which on it takes no more lines: a worker has a few blocks in memory at a time."""
_BLOCKING_BYTES: Final = 256 * 1024
"""Bytes of a line above which it is parsed in a thread."""
_DIGEST_BYTES: Final = 12


class BatchLine(msgspec.Struct):
    """One line of an input file, parsed only as far as it has to be; the body stays as it was sent."""

    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw()


class LineBody(msgspec.Struct):
    """The fields of a line's body that decide how it is executed."""

    model: Any = None
    prompt: Any = None
    input: Any = None
    priority: Any = None
    stream: Any = None
    background: Any = None


decode_line: Final = msgspec.json.Decoder(BatchLine).decode
decode_body: Final = msgspec.json.Decoder(LineBody).decode


class BatchValidator:
    """Validates one batch. `models` are the models of the server, None where they are not known now; `lease` is the
    right to do so."""

    def __init__(
        self, ref: BatchRef, record: BatchState, lease: Lease, models: Collection[str] | None, max_line_bytes: int
    ) -> None:
        self._ref = ref
        self._record = record
        self._lease = lease
        self._models = models
        self._max_line_bytes = max_line_bytes
        self._custom_ids: set[bytes] = set()
        self._model_names: set[str] = set()
        self._block: list[bytes] = []
        self._block_bytes = 0
        self._embedding_inputs = 0
        self.line_count = 0
        self.errors: list[LineError] = []

    @property
    def model(self) -> str | None:
        """The model of all lines, None if there are several."""
        return next(iter(self._model_names)) if len(self._model_names) == 1 else None

    async def run(self, data: AsyncIterable[bytes]) -> None:
        """Check all lines and store them in blocks. Raises LeaseLost."""
        rest = bytearray()
        number = 0
        async for chunk in data:
            rest += chunk
            if b"\n" in chunk:
                *lines, rest = rest.split(b"\n")
                for line in lines:
                    number += 1
                    await self._take(bytes(line), number)
            if len(rest) > self._max_line_bytes:
                message = f"This line is longer than {self._max_line_bytes} bytes (`batches.max_line_bytes`)."
                self.errors.append(LineError("line_too_long", message, number + 1))
            if self._is_hopeless():
                return
        await self._take(bytes(rest), number + 1)
        if not self.line_count and not self.errors:
            self.errors.append(
                LineError("empty_file", "The input file is empty. Please ensure that the batch contains a request.")
            )
        if not self.errors:
            await self._store_block()

    def _is_hopeless(self) -> bool:
        return len(self.errors) >= MAX_ERRORS or any(error.line is None for error in self.errors) or self._is_too_long()

    def _is_too_long(self) -> bool:
        return bool(self.errors) and self.errors[-1].code == "line_too_long"

    async def _take(self, line: bytes, number: int) -> None:
        if not line.strip() or self._is_hopeless():
            return
        if self.line_count == MAX_LINES:
            message = f"The batch input file contains more requests than the maximum of {MAX_LINES}."
            self.errors.append(LineError("too_many_requests", message))
            return
        if len(line) > self._max_line_bytes:
            message = f"This line is longer than {self._max_line_bytes} bytes (`batches.max_line_bytes`)."
            error = LineError("line_too_long", message, number)
        elif len(line) > _BLOCKING_BYTES:
            error = await asyncio.to_thread(self._check, line, number)
        else:
            error = self._check(line, number)
        if error is not None:
            self.errors.append(error)
            return
        self.line_count += 1
        self._block.append(line)
        self._block_bytes += len(line)
        if not self.errors and (len(self._block) == BLOCK_LINES or self._block_bytes >= BLOCK_BYTES):
            await self._store_block()

    def _check(self, raw: bytes, number: int) -> LineError | None:
        """Return the first fault of a line, None if there is none."""
        try:
            line = decode_line(raw)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return LineError("invalid_json_line", "This line is not parseable as valid JSON.", number)
        custom_id = line.custom_id
        if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS:
            code = "missing_required_parameter" if custom_id is None else "invalid_custom_id"
            message = (
                "Missing required parameter: 'custom_id'."
                if custom_id is None
                else f"The custom_id must be a string of 1 to {MAX_CUSTOM_ID_CHARS} characters."
            )
            return LineError(code, message, number, "custom_id")
        # its digest, because the ids of a whole file may be tens of megabytes
        digest = hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()
        if digest in self._custom_ids:
            message = (
                f"The custom_id '{custom_id[:64]}' for this request is a duplicate of another request. The custom_id "
                "parameter must be unique for each request in a batch."
            )
            return LineError("duplicate_custom_id", message, number, "custom_id")
        self._custom_ids.add(digest)
        if line.method != "POST":
            message = f"Invalid method: '{str(line.method)[:16]}'. Supported methods are: 'POST'."
            return LineError("invalid_method", message, number, "method")
        if line.url != self._record.endpoint:
            message = "The URL provided for this request does not match the batch endpoint."
            return LineError("invalid_url", message, number, "url")
        return self._check_body(bytes(line.body), number)

    def _check_body(self, raw: bytes, number: int) -> LineError | None:
        try:
            body = decode_body(raw)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            message = "Missing required parameter: 'body'." if not raw else "The body must be a JSON object."
            code = "missing_required_parameter" if not raw else "invalid_request"
            return LineError(code, message, number, "body")
        endpoint = self._record.endpoint
        if body.model is None and not (endpoint == "/v1/responses" and body.prompt is not None):
            message = "Missing required parameter: 'body.model'."
            return LineError("missing_required_parameter", message, number, "body.model")
        if body.model is not None:
            if not isinstance(body.model, str) or (self._models is not None and body.model not in self._models):
                message = f"The provided model '{str(body.model)[:64]}' is not supported by the Batch API."
                return LineError("model_not_found", message, number, "body.model")
            if len(self._model_names) < 2:
                self._model_names.add(body.model)
        for name in ("stream", "background"):
            if getattr(body, name):
                message = f"'{name}' is not supported in a batch: the result of each request is one line."
                return LineError("unsupported_parameter", message, number, f"body.{name}")
        if endpoint == "/v1/embeddings":
            self._embedding_inputs += _count_inputs(body.input)
            if self._embedding_inputs > MAX_EMBEDDING_INPUTS:
                message = f"The requests of the batch have more than {MAX_EMBEDDING_INPUTS} embedding inputs."
                return LineError("too_many_embedding_inputs", message)
        return None

    async def _store_block(self) -> None:
        """Store the lines so far as a block, which no worker claims before the batch is in progress."""
        if not self._block:
            return
        first_line, line_count = self.line_count - len(self._block) + 1, len(self._block)
        name = build_block_name(first_line, line_count)
        ttl_s = block_life_s(self._record)
        await self._lease.write(
            [
                Put(f"{self._ref.data_prefix('input')}{name}", b"\n".join(self._block), ttl_s),
                Put(f"{self._ref.block_prefix}{name}", encode_record(BlockRecord()), ttl_s),
            ]
        )
        self._block, self._block_bytes = [], 0


def _count_inputs(value: Any) -> int:
    if not isinstance(value, list) or not value:
        return 1
    return 1 if isinstance(value[0], int) else len(value)  # pyright: ignore[reportUnknownArgumentType] - any JSON


def splice_fields(body: bytes, fields: Mapping[str, int]) -> bytes:
    """Return the body of an object that has further fields, which it must not have already."""
    extra = msgspec.json.encode(fields)[1:-1]
    start = body.index(b"{") + 1
    separator = b"" if body[start:].lstrip().startswith(b"}") else b","
    return body[:start] + extra + separator + body[start:]
