"""Questions for a stack with a small model, asked so that the answer is the same every time."""

from typing import Any, Final

import aiohttp
from openai.types.responses import Response

from tests.live.smollm2 import MODEL
from tests.support.servers.serving import Served

PATIENCE_S: Final = 110
"""For one answer, on a machine that has other things to do."""
FRANCE: Final = "What is the capital of France? Answer in one sentence."


def build_fields(said: Any, **fields: Any) -> dict[str, Any]:
    """A request whose answer is the same every time."""
    return {"model": MODEL, "input": said, "temperature": 0, "max_output_tokens": 64, "timeout": PATIENCE_S, **fields}


async def create(served: Served, said: Any, **fields: Any) -> Any:
    """Return the SDK's object for the answer: a response, or a stream of events."""
    post: Any = served.client.responses.create  # its overloads do not take fields that are put together
    return await post(**build_fields(said, **fields))


async def chat(served: Served, said: str, **fields: Any) -> Any:
    """Ask chat completions the question, and return the SDK's object for the answer."""
    post: Any = served.client.chat.completions.create
    messages = [{"role": "user", "content": said}]
    return await post(model=MODEL, messages=messages, temperature=0, timeout=PATIENCE_S, **fields)


async def answer(served: Served, said: Any, **fields: Any) -> Response:
    """Return the response, once it was read from the store as it was sent, with what the request included."""
    response: Response = await create(served, said, **fields)
    stored = await served.client.responses.retrieve(response.id, include=fields.get("include", []))
    assert stored.model_dump() == response.model_dump()
    return response


async def streamed(served: Served, said: Any, **fields: Any) -> tuple[Response, list[Any]]:
    """The response as the SDK puts it together of the events, and the events."""
    async with served.client.responses.stream(**build_fields(said, **fields)) as stream:
        events: list[Any] = [event async for event in stream]
        if events[-1].type == "response.completed":
            return await stream.get_final_response(), events
        return events[-1].response, events


def deltas(events: list[Any], of: str) -> str:
    """All that the events of one kind added, as one text."""
    return "".join(event.delta for event in events if event.type == f"response.{of}.delta")


async def requests_running(url: str) -> int:
    """How many requests vLLM says it works on."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as metrics:
        lines = (await metrics.text()).splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("vllm:num_requests_running{"))
