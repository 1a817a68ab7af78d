"""`stack batch run`: a file of requests becomes a file of results, on a stack that runs or on one of its own."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from apis.errors import UpstreamError
from stack.batch import run_batch
from stack.cli import app
from tests.support.sdk.batch_files import batch_line
from tests.support.servers.serving import scripted, serving

BATCHES: dict[str, Any] = {"files": {"provider": "kv"}, "batches": {"provider": "leased", "poll_s": 0.05}}


def write_lines(path: Path, *lines: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


async def test_results_and_errors_are_written_next_to_the_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stack.batch._BODY_BYTES", 300)  # so that the file is sent in parts
    monkeypatch.setattr("stack.batch._POLL_S", 0.05)
    lines = [batch_line(f"{number}") for number in range(5)]
    lines[2]["body"]["temperature"] = 17
    source = write_lines(tmp_path / "in.jsonl", *lines)
    printed_lines: list[str] = []
    async with serving(scripted([{"text": "hello"}]), more=BATCHES) as served:
        summary = await asyncio.to_thread(run_batch, source, None, f"{served.url}/v1", "24h", printed_lines.append)
    assert "5/5 completed, 1 failed" in summary
    assert "] 5/5 completed, 1 failed" in printed_lines[-1]
    results = [json.loads(line) for line in (tmp_path / "in.output.jsonl").read_text().splitlines()]
    assert [result["custom_id"] for result in results] == ["0", "1", "3", "4"]
    [error] = [json.loads(line) for line in (tmp_path / "in.output.errors.jsonl").read_text().splitlines()]
    assert error["custom_id"] == "2"


async def test_a_file_with_faults_names_their_lines(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", batch_line("a"), batch_line("a"))
    async with serving(more=BATCHES) as served:
        with pytest.raises(UpstreamError, match="line 2: The custom_id 'a' for this request is a duplicate"):
            await asyncio.to_thread(run_batch, source, None, f"{served.url}/v1", "24h", print)
        other = write_lines(tmp_path / "other.jsonl", {"url": "/v1/other"})
        with pytest.raises(UpstreamError, match="no `url` of a batch: /v1/responses"):
            await asyncio.to_thread(run_batch, other, None, f"{served.url}/v1", "24h", print)


@pytest.mark.long
def test_a_stack_of_its_own_ends_with_the_command(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        yaml.safe_dump({"inference": {"provider": "scripted"}, "kv_store": {"provider": "memory"}, **BATCHES})
    )
    source = write_lines(tmp_path / "in.jsonl", batch_line("a"))
    output = tmp_path / "results.jsonl"
    ran = CliRunner().invoke(app, ["batch", "run", source, "--config", str(config), "--output", str(output)])
    assert ran.exit_code == 0, ran.output
    assert "1/1 completed" in ran.output
    assert json.loads(output.read_text())["response"]["status_code"] == 200
