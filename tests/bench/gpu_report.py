"""Figures as a file of JSON, as tables, and as a picture of how near the limit steps come."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

Rows = Sequence[Mapping[str, Any]]
WIDTH, HEIGHT, EDGE = 640, 360, 48
COLOURS = ("#1f5fa8", "#c2571a", "#2e7d4f", "#7a3e9d", "#8a8a00")


def write(folder: Path, results: Mapping[str, Any]) -> None:
    """`gpt_oss_MODEL.json`, .md and .svg: whole at any time, whenever the one who writes is ended."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind, text in (("json", json.dumps(results, indent=1)), ("md", tables(results)), ("svg", picture(results))):
        file = folder / f"gpt_oss_{results['model']}.{kind}"
        fresh = file.with_suffix(f".{kind}.new")
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(file)


def tables(results: Mapping[str, Any]) -> str:
    """Markdown: what it ran on, then a table for each list of figures."""
    parts = [f"# gpt-oss {results['model']}, {results['device']}\n\n{json.dumps(results['versions'])}\n"]
    parts += [f"{name}: {json.dumps(value)}\n" for name, value in results.items() if isinstance(value, dict)]
    for name, rows in results.items():
        if isinstance(rows, list) and rows:
            parts.append(f"## {name}\n\n{table(cast('Rows', rows))}\n")
    return "\n".join(parts)


def table(rows: Rows) -> str:
    columns = list(dict.fromkeys(column for row in rows for column in row if column != "where"))
    lines = [columns, ["---"] * len(columns)]
    lines += [[_format_value(row.get(column, "")) for column in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def picture(results: Mapping[str, Any]) -> str:
    """Share of the limit over rows, a line for each context, as SVG."""
    input_items = results.get("steps", [])
    steps = cast("Rows", input_items if isinstance(input_items, list) else [])
    rows = sorted({row["rows"] for row in steps}) or [1]
    places = {count: EDGE + (WIDTH - 2 * EDGE) * at / max(1, len(rows) - 1) for at, count in enumerate(rows)}
    drawn: list[str] = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _height(share)
        drawn.append(f'<path d="M{EDGE} {y}H{WIDTH - EDGE}" stroke="#ccc"/>')
        drawn.append(f'<text x="{EDGE - 6}" y="{y + 4}" text-anchor="end">{share:.0%}</text>')
    drawn += [
        f'<text x="{x}" y="{HEIGHT - EDGE + 18}" text-anchor="middle">{count}</text>' for count, x in places.items()
    ]
    for at, context in enumerate(sorted({row["context"] for row in steps})):
        colour = COLOURS[at % len(COLOURS)]
        points = " ".join(
            f"{places[row['rows']]:.1f},{_height(row['share']):.1f}" for row in steps if row["context"] == context
        )
        drawn.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        drawn.append(
            f'<text x="{WIDTH - EDGE}" y="{EDGE + 16 * at}" fill="{colour}" text-anchor="end">{context} cached</text>'
        )
    title = f"gpt-oss {results['model']} on {results['device']}: share of the limit by rows of a step"
    body = "".join(drawn)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/><text x="{EDGE}" y="20">{title}</text>'
        f"{body}</svg>\n"
    )


def _height(share: float) -> float:
    return HEIGHT - EDGE - (HEIGHT - 2 * EDGE) * min(share, 1.0)


def _format_value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
