"""Results: the lines of a batch's output and error files in the store, and their counts."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Final

import msgspec

from apis.errors import StorageCorrupt
from apis.storage.keys import new_id_key
from apis.storage.kv_store import Entry, KVStore
from apis.storage.records import scan_all
from providers.batches.records import BatchRef, BlockCounts, ResultKind, parse_block_name
from providers.common.state.scan import decode_or_skip, report_damaged

_PAGE_SIZE: Final = 64
_DAMAGED_RESULT: Final = {
    "code": "storage_corrupt",
    "message": "The result of this request cannot be read from the store any more: it is damaged.",
}


class _TokenDetails(msgspec.Struct):
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class LineUsage(msgspec.Struct):
    """The usage of any endpoint's answer: responses count input and output, completions prompt and completion."""

    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens_details: _TokenDetails | None = None
    prompt_tokens_details: _TokenDetails | None = None
    output_tokens_details: _TokenDetails | None = None
    completion_tokens_details: _TokenDetails | None = None


class _Answer(msgspec.Struct):
    usage: LineUsage | None = None


class _LineResponse(msgspec.Struct):
    body: _Answer


class _Result(msgspec.Struct):
    response: _LineResponse | None = None


_decode_answer: Final = msgspec.json.Decoder(_Answer).decode
_decode_result: Final = msgspec.json.Decoder(_Result).decode


def read_usage(body: bytes) -> LineUsage:
    """Return the usage in the body of an answer; nothing where it has none."""
    try:
        return _decode_answer(body).usage or LineUsage()
    except msgspec.MsgspecError:
        return LineUsage()


def add_result(counts: BlockCounts, number: int, usage: LineUsage, *, is_success: bool) -> None:
    """Count the result of a line."""
    counts.done = [*counts.done, number]
    counts.completed += is_success
    counts.failed += not is_success
    counts.input_tokens += usage.input_tokens or usage.prompt_tokens
    counts.output_tokens += usage.output_tokens or usage.completion_tokens
    details = usage.input_tokens_details or usage.prompt_tokens_details
    counts.cached_tokens += details.cached_tokens if details else 0
    details = usage.output_tokens_details or usage.completion_tokens_details
    counts.reasoning_tokens += details.reasoning_tokens if details else 0


def build_result(custom_id: Any, response: Mapping[str, Any] | None, error: Mapping[str, str] | None) -> bytes:
    """Return the line of the output or error file, with its end."""
    fields = {"id": f"batch_req_{new_id_key()}", "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(fields) + b"\n"


async def load_counts(kv: KVStore, ref: BatchRef, name: str) -> BlockCounts:
    """Return the counts of a block's results."""
    key = f"{ref.data_prefix('progress')}{name}"
    entry = await kv.get(key)
    return BlockCounts() if entry is None else await _decode_counts(kv, ref, key, entry)


async def load_all_counts(kv: KVStore, ref: BatchRef) -> BlockCounts:
    """Return the counts of the results of all blocks."""
    total = BlockCounts()
    async with aclosing(scan_all(kv, ref.data_prefix("progress"))) as rows:
        async for key, entry in rows:
            total.add(await _decode_counts(kv, ref, key, entry))
    return total


async def _decode_counts(kv: KVStore, ref: BatchRef, key: str, entry: Entry) -> BlockCounts:
    """Return the counts in the entry; where they are damaged, count the results."""
    if (stored := decode_or_skip(kv, key, entry, BlockCounts)) is not None:
        return stored
    counts = BlockCounts()
    first_line, line_count = parse_block_name(key.rpartition("/")[2])
    kinds: tuple[tuple[ResultKind, bool], ...] = (("output", True), ("error", False))
    for kind, is_success in kinds:
        prefix = ref.data_prefix(kind)
        after, before = f"{prefix}{first_line - 1:06d}", f"{prefix}{first_line + line_count:06d}"
        for result_key, result in await kv.scan(prefix, after=after, before=before, limit=line_count):
            add_result(counts, int(result_key[-6:]), _read_result_usage(result), is_success=is_success)
    return counts


def _read_result_usage(entry: Entry) -> LineUsage:
    try:
        response = _decode_result(entry.value).response
    except (msgspec.MsgspecError, StorageCorrupt):
        return LineUsage()
    return (response and response.body.usage) or LineUsage()


async def read_results(kv: KVStore, ref: BatchRef, kind: ResultKind) -> AsyncGenerator[bytes]:
    """Yield the results in the order of their lines, a page of the store at a time; for a damaged one, the line that
    says so."""
    async with aclosing(scan_all(kv, ref.data_prefix(kind), page_size=_PAGE_SIZE)) as rows:
        async for key, entry in rows:
            try:
                line = entry.value
            except StorageCorrupt as exc:
                report_damaged(kv, key, "the result of a line", exc)
                line = build_result(None, None, _DAMAGED_RESULT)
            yield line
