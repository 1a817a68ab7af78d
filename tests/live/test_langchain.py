"""LangChain's decisions, its router of models and its streams of responses, with a stack as their server.

LANGCHAIN_PYTHON is the path of a Python that has the packages `langchain` and `langchain-openai`.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from providers.inference.model_files.packages import PACKAGED_MODELS, fetch_model, models_dir
from tests.live.programs import python_output
from tests.support.sdk.answer_shapes import call
from tests.support.sdk.requests import messages
from tests.support.servers.mcp_stack import tool_outputs
from tests.support.servers.serving import scripted, serving

PYTHON = os.environ.get("LANGCHAIN_PYTHON", "")
pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(300, func_only=True),
    pytest.mark.skipif(not Path(PYTHON).is_file(), reason="LANGCHAIN_PYTHON is no Python"),
]
MODEL = "smollm2-135m-instruct"
DECIDE = """
import asyncio, json, os, warnings
warnings.simplefilter("ignore")
from langchain_core.messages import AIMessage, HumanMessage
from langchain_openai.decisions import Choice, Level, OpenAIDecisions, Predicate, Score

decisions = OpenAIDecisions(model="gpt-6-luna", base_url=os.environ["URL"], api_key="none", timeout=100)
questions = {
    "topic": Choice(instructions="What is it about?", choices={"billing": "Payments.", "bug": "Errors."}),
    "refund": Predicate(instructions="The customer wants money back."),
    "anger": Score(instructions="How angry?", levels=["Calm", "Annoyed", "Furious"]),
}
states = [
    "I was charged twice and want my money back.",
    [HumanMessage("I was charged twice.")],
    [HumanMessage("I was charged twice."), AIMessage("I am sorry."), HumanMessage("Give it back.")],
    {"order": {"paid": 2}},
]
found = []
for state in states:
    response = decisions.invoke({"input": state, "questions": questions})
    found.append(response.model_dump(mode="json"))
found.append(asyncio.run(decisions.ainvoke({"input": states[0], "questions": questions})).model_dump(mode="json"))
print(json.dumps(found))
"""
ROUTE = """
import json, os, warnings
warnings.simplefilter("ignore")
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langchain_openai.decisions import OpenAIDecisions
from langchain_openai.middleware.model_router import ModelChoice, OpenAIModelRouterMiddleware

fields = {"base_url": os.environ["URL"], "api_key": "none", "timeout": 100}
talker = ChatOpenAI(model="scripted", **fields)
router = OpenAIModelRouterMiddleware(
    choices={"talk": ModelChoice(talker, "Small talk."), "work": ModelChoice(talker, "Code and mathematics.")},
    instructions="Which model fits the message?",
    model=OpenAIDecisions(model="gpt-6-luna", **fields),
)
state = create_agent(talker, middleware=[router]).invoke({"messages": [{"role": "user", "content": "Hi there!"}]})
print(json.dumps({"route": state["model_route"], "text": state["messages"][-1].text}))
"""
CALL = """
import json, os
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

@tool
def add(a: int, b: int) -> int:
    "Adds."
    return a + b

fields = {"base_url": os.environ["URL"], "api_key": "none", "timeout": 100, "use_responses_api": True, "store": False}
reasoning = {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]}
found = []
for version in ("v0", "responses/v1", "v1"):
    model = ChatOpenAI(model="scripted", output_version=version, **fields, **reasoning).bind_tools([add])
    answer = None
    for chunk in model.stream("Add."):
        answer = chunk if answer is None else answer + chunk
    results = [add.invoke(call) for call in answer.tool_calls]
    last = model.invoke([HumanMessage("Add."), answer, *results])
    found.append({"sums": [result.content for result in results], "text": last.text})
print(json.dumps(found))
"""


def section() -> dict[str, Any]:
    local = {"provider": "llama_cpp", "model": MODEL, "threads": 1, "context_tokens": 2048, "parallel": 1}
    providers = {"chat": {"provider": "scripted", "turns": [[{"text": "Hello."}]]}, "local": local}
    return {"provider": "router", "providers": providers, "aliases": {"gpt-6-luna": MODEL}}


async def test_langchain_decides(tmp_path: Path) -> None:
    await fetch_model(PACKAGED_MODELS[MODEL], models_dir(), 100)
    async with serving(section()) as served:
        responses = await python_output(PYTHON, DECIDE, tmp_path, f"{served.url}/v1")
    assert len(responses) == 5
    for response in responses:
        assert response["answers"].keys() == {"topic", "refund", "anger"}
        assert response["answers"]["topic"]["choice"] in ("billing", "bug")
        assert 0 < response["answers"]["refund"]["probability"] < 1
        assert 0 <= response["answers"]["anger"]["score"] <= 2
        assert response["usage"]["input_tokens"] > 0


async def test_its_router_takes_a_decision_for_the_choice_of_a_model(tmp_path: Path) -> None:
    await fetch_model(PACKAGED_MODELS[MODEL], models_dir(), 100)
    async with serving(section()) as served:
        result = await python_output(PYTHON, ROUTE, tmp_path, f"{served.url}/v1")
    assert result["text"] == "Hello."
    assert result["route"]["choice"] in ("talk", "work")
    assert sum(result["route"]["probabilities"].values()) == pytest.approx(1)


async def test_it_calls_functions_that_an_engine_writes_in_turns(tmp_path: Path) -> None:
    """It adds each piece of arguments to the newest call of a stream."""
    calls = {"calls": [call("add", '{"a": 1,', '"b": 2}', id="c1"), call("add", '{"a": 3,', '"b": 4}', id="c2")]}
    turns: list[list[Any]] = [[{"reasoning": "I add."}, {"text": "Adding."}, calls], [{"text": "Done."}]]
    async with serving(scripted(*turns)) as served:
        answers = await python_output(PYTHON, CALL, tmp_path, f"{served.url}/v1")
        assert tool_outputs(served) == {"c1": "3", "c2": "7"}
        assert messages(served)[1]["reasoning"] == "I add."
    assert answers == [{"sums": ["3", "7"], "text": "Done."}] * 3
