"""`stack bench`: what it counts is what the server served, in every mode, and what fails is named."""

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner, Result

from apis.errors import UpstreamError
from providers.inference.scripted import Scripted
from stack.bench.connection import LoadClient
from stack.bench.plan import BenchPlan, Mode
from stack.bench.runner import run_load
from stack.bench.server_load import ServerLoad
from stack.cli import app
from tests.support.servers.serving import Served, scripted, serving
from tests.support.servers.stack_process import running_stack

BATCHES: dict[str, Any] = {"files": {"provider": "kv"}, "batches": {"provider": "leased", "poll_s": 0.05}}
USAGE = {"input_tokens": 7, "output_tokens": 5}
ANSWER: list[dict[str, Any]] = [{"text": ["A ", "good ", "answer."]}, {"finish": "stop", "usage": USAGE}]


async def run(served: Served, mode: Mode, requests: int, **options: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"clients": 3, **options}
    plan = BenchPlan(f"{served.url}/v1", mode=mode, requests=requests, **settings)
    return (await run_load(plan, lambda _line: None)).to_json()


async def count_responses(served: Served) -> dict[str, float]:
    """The server's own count of responses by status."""
    parts: list[bytes] = []
    client = LoadClient(served.url, "none", 10)
    await client.send("GET", "/metrics", b"", parts.append)
    await client.close()
    samples = [
        sample
        for family in text_string_to_metric_families(b"".join(parts).decode())
        for sample in family.samples
        if sample.name == "stack_responses_total"
    ]
    return {sample.labels["status"]: sample.value for sample in samples}


async def invoke(*arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, ["bench", *arguments])


async def test_every_mode_counts_what_the_server_served() -> None:
    async with serving(scripted(ANSWER), more=BATCHES) as served:
        for mode in ("streams", "requests", "chains", "background", "batches"):
            before = sum((await count_responses(served)).values())
            figures = await run(served, mode, 12, turns=2, lines=4)
            assert (figures["responses"], figures["errors"]) == (12, {}), mode
            assert figures["output_tokens"] == 60
            assert figures["whole_ms"]["p50"] > 0
            assert (figures["first_token_ms"] is not None) == (mode in ("streams", "chains"))
            assert figures["server"]["source"] == "/metrics"
            # one more: the request that tries the server first
            assert sum((await count_responses(served)).values()) - before == 13


async def test_a_chain_has_its_turns_and_then_begins_again() -> None:
    async with serving(scripted(ANSWER)) as served:
        await run(served, "chains", 5, clients=1, turns=2)
        requests = cast("Scripted", served.stack.inference).requests
        assert [len(request.messages) for request in requests] == [1, 1, 3, 1, 3, 1]


async def test_a_tool_round_calls_the_function_and_sends_its_output() -> None:
    call = [{"call": "read_clock", "arguments": "{}"}]
    async with serving(scripted(ANSWER, call, ANSWER)) as served:
        figures = await run(served, "tools", 1, clients=1)
        assert (figures["responses"], figures["errors"]) == (2, {})
    async with serving(scripted(ANSWER)) as served:
        figures = await run(served, "tools", 2, clients=1)
        assert figures["responses"] == 0
        assert sum(figures["errors"].values()) == 2


async def test_errors_are_counted_by_kind() -> None:
    half: list[dict[str, Any]] = [{"text": "Half an "}, {"fail": "It broke."}]
    async with serving(scripted(ANSWER, half, ANSWER)) as served:
        figures = await run(served, "streams", 3, clients=1)
        assert figures["responses"] == 2
        assert figures["errors"] == {"failed server_error": 1}
    slow: list[dict[str, Any]] = [{"wait_s": 0.3}, *ANSWER]
    async with serving(scripted(slow), server={"max_streams": 1}) as served:
        figures = await run(served, "streams", 4, clients=4)
        assert figures["responses"] >= 1
        [(kind, count)] = figures["errors"].items()
        assert kind.startswith("429 ")
        assert count + figures["responses"] == 4


async def test_an_answer_that_takes_too_long_is_an_error_and_its_connection_is_closed() -> None:
    waits: list[list[dict[str, Any]]] = [ANSWER, [{"wait_s": 30}], ANSWER]
    async with serving(scripted(*waits)) as served:
        figures = await run(served, "streams", 2, clients=1, timeout_s=0.2)
        assert (figures["responses"], figures["errors"]) == (1, {"timeout": 1})


async def test_the_run_ends_with_its_duration_and_completes_what_it_began() -> None:
    slow: list[dict[str, Any]] = [{"text": "A "}, {"wait_s": 0.2}, {"text": "word."}]
    async with serving(scripted(slow)) as served:
        plan = BenchPlan(f"{served.url}/v1", clients=2, duration_s=0.1)
        figures = (await run_load(plan, lambda _line: None)).to_json()
        assert (figures["responses"], figures["errors"]) == (2, {})
        assert figures["inter_token_ms"]["p50"] >= 150


