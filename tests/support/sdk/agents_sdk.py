"""Running agents of the Agents SDK against a served stack, whole or streamed."""

from collections.abc import Sequence
from typing import Any, Protocol

from agents import (
    Agent,
    ModelSettings,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    RunResult,
    RunResultStreaming,
    function_tool,
)
from openai.types.shared import Reasoning

from tests.support.sdk.answer_shapes import call
from tests.support.servers.serving import Served

Ran = RunResult | RunResultStreaming
UNTRACED = RunConfig(tracing_disabled=True)
ENCRYPTED = ModelSettings(
    store=False, reasoning=Reasoning(effort="low"), response_include=["reasoning.encrypted_content"]
)
"""Settings of an agent that keeps its history itself, its reasoning sealed."""


class Run(Protocol):
    """Runs an agent to its end. `fields` are those of the SDK's Runner."""

    async def __call__(self, agent: Agent[Any], said: Any = "hi", **fields: Any) -> Ran: ...


async def whole(agent: Agent[Any], said: Any = "hi", **fields: Any) -> Ran:
    return await Runner.run(agent, said, run_config=fields.pop("run_config", UNTRACED), **fields)


async def streamed(agent: Agent[Any], said: Any = "hi", **fields: Any) -> Ran:
    result = Runner.run_streamed(agent, said, run_config=fields.pop("run_config", UNTRACED), **fields)
    async for _ in result.stream_events():
        pass
    return result


RUNS: Sequence[Run] = (whole, streamed)


def agent(served: Served, name: str = "Agent", **fields: Any) -> Agent[Any]:
    """An agent whose model is the stack's."""
    return Agent(name=name, model=OpenAIResponsesModel("scripted", served.client), **fields)


def kinds(result: Ran) -> list[str]:
    """The types of a run's new items, as the SDK names them."""
    return [item.type for item in result.new_items]


def outputs(result: Ran) -> list[str]:
    """The types of what the model said, over all its turns."""
    return [item.type for response in result.raw_responses for item in response.output]


@function_tool
def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


def adding(a: int, b: int, **fields: Any) -> dict[str, Any]:
    """A call of `add`."""
    return call("add", f'{{"a": {a},', f' "b": {b}}}', **fields)


def roles_of(chat: list[dict[str, Any]]) -> list[str]:
    """Who speaks in a chat."""
    return [each["role"] for each in chat]
