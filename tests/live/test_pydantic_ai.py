"""Pydantic AI over the Responses API: functions called in parallel, typed answers, and reasoning that goes back.

PYDANTIC_AI_PYTHON is the path of a Python that has the package `pydantic-ai-slim[openai]`.
"""

import os
from pathlib import Path
from typing import Any, Final

import pytest

from tests.live.programs import python_output
from tests.support.sdk.answer_shapes import call
from tests.support.sdk.requests import messages
from tests.support.servers.mcp_stack import tool_outputs
from tests.support.servers.serving import scripted, serving

PYTHON: Final = os.environ.get("PYDANTIC_AI_PYTHON", "")
pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(240, func_only=True),
    pytest.mark.skipif(not Path(PYTHON).is_file(), reason="PYDANTIC_AI_PYTHON is no Python"),
]
SCRIPT: Final = """
import asyncio, json, os
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIResponsesModel, OpenAIResponsesModelSettings
from pydantic_ai.providers.openai import OpenAIProvider

class City(BaseModel):
    name: str
    people: int

model = OpenAIResponsesModel("scripted", provider=OpenAIProvider(base_url=os.environ["URL"], api_key="none"))
reasoning = {"openai_reasoning_summary": "auto", "openai_reasoning_effort": "low"}
agent = Agent(model, model_settings=OpenAIResponsesModelSettings(openai_store=False, **reasoning))

@agent.tool_plain
def add(a: int, b: int) -> int:
    return a + b

async def main():
    city = await Agent(model, output_type=NativeOutput(City)).run("Which city?")
    async with agent.run_stream("Add.") as answer:
        text = await answer.get_output()
        usage = answer.usage() if callable(answer.usage) else answer.usage
    again = await agent.run("And now?", message_history=answer.all_messages())
    return {"text": text, "requests": usage.requests, "again": again.output, "city": city.output.model_dump()}

print(json.dumps(asyncio.run(main())))
"""


async def test_pydantic_ai_streams_calls_functions_and_types_answers(tmp_path: Path) -> None:
    calls = {"calls": [call("add", '{"a": 1,', '"b": 2}', id="c1"), call("add", '{"a": 3,', '"b": 4}', id="c2")]}
    turns: list[list[Any]] = [
        [{"text": '{"name": "Rome", "people": 3}'}],
        [{"reasoning": "I add."}, calls],  # it takes text before a call for the answer
        [{"text": ["Do", "ne."]}],
        [{"text": "Still done."}],
    ]
    async with serving(scripted(*turns)) as served:
        output = await python_output(PYTHON, SCRIPT, tmp_path, f"{served.url}/v1")
        assert tool_outputs(served) == {"c1": "3", "c2": "7"}
        assert messages(served)[1]["reasoning"] == "I add."
    assert output == {
        "text": "Done.",
        "requests": 2,
        "again": "Still done.",
        "city": {"name": "Rome", "people": 3},
    }
