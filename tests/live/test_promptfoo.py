"""promptfoo's provider of decisions, installed from npm, with a stack as its server."""

import json
from pathlib import Path
from typing import Any, Final

import pytest

from providers.inference.model_files.packages import PACKAGED_MODELS, fetch_model, models_dir
from tests.live.programs import needs, npm_folder, run_program
from tests.support.servers.serving import serving

pytestmark = [pytest.mark.live, pytest.mark.timeout(900, func_only=True), needs("npm")]

PACKAGES: Final = {"promptfoo": "latest"}
MODEL: Final = "smollm2-135m-instruct"
QUESTIONS: Final[list[dict[str, Any]]] = [
    {
        "type": "choice",
        "name": "topic",
        "instructions": "What is the ticket about?",
        "choices": [{"value": "billing", "description": "payments and refunds"}, {"value": "bug"}],
    },
    {"type": "predicate", "name": "refund", "instructions": "The customer wants money back."},
    {
        "type": "score",
        "name": "anger",
        "instructions": "How angry?",
        "levels": [{"label": "calm"}, {"label": "furious"}],
    },
]


async def test_promptfoo_evaluates_a_decision(tmp_path: Path) -> None:
    await fetch_model(PACKAGED_MODELS[MODEL], models_dir(), 100)
    program = npm_folder(PACKAGES) / "node_modules" / ".bin" / "promptfoo"
    local = {"provider": "llama_cpp", "model": MODEL, "threads": 1, "context_tokens": 2048, "parallel": 1}
    async with serving(local) as served:
        provider = {"apiBaseUrl": f"{served.url}/v1", "apiKey": "none", "questions": QUESTIONS}
        assertions = [
            "['billing', 'bug'].includes(JSON.parse(output).answers[0].choice)",
            "JSON.parse(output).answers[1].probability > 0 && JSON.parse(output).answers[1].probability < 1",
            "JSON.parse(output).answers[2].score >= 0 && JSON.parse(output).answers[2].score <= 1",
        ]
        ticket = {"ticket": "I was charged twice and want my money back."}
        config = {
            "prompts": ["{{ticket}}"],
            "providers": [{"id": f"openai:decisions:{MODEL}", "config": provider}],
            "tests": [{"vars": ticket, "assert": [{"type": "javascript", "value": each} for each in assertions]}],
        }
        (tmp_path / "promptfooconfig.json").write_text(json.dumps(config))
        quiet = {"PROMPTFOO_DISABLE_TELEMETRY": "1", "PROMPTFOO_DISABLE_UPDATE": "1"}
        options = ("eval", "-c", "promptfooconfig.json", "--no-cache", "-o", "results.json")
        await run_program(str(program), *options, folder=tmp_path, home=tmp_path, environment=quiet, limit_s=300)
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    assert (results["stats"]["successes"], results["stats"]["failures"], results["stats"]["errors"]) == (1, 0, 0)
    (result,) = results["results"]
    assert json.loads(result["response"]["output"])["answers"][0]["name"] == "topic"
    assert result["response"]["tokenUsage"]["total"] > 0
