"""A real Prometheus with a store of its own, which scrapes one stack every second."""

import asyncio
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx2
import yaml

from tests.support.sdk.client import TLS
from tests.support.servers.ports import free_port

PROMETHEUS: Final = shutil.which("prometheus")
PROMTOOL: Final = shutil.which("promtool")
"""Both are in Debian's package `prometheus`, which `tests/run.sh` installs."""


@dataclass(frozen=True)
class Prometheus:
    """The URL of a running Prometheus."""

    url: str
    client: httpx2.AsyncClient

    async def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series of an expression now. Raises AssertionError for an invalid one."""
        answer = (await self.client.get(f"{self.url}/api/v1/query", params={"query": expression})).json()
        assert answer["status"] == "success", f"{expression}: {answer.get('error')}"
        return answer["data"]["result"]

    async def rules(self) -> list[dict[str, Any]]:
        """Return all rules with their health, as Prometheus sees them."""
        groups = (await self.client.get(f"{self.url}/api/v1/rules")).json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]


@asynccontextmanager
async def running_prometheus(folder: Path, config: Path, target: str) -> AsyncGenerator[Prometheus]:
    """Run Prometheus with the shipped config, but for the address, key and pace of the job `responses-stack`."""
    assert PROMETHEUS is not None
    settings: dict[str, Any] = yaml.safe_load(config.read_text())
    job = next(job for job in settings["scrape_configs"] if job["job_name"] == "responses-stack")
    job = {key: value for key, value in job.items() if key not in ("dns_sd_configs", "authorization")}
    settings["scrape_configs"] = [{**job, "static_configs": [{"targets": [target]}]}]
    settings["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s", "scrape_timeout": "1s"}
    settings["rule_files"] = [str(config.parent / file) for file in settings["rule_files"]]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(settings))
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        PROMETHEUS,
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    )
    try:
        async with httpx2.AsyncClient(timeout=10, verify=TLS) as client, asyncio.timeout(60):
            while True:
                try:
                    if (await client.get(f"http://127.0.0.1:{port}/-/ready")).status_code == 200:
                        break
                except httpx2.ConnectError:
                    pass
                assert process.returncode is None, "Prometheus ended before it was ready"
                await asyncio.sleep(0.1)
        async with httpx2.AsyncClient(timeout=10, verify=TLS) as client:
            yield Prometheus(f"http://127.0.0.1:{port}", client)
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.wait(), 30)
