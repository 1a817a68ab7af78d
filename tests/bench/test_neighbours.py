"""Prints how long small requests of one tenant take alone, and while another tenant floods the resource that they use.

`pytest -s -m bench tests/bench/test_neighbours.py`
"""

import asyncio
import base64
import itertools
import shutil
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import pytest
from openai import AsyncOpenAI

from apis.chat import ChatRequest
from apis.deltas import DeltaBatch
from apis.documents.embeddings import EmbeddingRequest, Embeddings
from apis.inference import Model
from apis.tool_runtime import ToolCall
from apis.wire.tools import McpTool
from providers.inference.scripted import Scripted
from tests.support.models import documents
from tests.support.models.hashing import DIMENSIONS
from tests.support.models.hashing import embed as hash_words
from tests.support.sdk.client import sdk_client
from tests.support.servers.mcp_server import RealServer
from tests.support.servers.mcp_stack import with_mcp
from tests.support.servers.serving import Served, serving

pytestmark = [pytest.mark.bench, pytest.mark.timeout(900)]

SAMPLES: Final = 12
PHASE_S: Final = 45.0
"""Seconds after which no further sample of a phase is taken."""
GIVE_UP_S: Final = 20.0
"""Seconds after which a small request counts as failed."""
HEAD_START_S: Final = 1.5
KEYS: Final = [{"key": f"key-of-{name}", "tenant": name} for name in ("loud", "quiet")]
numbers = itertools.count()

Work = Callable[[], Awaitable[object]]


class SlowEcho(Scripted):
    """A model that repeats the message, half a second later where that says `slow`, and embeds in 50 ms."""

    async def chat(self, request: ChatRequest) -> AsyncGenerator[DeltaBatch]:
        if "slow" in str(request.messages[-1].content):
            await asyncio.sleep(0.5)
        async for batch in super().chat(request):
            yield batch

    async def models(self) -> list[Model]:
        return [*await super().models(), Model("hashing", "tests", embedding_dimensions=DIMENSIONS)]

    async def embed(self, request: EmbeddingRequest, *, tenant: str = "") -> Embeddings:
        await asyncio.sleep(0.05)
        return Embeddings([hash_words(str(text)) for text in request.inputs], 1)


@asynccontextmanager
async def stack(**sections: Any) -> AsyncGenerator[tuple[Served, AsyncOpenAI, AsyncOpenAI]]:
    """A stack, and a client of each tenant."""
    inference = sections.pop("inference", {"provider": "tests.bench.test_neighbours:SlowEcho"})
    async with (
        serving(inference, server={"api_keys": KEYS}, **sections) as served,
        sdk_client(served.url, "key-of-loud", timeout_s=120) as loud,
        sdk_client(served.url, "key-of-quiet", timeout_s=120) as quiet,
    ):
        served.streams.check = False
        yield served, loud, quiet


@asynccontextmanager
async def flooding(work: Work, count: int) -> AsyncGenerator[None]:
    """`count` tasks that do the work again and again, also after it was refused."""

    async def repeat() -> None:
        while True:
            with suppress(Exception):
                await work()
            await asyncio.sleep(0.01)

    tasks = [asyncio.create_task(repeat()) for _ in range(count)]
    await asyncio.sleep(HEAD_START_S)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=10)


async def sample(work: Work) -> tuple[list[float], int]:
    """The milliseconds of each small request, sorted, and how many failed; those count with the time to their end."""
    times: list[float] = []
    failures, end = 0, time.monotonic() + PHASE_S
    while len(times) < SAMPLES and time.monotonic() < end:
        start = time.monotonic()
        try:
            async with asyncio.timeout(GIVE_UP_S):
                await work()
        except Exception:  # noqa: BLE001 - a refusal is a result here
            failures += 1
        times.append(1000 * (time.monotonic() - start))
    return sorted(times), failures


async def compare(resource: str, small: Work, flood: Work, count: int) -> None:
    await small()
    alone = await sample(small)
    async with flooding(flood, count):
        flooded = await sample(small)
    cells = [f"{times[len(times) // 2]:,.0f} / {times[-1]:,.0f} ms" for times, _ in (alone, flooded)]
    failed = f"{flooded[1]} of {len(flooded[0])}"
    print(f"\n| {resource} | {cells[0]} | {cells[1]} | {failed} |", flush=True)


@pytest.fixture(autouse=True, scope="module")
def head() -> None:
    print("\n| resource | alone, p50 / p99 | under the flood | failed |\n|---|---|---|---|")


