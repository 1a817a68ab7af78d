"""Report of a run: JSON for machines, a table for people, and the table of two runs side by side."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from stack import __version__
from stack.bench.figures import Tally
from stack.bench.plan import BenchPlan, Mode
from stack.bench.server_load import ServerLoad

_MIB: Final = 1024 * 1024
_BUSY_CORES: Final = 0.9
"""Cores above which the generator itself may be what limits a run: it has one thread."""
_WHOLE_NAMES: Final[dict[Mode, str]] = {
    "streams": "whole response",
    "requests": "whole response",
    "chains": "whole turn",
    "tools": "whole round",
    "batches": "whole batch",
    "background": "until it ended",
}
_QUANTILES: Final = ("p50", "p99")


@dataclass(frozen=True)
class RunFigures:
    plan: BenchPlan
    tally: Tally
    server: ServerLoad
    elapsed_s: float
    generator_cpu_s: float

    def to_json(self) -> dict[str, Any]:
        """Return all figures: times in milliseconds unless their name says otherwise, null where nothing is known."""
        plan, tally, elapsed_s = self.plan, self.tally, max(self.elapsed_s, 1e-9)
        return {
            "version": __version__,
            "url": plan.url,
            "model": plan.model,
            "mode": plan.mode,
            "clients": plan.clients,
            "elapsed_s": round(elapsed_s, 3),
            "responses": tally.responses,
            "responses_per_s": round(tally.responses / elapsed_s, 2),
            "output_tokens": tally.output_tokens,
            "output_tokens_per_s": round(tally.output_tokens / elapsed_s, 1),
            "cached_input_share": round(tally.cached_tokens / tally.input_tokens, 4) if tally.input_tokens else None,
            "first_token_ms": tally.first_token.to_json(),
            "inter_token_ms": tally.inter_token.to_json(),
            "whole_ms": tally.whole.to_json(),
            "errors": dict(tally.errors.most_common()),
            "server": self._server_to_json(),
            "generator_cores": round(self.generator_cpu_s / elapsed_s, 3),
        }

    def _server_to_json(self) -> dict[str, Any] | None:
        first, last, tally = self.server.first, self.server.last, self.tally
        if first is None or last is None:
            return None
        cpu_s = max(0.0, last.cpu_s - first.cpu_s)
        return {
            "source": self.server.source,
            "processes": last.process_count,
            "cpu_cores": round(cpu_s / self.elapsed_s, 3),
            "cpu_ms_per_response": round(cpu_s * 1e3 / tally.responses, 3) if tally.responses else None,
            "cpu_us_per_output_token": round(cpu_s * 1e6 / tally.output_tokens, 1) if tally.output_tokens else None,
            "memory_mib_before": round(first.memory_bytes / _MIB, 1),
            "memory_mib_peak": round(self.server.peak_memory_bytes / _MIB, 1),
        }


def render_table(figures: dict[str, Any], earlier: dict[str, Any] | None = None) -> Iterator[str]:
    """Yield the lines of a table; with the JSON of an earlier run a column of it, and one of ratios."""
    yield f"{figures['mode']}: {figures['clients']} clients, {figures['model']} at {figures['url']}"
    if earlier is not None:
        yield f"earlier: {earlier.get('mode')}, {earlier.get('clients')} clients, {earlier.get('model')}"
    before = dict(_rows(earlier)) if earlier is not None else {}
    header = ("", "now", "earlier", "ratio") if earlier is not None else ("", "")
    table: list[tuple[str, ...]] = []
    for name, number in _rows(figures):
        columns = (name, _format(number))
        if earlier is not None:
            past = before.get(name)
            ratio = f"{number / past:.2f}" if number is not None and past else ""
            columns = (*columns, _format(past), ratio)
        table.append(columns)
    widths = [max(len(row[column]) for row in (header, *table)) for column in range(len(header))]
    for row in (header, *table) if earlier is not None else table:
        first, *others = zip(row, widths, strict=True)
        yield "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]).rstrip()
    yield from _notes(figures)


def _rows(figures: dict[str, Any]) -> Iterator[tuple[str, float | None]]:
    yield "seconds", figures.get("elapsed_s")
    yield "responses", figures.get("responses")
    yield "responses/s", figures.get("responses_per_s")
    yield "output tokens/s", figures.get("output_tokens_per_s")
    if figures.get("mode") == "chains":
        yield "cached share of input", figures.get("cached_input_share")
    whole = _WHOLE_NAMES[figures["mode"]] if figures.get("mode") in _WHOLE_NAMES else "whole"
    for name, key in (("first token", "first_token_ms"), ("inter-token", "inter_token_ms"), (whole, "whole_ms")):
        times: dict[str, float] = figures.get(key) or {}
        for quantile in _QUANTILES if times else ():
            yield f"{name} {quantile} (ms)", times[quantile]
    server = figures.get("server")
    if server:
        yield "server CPU (cores)", server["cpu_cores"]
        yield "server CPU per response (ms)", server["cpu_ms_per_response"]
        yield "server CPU per token (us)", server["cpu_us_per_output_token"]
        yield "server memory before (MiB)", server["memory_mib_before"]
        yield "server memory, highest (MiB)", server["memory_mib_peak"]
    yield "generator CPU (cores)", figures.get("generator_cores")
    yield "errors", sum(figures.get("errors", {}).values())


def _notes(figures: dict[str, Any]) -> Iterator[str]:
    for kind, count in figures["errors"].items():
        yield f"  {count:,} x {kind}"
    server = figures["server"]
    if server is None:
        yield "The server's CPU and memory are unknown: it runs elsewhere, and this key does not read /metrics."
    elif server["source"] == "/metrics":
        yield f"The server's figures are of its /metrics: {server['processes']} processes, without their children."
    if figures["generator_cores"] > _BUSY_CORES:
        yield "The load generator was busy: it may be what limits this run. Run several, with fewer clients each."


def _format(number: float | None) -> str:
    if number is None:
        return "-"
    return f"{number:,.0f}" if isinstance(number, int) or number >= 1000 else f"{number:.4g}"
