"""Traces of agents as an SDK has sent them, and times that a server takes, which are of the last days."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "data" / "agent_traces"
DAY = (datetime.now(UTC) - timedelta(days=1)).strftime("%Y-%m-%d")
"""Yesterday, in ISO 8601."""
_RECORDED_DAY = "2026-11-22"


def recorded_traces() -> Any:
    """Return the body that @openai/agents 0.20.0 for JavaScript has sent, as of yesterday."""
    return json.loads((DATA / "javascript_0_20_0.json").read_text().replace(_RECORDED_DAY, DAY))
