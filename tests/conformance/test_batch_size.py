"""The largest batch: 50,000 lines of 200 MB run while the memory of the server stays flat and clients are answered."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from apis.batches.batches import MAX_INPUT_BYTES, MAX_LINES
from tests.support.sdk.batch_files import ENDED, batch_line
from tests.support.sdk.client import TLS, sdk_client
from tests.support.servers.worker_processes import Workers, worker_processes

SECTIONS: dict[str, Any] = {
    "inference": {"provider": "scripted", "turns": [[{"text": ["done "] * 5}]]},
    "files": {"provider": "kv"},
}
MAX_GROWTH_BYTES = 160 * 1024 * 1024
"""Memory that a worker may gain: less than the input file, which is never in memory as a whole."""


async def probe_latency(workers: Workers, stop: asyncio.Event, latencies_s: list[float]) -> None:
    """Time a short response of a client twice a second."""
    body = {"model": "scripted", "input": "hi", "store": False}
    async with httpx.AsyncClient(trust_env=False, timeout=30, verify=TLS) as client:
        while not stop.is_set():
            began_at = time.perf_counter()
            (await client.post(f"{workers.url}/v1/responses", json=body)).raise_for_status()
            latencies_s.append(time.perf_counter() - began_at)
            await asyncio.sleep(0.5)


def percentile(latencies_s: list[float]) -> str:
    """Return the median and the 99th percentile as text."""
    ranked = sorted(latencies_s)
    return f"p50 {ranked[len(ranked) // 2] * 1000:.0f} ms, p99 {ranked[int(len(ranked) * 0.99)] * 1000:.0f} ms"


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_the_largest_batch_needs_little_memory(tmp_path: Path) -> None:
    line_bytes = MAX_INPUT_BYTES // MAX_LINES - 1
    file = tmp_path / "in.jsonl"
    with file.open("wb") as lines:
        for number in range(MAX_LINES):
            line = batch_line(f"{number}", input="", store=False)
            line["body"]["input"] = "x" * (line_bytes - len(json.dumps(line)))
            lines.write(json.dumps(line).encode() + b"\n")
    store = {"provider": "sqlite", "path": str(tmp_path / "store.db")}
    latencies_s: list[float] = []
    idle_s: list[float] = []
    async with worker_processes(tmp_path, store, workers=1, more=SECTIONS) as workers:
        worker = workers.parent
        quiet = asyncio.Event()
        probing = asyncio.create_task(probe_latency(workers, quiet, idle_s))
        await asyncio.sleep(10)
        quiet.set()
        await probing
        base = peak = worker.memory_info().rss
        stop = asyncio.Event()
        async with sdk_client(workers.url, max_retries=2, timeout_s=600) as client:
            began_at = time.monotonic()
            upload = await client.uploads.upload_file_chunked(file=file, mime_type="text/plain", purpose="batch")
            assert upload.file is not None
            uploaded_s = time.monotonic() - began_at
            probing = asyncio.create_task(probe_latency(workers, stop, latencies_s))
            batch = await client.batches.create(
                input_file_id=upload.file.id, endpoint="/v1/responses", completion_window="24h"
            )
            began_at = time.monotonic()
            while (batch := await client.batches.retrieve(batch.id)).status not in ENDED:
                peak = max(peak, worker.memory_info().rss)
                await asyncio.sleep(0.2)
            stop.set()
            await probing
            assert batch.status == "completed", batch
            count = 0
            async with client.files.with_streaming_response.content(str(batch.output_file_id)) as content:
                async for line in content.iter_lines():
                    assert json.loads(line)["custom_id"] == f"{count}"
                    count += 1
            assert count == MAX_LINES
    took_s = time.monotonic() - began_at
    print(
        f"{MAX_INPUT_BYTES >> 20} MiB uploaded in {uploaded_s:.0f} s; {MAX_LINES} lines in {took_s:.0f} s; "
        f"{base >> 20} MiB before, at most {peak >> 20} MiB; a client's response "
        f"{percentile(latencies_s)} (before: {percentile(idle_s)})"
    )
    assert peak - base < MAX_GROWTH_BYTES