async def test_background_responses() -> None:
    limits = {"background": {"max_running": 4, "poll_s": 0.1}}
    async with stack(responses=limits) as (_, loud, quiet):

        async def ask(client: Any, text: str, poll_s: float, **fields: Any) -> None:
            response = await client.responses.create(model="scripted", input=text, background=True, **fields)
            while response.status in ("queued", "in_progress"):
                await asyncio.sleep(poll_s)
                response = await client.responses.retrieve(response.id)
            assert response.status == "completed"

        async def flood() -> None:
            await ask(loud, "slow", 1, service_tier="priority")

        await compare("background", lambda: ask(quiet, "hi", 0.02), flood, 40)


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
async def test_python_sessions() -> None:
    async with stack(tool_runtime={"provider": "python", "max_sessions": 4}) as (served, _, _):
        tools = served.stack.tool_runtime
        assert tools is not None

        async def run(tenant: str, session: str, code: str) -> None:
            await tools.call(ToolCall("call", "python", {"code": code}, tenant=tenant, session=session))

        async def flood() -> None:
            await run("loud", f"s{next(numbers) % 8}", "import time\ntime.sleep(3)")

        await compare("Python sessions", lambda: run("quiet", "q", "1 + 1"), flood, 8)


async def test_mcp_sessions() -> None:
    real = RealServer()
    async with real.serving():
        servers = with_mcp(real.url, max_sessions=4, idle_s=0.2)
        async with stack(tool_servers=servers) as (served, _, _):
            mcp: Any = served.stack.providers_by_path["tool_servers"]

            async def call(tenant: str, name: str, token: str) -> None:
                fields = {"type": "mcp", "server_label": "a", "server_url": real.url, "authorization": token}
                arguments = {"text": "a"} if name == "echo" else {}
                await mcp.call_tool(McpTool.model_validate(fields), name, arguments, tenant=tenant)

            async def small() -> None:
                await call("quiet", "echo", f"quiet-{next(numbers)}")

            await compare("MCP sessions", small, lambda: call("loud", "hang", f"token-{next(numbers) % 6}"), 6)


async def test_readers() -> None:
    pages = ["word " * 80] * 250
    async with stack() as (_, loud, quiet):

        async def ask(client: AsyncOpenAI, name: str, data: bytes) -> None:
            part = {"type": "input_file", "filename": name, "file_data": base64.b64encode(data).decode()}
            items: Any = [{"role": "user", "content": [part, {"type": "input_text", "text": "hi"}]}]
            await client.responses.create(model="scripted", input=items, store=False)

        async def small() -> None:
            await ask(quiet, "a.txt", f"{next(numbers)}".encode())

        await compare("readers", small, lambda: ask(loud, "a.pdf", documents.pdf(f"{next(numbers)}", *pages)), 16)


async def test_embeddings() -> None:
    async with stack(inference={"provider": "minilm", "threads": 1}) as (_, loud, quiet):
        texts = ["the cat on the market " * 400] * 30

        async def embed(client: AsyncOpenAI, texts: list[str]) -> None:
            await client.embeddings.create(model="all-minilm-l6-v2", input=texts)

        await compare("embeddings", lambda: embed(quiet, ["cat"]), lambda: embed(loud, texts), 12)


async def test_ingestion(tmp_path: Path) -> None:
    more = {
        "vector_index": {"provider": "sqlite_vec", "path": str(tmp_path / "vectors.db")},
        "vector_stores": {"provider": "hybrid", "embedding_model": "hashing"},
    }
    async with AsyncExitStack() as open_ends:
        _, loud, quiet = await open_ends.enter_async_context(stack(more=more))

        async def ingest(client: AsyncOpenAI, count: int) -> None:
            files = [await client.files.create(file=("a.txt", b"a cat"), purpose="assistants") for _ in range(count)]
            store = await client.vector_stores.create(file_ids=[file.id for file in files])
            while store.status == "in_progress":
                await asyncio.sleep(0.02)
                store = await client.vector_stores.retrieve(store.id)

        await compare("ingestion", lambda: ingest(quiet, 1), lambda: ingest(loud, 40), 2)


async def test_connections() -> None:
    async with stack() as (_, loud, quiet):

        async def ask(client: AsyncOpenAI) -> None:
            await client.responses.create(model="scripted", input="hi", store=False)

        await compare("connections", lambda: ask(quiet), lambda: ask(loud), 64)
