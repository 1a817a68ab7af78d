"""`stack doctor`: runs the checks and prints each finding as it comes."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from dataclasses import asdict

from stack.doctor.finding import Finding
from stack.doctor.machine_checks import check_machine
from stack.doctor.server_checks import check_server
from stack.server_config import HttpServerConfig


def doctor(
    url: str | None, key_variable: str | None, model: str | None, write: Callable[[str], None], *, as_json: bool
) -> int:
    """Check the stack at `url`, or this machine without one, and return the exit code: 1 if a check failed.

    `write` gets a line for each finding, or all of them as one JSON document at the end.
    """
    findings = check_machine(model, HttpServerConfig()) if url is None else check_server(url, key_variable, model)
    collected = asyncio.run(_collect(findings, (lambda _: None) if as_json else lambda each: write(_render(each))))
    counts = Counter(finding.status for finding in collected)
    if as_json:
        write(json.dumps({"ok": not counts["failed"], "checks": [asdict(finding) for finding in collected]}, indent=2))
    else:
        write(", ".join(f"{count} {status}" for status, count in counts.items()) + ".")
    return 1 if counts["failed"] else 0


async def _collect(findings: AsyncGenerator[Finding], show: Callable[[Finding], None]) -> list[Finding]:
    collected: list[Finding] = []
    async for finding in findings:
        show(finding)
        collected.append(finding)
    return collected


def _render(finding: Finding) -> str:
    return f"{finding.status:<9}{finding.check:<19}{finding.message}"
