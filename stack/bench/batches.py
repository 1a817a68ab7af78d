"""Batches as a load: a file is uploaded, executed, and its results are counted."""

import asyncio
import time
from typing import Any, Final

import orjson
from openai import APIConnectionError, APIStatusError, AsyncOpenAI, OpenAIError

from stack.bench.figures import RequestFailed, Tally
from stack.bench.plan import BenchPlan

_POLL_S: Final = 0.25
_ENDED: Final = frozenset({"completed", "failed", "expired", "cancelled"})


async def run_batch(plan: BenchPlan, tally: Tally, lines: bytes) -> None:
    """Run a batch of these lines and count its responses and errors; its files are deleted. Raises RequestFailed."""
    started = time.perf_counter()
    async with AsyncOpenAI(base_url=plan.url, api_key=plan.key, max_retries=0, timeout=plan.timeout_s) as client:
        file_ids: list[str] = []
        try:
            source = await client.files.create(file=("bench.jsonl", lines, "application/jsonl"), purpose="batch")
            file_ids.append(source.id)
            batch = await client.batches.create(
                input_file_id=source.id, endpoint="/v1/responses", completion_window="24h"
            )
            while batch.status not in _ENDED:
                if time.perf_counter() - started > plan.timeout_s:
                    await client.batches.cancel(batch.id)
                    raise RequestFailed("timeout", f"The batch did not end within {plan.timeout_s:g} s.")
                await asyncio.sleep(_POLL_S)
                batch = await client.batches.retrieve(batch.id)
            tally.whole.record(time.perf_counter() - started)
            for file_id in filter(None, (batch.output_file_id, batch.error_file_id)):
                file_ids.append(file_id)
                await _count_results(client, tally, file_id)
            if batch.status != "completed":
                raise RequestFailed(f"batch {batch.status}")
        except APIStatusError as exc:
            raise RequestFailed(f"{exc.status_code} {exc.code or ''}".rstrip(), exc.message) from exc
        except APIConnectionError as exc:
            raise RequestFailed("cannot connect", str(exc)) from exc
        except OpenAIError as exc:
            raise RequestFailed("batch", str(exc)) from exc
        finally:
            await _delete_files(client, file_ids)


async def _count_results(client: AsyncOpenAI, tally: Tally, file_id: str) -> None:
    async with client.files.with_streaming_response.content(file_id) as content:
        async for line in content.iter_lines():
            result: dict[str, Any] = orjson.loads(line) if line else {}
            answer: Any = result.get("response") or {}
            if answer.get("status_code") == 200:
                tally.count_response(answer["body"].get("usage"))
            elif result:
                body: Any = answer.get("body") or {}
                error: Any = result.get("error") or body.get("error") or {}
                tally.count_error(f"line {answer.get('status_code') or ''} {error.get('code') or ''}".strip())


async def _delete_files(client: AsyncOpenAI, file_ids: list[str]) -> None:
    for file_id in file_ids:
        try:
            await client.files.delete(file_id)
        except OpenAIError:
            return  # the run is over, and the server has its own reasons
