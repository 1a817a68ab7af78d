"""Damaged records of batches: no other tenant's batch notices, and each line of the batch has a result."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from openai import APIStatusError, AsyncOpenAI

from tests.support.damage import DAMAGES, damage_record, stored_keys
from tests.support.sdk.batch_files import batch_line, create_batch, read_results, wait_for_end
from tests.support.sdk.client import sdk_client
from tests.support.servers.held_model import Held
from tests.support.servers.serving import Served, serving
from tests.support.waiting import until

KEYS = [{"key": f"key-of-{name}", "tenant": name} for name in ("alpha", "beta")]
LINES = 20
PARTS = {
    "block": "/batch_block/alpha/{batch}/000017-4",
    "input": "alpha/batch_input/{batch}/000017-4",
    "progress": "alpha/batch_progress/{batch}/000001-16",
    "result": "alpha/batch_output/{batch}/000001",
}


def serving_batches(folder: Path) -> Any:
    return serving(
        {"provider": "tests.support.servers.held_model:Held"},
        kv_store={"provider": "sqlite", "path": str(folder / "store.db"), "survives_power_loss": False},
        server={"api_keys": KEYS},
        more={
            "files": {"provider": "kv"},
            "batches": {"provider": "leased", "max_running": 2, "poll_s": 0.05, "lease_s": 1},
        },
    )


async def hold_batches(served: Served, alpha: AsyncOpenAI, beta: AsyncOpenAI) -> tuple[Any, Any]:
    """Begin a batch of each tenant whose lines the model holds, but for the first one of alpha's."""
    texts = ["first", *(f"hold {number}" for number in range(1, LINES))]
    batches = (
        await create_batch(alpha, [batch_line(text) for text in texts]),
        await create_batch(beta, [batch_line("hold beta")]),
    )
    await until(lambda: cast(Held, served.stack.inference).held_count >= 2)
    return batches


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("part", PARTS)
async def test_a_damaged_part_of_a_batch_is_noticed_by_its_lines_alone(part: str, damage: str, tmp_path: Path) -> None:
    """The batches of both tenants end, and each line has one result."""
    async with (
        serving_batches(tmp_path) as served,
        sdk_client(served.url, "key-of-alpha") as alpha,
        sdk_client(served.url, "key-of-beta") as beta,
    ):
        batch, other = await hold_batches(served, alpha, beta)
        database = tmp_path / "store.db"
        key = PARTS[part].format(batch=batch.id)
        async with asyncio.timeout(10):
            while key not in await asyncio.to_thread(stored_keys, database):  # noqa: ASYNC110 - a store sets no event
                await asyncio.sleep(0.01)
        if part == "progress":  # its worker has it in memory, and another one goes on
            await served.stack.batches.close()  # type: ignore[union-attr]  # this stack has batches
        await asyncio.to_thread(damage_record, database, key, damage)
        cast(Held, served.stack.inference).released.set()
        if part == "progress":
            async with serving_batches(tmp_path) as again:
                cast(Held, again.stack.inference).released.set()
                await check_ends(again, batch, other, part, damage)
        else:
            await check_ends(served, batch, other, part, damage)


async def check_ends(served: Served, batch: Any, other: Any, part: str, damage: str) -> None:
    async with (
        sdk_client(served.url, "key-of-alpha") as alpha,
        sdk_client(served.url, "key-of-beta") as beta,
    ):
        assert (await wait_for_end(beta, other)).status == "completed"
        ended = await wait_for_end(alpha, batch)
        results = await read_results(alpha, ended.output_file_id) if damage == "crc" or part != "result" else []
        errors = await read_results(alpha, ended.error_file_id)
    assert ended.status == "completed"
    assert ended.request_counts is not None
    failed = 4 if part == "input" else 0
    assert ended.request_counts.model_dump() == {"total": LINES, "completed": LINES - failed, "failed": failed}
    assert {error["error"]["code"] for error in errors} == ({"storage_corrupt"} if failed else set[str]())
    assert len(errors) == failed
    if part == "result":
        damaged = [line["error"]["code"] for line in results if line["error"]]
        assert damaged == ["storage_corrupt"] * (damage == "crc")
    elif results:
        assert [line["custom_id"] for line in results][:2] == ["first", "hold 1"]
        assert len(results) == LINES - failed


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_damaged_batch_is_an_error_for_its_owner_alone(damage: str, tmp_path: Path) -> None:
    """The list of its owner shows the others."""
    async with (
        serving_batches(tmp_path) as served,
        sdk_client(served.url, "key-of-alpha") as alpha,
        sdk_client(served.url, "key-of-beta") as beta,
    ):
        batch, other = await hold_batches(served, alpha, beta)
        await asyncio.to_thread(damage_record, tmp_path / "store.db", f"alpha/batch/{batch.id}", damage)
        second = await create_batch(alpha, [batch_line("second")])
        cast(Held, served.stack.inference).released.set()
        assert (await wait_for_end(beta, other)).status == "completed"
        assert (await wait_for_end(alpha, second)).status == "completed"
        assert [each.id async for each in alpha.batches.list()] == [second.id]
        with pytest.raises(APIStatusError) as caught:
            await alpha.batches.retrieve(batch.id)
        assert (caught.value.status_code, caught.value.code) == (500, "storage_corrupt")
