"""Prints what calls cost in a store with a million responses, as ratios to a small store measured in the same run.

Two deployments of three machines with two workers each, process groups with nginx in front, are measured in turns.

    STACK_STORE=sqlite|postgres|redis   the store (sqlite by default)
    STACK_SIZE                          stored responses (1,000,000); a tenth as many conversations, a hundredth files
    STACK_FOLDER                        a folder for SQLite stores that the next run goes on with
"""

import asyncio
import os
import random
import statistics
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil
import pytest
from openai import AsyncOpenAI

from apis.documents.vector_index import Chunk
from providers.vector_index.sqlite_vec import SQLiteVec
from stack.build import Stack, open_stack
from stack.config import StackConfig
from stack.retention.erasure import ProjectEraser
from stack.retention.sweeper import RetentionSweeper
from tests.support.grown_store import count_grown_files, grow, load_records
from tests.support.models.hashing import embed
from tests.support.sdk.client import sdk_client
from tests.support.servers.machines import Deployment, cpu_of, deployed, measure_calls
from tests.support.servers.postgres_server import PostgresServer
from tests.support.servers.redis_server import RedisServer
from tests.support.tenants.accounts import ROOT, new_project, organization_of, stored_organization

pytestmark = [pytest.mark.bench, pytest.mark.timeout(1800)]
STORE: Final = os.environ.get("STACK_STORE", "sqlite")
SIZE: Final = int(os.environ.get("STACK_SIZE", "1000000"))
SMALL: Final = 1000
ROUNDS: Final = 4
CALLS: Final = 32
CHUNK: Final = 50_000
LIFE_S: Final = 30 * 86_400.0
PREFIXES: Final = {"response": "resp_", "conversation": "conv_", "file": "file-"}
Call = Callable[[], Awaitable[Any]]


class Filled(msgspec.Struct):
    """The objects that a store has got so far: the first of each kind with its records, how many, and ids of some."""

    file: str
    project: str = ""
    store_id: str = ""
    firsts: dict[str, str] = {}
    records: dict[str, dict[str, bytes]] = {}
    counts: dict[str, int] = {}
    ids: dict[str, list[str]] = {}

    @classmethod
    def load(cls, file: Path) -> "Filled":
        """Return that of an earlier run, or an empty one."""
        return msgspec.json.decode(file.read_bytes(), type=cls) if file.exists() else cls(str(file))

    def save(self) -> None:
        Path(self.file).write_bytes(msgspec.json.encode(self))


