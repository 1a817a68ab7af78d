"""promptfoo, installed from npm, evaluates decisions of a stack. Its newest version there has no provider of decisions
yet (`openai:decisions:MODEL`), so it asks by its provider of HTTP."""

import json
import os
from pathlib import Path
from typing import Any, Final

import pytest

from providers.inference.model_files.packages import PACKAGED_MODELS, fetch_model, models_dir
from tests.live.programs import needs, npm_folder, run_program
from tests.support.servers.serving import serving

pytestmark = [pytest.mark.live, pytest.mark.timeout(900, func_only=True), needs("npm")]

PACKAGES: Final = {"promptfoo": "0.123.1", "node": "22.23.3"}
"""With the Node.js that it needs."""
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
    programs = npm_folder(PACKAGES) / "node_modules" / ".bin"
    local = {"provider": "llama_cpp", "model": MODEL, "threads": 1, "context_tokens": 2048, "parallel": 1}
    async with serving(local) as served:
        body = {"model": MODEL, "input": "{{prompt}}", "questions": QUESTIONS}
        http = {"method": "POST", "headers": {"Content-Type": "application/json"}, "body": body}
        provider = {"id": f"{served.url}/v1/decisions", "config": {**http, "transformResponse": "JSON.stringify(json)"}}
        assertions = [
            "['billing', 'bug'].includes(JSON.parse(output).answers[0].choice)",
            "JSON.parse(output).answers[1].probability > 0 && JSON.parse(output).answers[1].probability < 1",
            "JSON.parse(output).answers[2].score >= 0 && JSON.parse(output).answers[2].score <= 1",
        ]
        ticket = {"ticket": "I was charged twice and want my money back."}
        config = {
            "prompts": ["{{ticket}}"],
            "providers": [provider],
            "tests": [{"vars": ticket, "assert": [{"type": "javascript", "value": each} for each in assertions]}],
        }
        (tmp_path / "promptfooconfig.json").write_text(json.dumps(config))
        path = f"{programs}:{os.environ['PATH']}"
        environment = {"PATH": path, "PROMPTFOO_DISABLE_TELEMETRY": "1", "PROMPTFOO_DISABLE_UPDATE": "1"}
        options = ("eval", "-c", "promptfooconfig.json", "--no-cache", "-o", "results.json")
        command = (str(programs / "promptfoo"), *options)
        await run_program(*command, folder=tmp_path, home=tmp_path, environment=environment, limit_s=300)
    (result,) = json.loads((tmp_path / "results.json").read_text())["results"]["results"]
    assert result["success"], result
    assert json.loads(result["response"]["output"])["answers"][0]["name"] == "topic"
