"""Input files of batches, and the results of their lines as objects."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from openai import AsyncOpenAI
from openai.types import Batch

from tests.support.waiting import until_status

ENDED = frozenset({"failed", "completed", "expired", "cancelled"})


def batch_line(custom_id: str, url: str = "/v1/responses", **body: Any) -> dict[str, Any]:
    """Return one line, whose body asks the scripted model for a response unless it says otherwise."""
    defaults: dict[str, Any] = {"model": "scripted"}
    if url == "/v1/responses":
        defaults["input"] = custom_id
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {**defaults, **body}}


async def upload_lines(client: AsyncOpenAI, lines: Iterable[Mapping[str, Any] | str]) -> str:
    """Upload the lines as the input file of a batch; returns its id."""
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    return (await client.files.create(file=("in.jsonl", text.encode()), purpose="batch")).id


async def create_batch(client: AsyncOpenAI, lines: Iterable[Mapping[str, Any] | str], **fields: Any) -> Batch:
    """Create a batch of the lines, for responses unless `fields` say otherwise."""
    fields = {"endpoint": "/v1/responses", "completion_window": "24h", **fields}
    return await client.batches.create(input_file_id=await upload_lines(client, lines), **fields)


async def wait_for_end(client: AsyncOpenAI, batch: Batch, timeout_s: float = 30) -> Batch:
    """Return the batch when it has ended."""
    return await until_status(client.batches, batch.id, *ENDED, within_s=timeout_s)


async def read_results(client: AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """Return the lines of an output or error file."""
    if file_id is None:
        return []
    content = await client.files.content(file_id)
    return [json.loads(line) for line in content.text.splitlines()]