@dataclass
class Side:
    """One of the two deployments, with a project that has `size` responses."""

    name: str
    size: int
    config: dict[str, Any]
    deployment: Deployment
    store_processes: list[psutil.Process]
    client: AsyncOpenAI
    filled: Filled

    @property
    def project(self) -> str:
        return self.filled.project

    @property
    def store_id(self) -> str:
        return self.filled.store_id

    @property
    def ids(self) -> dict[str, list[str]]:
        return self.filled.ids

    def cpu_s(self) -> float:
        """CPU of the machines and of the server of the store."""
        return self.deployment.cpu_s() + cpu_of(self.store_processes)

    def choose(self, kind: str) -> str:
        """Return the id of any object."""
        return PREFIXES[kind] + random.choice(self.ids[kind])

    def take(self, kind: str) -> str:
        """Return an id that is not returned again, from the middle of all."""
        ids = self.ids[kind]
        return PREFIXES[kind] + ids.pop(len(ids) // 2)


def build_config(folder: Path, store: dict[str, Any]) -> dict[str, Any]:
    return {
        "server": {"port": 0, "api_keys": [ROOT], "log_level": "warning"},
        "inference": {"provider": "tests.support.sdk.file_search_stack:Filing", "turns": [[{"text": "hello"}]]},
        "kv_store": store,
        "responses": {"provider": "loop"},
        "accounts": {
            "provider": "chain",
            "providers": {"config": {"provider": "config"}, "stored": {"provider": "stored"}},
        },
        "files": {"provider": "kv", "max_tenant_files": 1_000_000},
        "vector_index": {"provider": "sqlite_vec", "path": str(folder / "vectors.db")},
        "vector_stores": {"provider": "hybrid", "embedding_model": "hashing"},
    }


@asynccontextmanager
async def open_sides(folder: Path) -> AsyncGenerator[list[Side]]:
    """Start both deployments on stores of one kind, and fill them."""
    async with AsyncExitStack() as stack:
        sections: list[dict[str, Any]] = []
        processes: list[psutil.Process] = []
        if STORE == "postgres":
            server = stack.enter_context(PostgresServer(shared_buffers="512MB", max_connections="200"))
            sections = [{"provider": "postgres", "url": server.url, "namespace": each} for each in ("small", "large")]
            processes = [
                process for process in psutil.process_iter() if process.name() == "postgres" and process.ppid() > 1
            ]
        elif STORE == "redis":
            redis = stack.enter_context(RedisServer(folder, "--appendonly", "no"))
            sections = [{"provider": "redis", "url": redis.url, "prefix": each} for each in ("small:", "large:")]
        else:
            sections = [{"provider": "sqlite", "path": str(folder / f"{each}.db")} for each in ("small", "large")]
        patient = {} if STORE == "sqlite" else {"timeout_s": 20, "connect_timeout_s": 20}
        sides: list[Side] = []
        for name, size, section in zip(("small", "large"), (SMALL, SIZE), sections, strict=True):
            own = folder / name
            own.mkdir(exist_ok=True)
            config = build_config(own, {**section, **patient})
            deployment = await stack.enter_async_context(deployed(own, config))
            filled = Filled.load(own / "filled.json")
            organization = organization_of(await stack.enter_async_context(sdk_client(deployment.url, "sk-root")))
            if not filled.project:
                filled.project, _ = await new_project(organization)
            account = await organization.projects.service_accounts.create(filled.project, name="bench")
            client = await stack.enter_async_context(sdk_client(deployment.url, account.api_key.value))
            side = Side(name, size, config, deployment, processes, client, filled)
            await fill(side)
            sides.append(side)
        yield sides


async def fill(side: Side) -> None:
    """Let the server store one object of each kind, and copy its records; prove that it reads the copies."""
    filled, began = side.filled, time.perf_counter()
    if not filled.firsts:
        await store_firsts(side)
    counts = {"response": side.size, "conversation": max(SMALL, side.size // 10), "file": max(SMALL, side.size // 100)}
    async with open_stack(StackConfig.model_validate(side.config)) as stack:
        if not filled.records:  # as long as the store is small
            for kind, first in filled.firsts.items():
                filled.records[kind] = await load_records(stack.kv_store, side.project, first[-44:])
        for kind, first in filled.firsts.items():
            life_s = LIFE_S if kind == "response" else None
            while (missing := counts[kind] - filled.counts.get(kind, 0)) > 0:
                id_keys = await grow(stack.kv_store, filled.records[kind], first[-44:], min(missing, CHUNK), life_s)
                if kind == "file":
                    await add_chunks(side, stack, id_keys)
                filled.counts[kind] = filled.counts.get(kind, 0) + len(id_keys)
                filled.ids.setdefault(kind, []).extend(id_keys[:: 1 + len(id_keys) // 1000])
                filled.save()
    print(f"{side.name}: {filled.counts} after {time.perf_counter() - began:.0f} s")
    first = await side.client.responses.retrieve(filled.firsts["response"])
    for id_key in random.sample(side.ids["response"], 3):
        copy = await side.client.responses.retrieve(f"resp_{id_key}")
        assert copy.model_dump_json() == first.model_dump_json().replace(first.id[-44:], id_key)


async def store_firsts(side: Side) -> None:
    """Let the server store one object of each kind."""
    client = side.client
    response = await client.responses.create(model="scripted", input="How are whales?")
    conversation = await client.conversations.create(items=[{"role": "user", "content": "hi"}])
    store = await client.vector_stores.create(name="full")
    file = await client.files.create(file=("a.md", b"# Whales\n\nA whale is large."), purpose="assistants")
    await client.vector_stores.files.create_and_poll(file.id, vector_store_id=store.id, poll_interval_ms=50)
    side.filled.store_id = store.id
    side.filled.firsts = {"response": response.id, "conversation": conversation.id, "file": file.id}
    side.filled.save()


async def add_chunks(side: Side, stack: Stack, id_keys: Sequence[str]) -> None:
    """Count files that were copied, and add a chunk of text of each to the index."""
    await count_grown_files(stack.kv_store, side.project, side.store_id, len(id_keys))
    index = stack.providers_by_path["vector_index"]
    assert isinstance(index, SQLiteVec)
    vector = embed("A whale is large.")
    chunks = [Chunk(f"file-{id_key}", 0, "A whale is large.", {}, vector) for id_key in id_keys]
    for start in range(0, len(chunks), 500):
        await index.upsert(f"{side.project}/{side.store_id}", chunks[start : start + 500])


def calls_of(side: Side) -> dict[str, Call]:
    """Return the calls that are measured, by name."""
    client, get = side.client, side.client.get

    def list_page(path: str) -> Call:
        return lambda: get(f"{path}limit=20", cast_to=object)

    return {
        "create a response": lambda: client.responses.create(model="scripted", input="hi"),
        "continue a response": lambda: client.responses.create(
            model="scripted", input="hi", previous_response_id=side.choose("response")
        ),
        "get a response": lambda: client.responses.retrieve(side.choose("response")),
        "list responses": list_page("/responses?"),
        "search responses, found": list_page("/responses?query=whales&"),
        "search responses, none found": list_page("/responses?query=nothing&"),
        "delete a response": lambda: client.responses.delete(side.take("response")),
        "create a conversation": lambda: client.conversations.create(items=[{"role": "user", "content": "hi"}]),
        "get a conversation": lambda: client.conversations.retrieve(side.choose("conversation")),
        "list conversations": list_page("/conversations?"),
        "create a file": lambda: client.files.create(file=("b.md", b"A ship."), purpose="user_data"),
        "list files": list_page("/files?"),
        "get a vector store": lambda: client.vector_stores.retrieve(side.store_id),
        "list files of a vector store": list_page(f"/vector_stores/{side.store_id}/files?"),
        "search a vector store": lambda: client.vector_stores.search(side.store_id, query="whale"),
    }


async def test_calls_in_a_small_and_a_large_store(tmp_path: Path) -> None:
    folder = Path(os.environ.get("STACK_FOLDER") or tmp_path)
    async with open_sides(folder) as sides:
        print(f"{'':34}CPU, ms  ratio    p50 ratio  p99 ratio")
        for name in calls_of(sides[0]):
            cpu: dict[str, list[float]] = {side.name: [] for side in sides}
            times: dict[str, list[float]] = {side.name: [] for side in sides}
            count = CALLS if "search" not in name else CALLS // 2
            for number in range(ROUNDS + 1):
                for side in sides if number % 2 else sides[::-1]:
                    took = await measure_calls(side.cpu_s, calls_of(side)[name], count)
                    if number:  # the first round warms up
                        cpu[side.name].append(took[0])
                        times[side.name] += took[1]
            small, large = statistics.median(cpu["small"]), statistics.median(cpu["large"])
            quantiles = {key: statistics.quantiles(each, n=100) for key, each in times.items()}
            p50, p99 = (quantiles["large"][at] / quantiles["small"][at] for at in (49, 98))
            print(f"{name:34}{large:7.2f}{large / small:7.2f}{p50:13.2f}{p99:11.2f}")
        for side in sides:
            side.filled.save()  # without the deleted ids
            await measure_start(side)
            await measure_sweeps(side)


async def measure_start(side: Side) -> None:
    """Start one machine again: the time until it is ready, and its CPU until ten seconds later."""
    machine = side.deployment.machines[0]
    await machine.stop()
    began = time.perf_counter()
    await machine.start()
    ready_s = time.perf_counter() - began
    ready_cpu_s = side.deployment.machines[0].processes()
    cpu_s = cpu_of(ready_cpu_s)
    await asyncio.sleep(10)
    later_s = cpu_of(machine.processes())
    print(f"{side.name}: start {ready_s:.2f} s, CPU {cpu_s:.2f} s, ten seconds later {later_s:.2f} s")


async def measure_sweeps(side: Side) -> None:
    """Sweep expired records and by retention, and erase a small project, in this process."""
    organization = organization_of(side.client.with_options(api_key="sk-root"))
    await organization.projects.data_retention.update(
        side.project, retention_type="none", extra_body={"retention_days": 30}
    )
    other, other_key = await new_project(organization)
    async with sdk_client(side.deployment.url, other_key) as client:
        for _ in range(20):
            await client.responses.create(model="scripted", input="hi")
    async with open_stack(StackConfig.model_validate(side.config)) as stack:
        eraser = ProjectEraser(stack, stored_organization(stack.accounts).erasure)
        await print_time(side, "sweep of expired records", stack.kv_store.sweep)
        await print_time(side, "sweep by retention", RetentionSweeper(stack).sweep)
        await print_time(side, "erasure of a project of 20 responses", lambda: eraser.erase_tenant(other))
        await print_quota(side, stack)


async def print_time(side: Side, name: str, call: Call) -> None:
    cpu_s, began = time.process_time(), time.perf_counter()
    await call()
    took_ms, cpu_ms = (time.perf_counter() - began) * 1000, (time.process_time() - cpu_s) * 1000
    print(f"{side.name}: {name}: {took_ms:.0f} ms, CPU of this process {cpu_ms:.0f} ms")


async def print_quota(side: Side, stack: Stack) -> None:
    """Measure the bytes of the project as a worker does once after its start."""
    pages, after, began = 0, "", time.process_time()
    while True:
        _, after = await stack.kv_store.measure(f"{side.project}/", after=after)
        pages += 1
        if not after:
            break
    print(f"{side.name}: its bytes are measured in {pages} reads, CPU {time.process_time() - began:.2f} s")