async def test_a_server_that_goes_away_is_counted_and_not_flooded() -> None:
    plan = BenchPlan("", clients=2, duration_s=0.8)
    async with serving(scripted(ANSWER)) as served:
        running = asyncio.create_task(run_load(replace(plan, url=f"{served.url}/v1"), lambda _line: None))
        while sum((await count_responses(served)).values()) < 5:
            assert not running.done()
    figures = (await running).to_json()
    assert figures["responses"] >= 3
    # 2 clients, each of which pauses for 0.05, 0.1, 0.2, 0.4 s
    assert 2 <= sum(count for kind, count in figures["errors"].items() if kind == "cannot connect") <= 10


@pytest.mark.long
async def test_ctrl_c_ends_the_run_with_its_figures() -> None:
    async with serving(scripted(ANSWER)) as served:
        command = (sys.executable, "-m", "stack", "bench", served.url, "--duration", "600", "--json")
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        async with asyncio.timeout(60):
            while sum((await count_responses(served)).values()) < 50:
                assert process.returncode is None
            process.send_signal(signal.SIGINT)
            out, _ = await process.communicate()
        assert process.returncode == 0
        assert json.loads(out)["responses"] >= 40


async def test_prompts_of_a_run_begin_differently() -> None:
    plan = BenchPlan("http://127.0.0.1:1/v1", input="same")
    beginnings = {plan.next_input().partition("]")[0] for _ in range(100)}
    assert len(beginnings) == 100


async def test_a_server_that_refuses_the_first_request_ends_the_command() -> None:
    async with serving(scripted(ANSWER), server={"api_keys": ["sk-right"]}) as served:
        refused = await invoke(served.url, "--key", "sk-wrong", "--requests", "1")
        assert refused.exit_code == 1
        assert "401 invalid_api_key" in refused.stderr
        with pytest.raises(UpstreamError, match="404 model_not_found"):
            await run(served, "streams", 1, key="sk-right", model="gpt-99")
        for options in (["--fields", '{"temperature": 17}'], ["--fields", '{"temperature": "hot"}']):
            refused = await invoke(served.url, "--key", "sk-right", "--requests", "1", *options)
            assert "400" in refused.stderr
            assert "temperature" in refused.stderr
    dead = await invoke("http://127.0.0.1:9", "--requests", "1")
    assert (dead.exit_code, "cannot connect" in dead.stderr) == (1, True)


async def test_a_table_json_and_the_comparison_with_an_earlier_run(tmp_path: Path) -> None:
    async with serving(scripted(ANSWER)) as served:
        first = await invoke(served.url, "--requests", "4", "--json", "--clients", "2")
        assert first.exit_code == 0, first.output
        document = json.loads(first.stdout)
        assert (document["responses"], document["mode"], document["clients"]) == (4, "streams", 2)
        (tmp_path / "earlier.json").write_text(first.stdout)
        second = await invoke(served.url, "--requests", "8", "--compare", str(tmp_path / "earlier.json"))
        assert second.exit_code == 0, second.output
        rows = {line[:30].strip(): line.split()[-3:] for line in second.stdout.splitlines()}
        assert rows["responses"] == ["8", "4", "2.00"]
        assert "first token p99 (ms)" in rows
        wrong = await invoke(served.url, "--compare", str(tmp_path / "absent.json"))
        assert (wrong.exit_code, "absent.json" in wrong.stderr) == (1, True)


@pytest.mark.parametrize(
    "arguments",
    [
        ["ftp://127.0.0.1/v1"],
        ["--mode", "floods"],
        ["--clients", "0"],
        ["--duration", "-1"],
        ["--fields", "[]"],
        ["--fields", "{"],
    ],
)
def test_wrong_usage_is_named(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 2
    assert "error: " in result.stderr


FORKING_SERVER = """
import os, socket, sys
listener = socket.create_server(("127.0.0.1", 0))
port = listener.getsockname()[1]
if os.fork():
    listener.close()
    print(port, flush=True)
sys.stdin.read()
"""


async def test_the_parent_of_a_forked_worker_is_found() -> None:
    """Only the worker has the socket here: of processes that share one psutil names any."""
    server = await asyncio.create_subprocess_exec(sys.executable, "-c", FORKING_SERVER, stdin=PIPE, stdout=PIPE)
    assert server.stdin is not None
    assert server.stdout is not None
    load = ServerLoad(f"http://127.0.0.1:{int(await server.stdout.readline())}", "none")
    await load.start()
    assert load.source == "processes"
    assert load.first is not None
    assert load.first.process_count == 2
    server.stdin.close()
    await server.wait()
    await load.stop()


@pytest.mark.long
async def test_cpu_and_memory_of_a_local_server_are_those_of_all_its_workers(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("inference: {provider: scripted}\nkv_store: {provider: sqlite, path: a.db}\n")
    async with running_stack("run.yaml", "--workers", "2", cwd=tmp_path) as (url, _):
        result = await invoke(url, "--requests", "300", "--json")
        server = json.loads(result.stdout)["server"]
        assert server["source"] == "processes"
        assert server["processes"] >= 2
        assert server["cpu_ms_per_response"] > 0.1
        assert 2 * 60 < server["memory_mib_before"] <= server["memory_mib_peak"] < 800
