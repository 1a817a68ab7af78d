"""A stack with something in every view of the page: responses of all ends, branches, runs, webhooks, files."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai.types.responses import Response

from tests.support.sdk.file_search_stack import filing, store_of
from tests.support.sdk.requests import create
from tests.support.servers.serving import Served
from tests.support.servers.webhook_receiver import receiving
from tests.support.waiting import until_ended

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "A city"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
    "output_schema": {
        "type": "object",
        "properties": {"celsius": {"type": "number"}, "sky": {"enum": ["clear", "cloudy"]}},
        "required": ["celsius", "sky"],
    },
    "strict": False,
}
ANSWER = """The **Loire** is the longest river of France, at 1,006 km.

| river | length |
|---|---|
| Loire | 1,006 km |
| Seine | 777 km |

```python
rivers = sorted(lengths, key=lengths.get)
```

1. It rises in the [Massif Central](https://example.com/massif).
2. It ends in the Atlantic.
"""
TURNS: list[list[dict[str, Any]]] = [
    [{"reasoning": "The user wants rivers. I know three."}, {"text": ANSWER}],
    [{"text": "A branch."}],
    [{"text": "Another branch."}],
    [{"call": "get_weather", "arguments": '{"city": "Paris", "days": 2}'}],
    [{"call": "python", "arguments": json.dumps({"code": "print(6 * 7)\nopen('/tmp/x.txt', 'w')"})}],
    [{"text": "It is 42."}],
    [{"text": "Cut"}, {"finish": "length"}],
    [{"text": "Half of it"}, {"fail": "The model broke: a tensor had the wrong shape."}],
    [{"text": "A turn of a conversation."}],
    [{"text": "Runs. "}, {"wait_s": 600}],
]


@dataclass
class Seeded:
    served: Served
    views: dict[str, str]
    """The hash of each view by its name."""


@asynccontextmanager
async def seeded(folder: Path) -> AsyncGenerator[Seeded]:
    python = {"provider": "python", "timeout_s": 5}
    async with receiving() as receiver:
        receiver.answer = iter([503, *[200] * 100]).__next__
        responses, webhooks = {"background": {"poll_s": 0.05}}, {"receivers": [receiver.hook()]}
        async with filing(folder, *TURNS, tool_runtime=python, responses=responses, webhooks=webhooks) as served:
            yield Seeded(served, await _seed(served))


async def _seed(served: Served) -> dict[str, str]:
    client = served.client.with_options(max_retries=0)

    async def respond(text: str, **fields: Any) -> Any:
        response: Response = await create(served, input=text, **fields)
        return await until_ended(client.responses, response.id, within_s=20)

    root = await respond("Name three rivers of France, with a table.", background=True, metadata={"trip": "North"})
    branch = await respond("Go on.", previous_response_id=root.id)
    await respond("Go on differently.", previous_response_id=root.id)
    call = await respond("How warm is it?", tools=[WEATHER], previous_response_id=branch.id)
    code = await respond("Compute.", tools=[{"type": "code_interpreter", "container": {"type": "auto"}}])
    await respond("Long.", max_output_tokens=16)
    failed = await respond("Break.", background=True)
    conversation = await client.conversations.create(metadata={"topic": "Fjords"})
    await respond("In a conversation.", conversation=conversation.id)
    running = await client.responses.create(model="scripted", input="Run.", background=True)
    await client.files.create(file=("a-rather-long-name-of-a-report-of-the-year-2026.md", b"# R"), purpose="assistants")
    store, _ = await store_of(served)
    await client.vector_stores.update(store, name="Zoo")
    broken = await client.files.create(file=("broken.pdf", b"%PDF-1.7 is cut off"), purpose="assistants")
    await client.vector_stores.files.create_and_poll(broken.id, vector_store_id=store, poll_interval_ms=50)
    container = await client.containers.create(name="Lab")
    await client.containers.files.create(container.id, file=("table.csv", b"a,b\n1,2\n"))
    return {
        "playground": "playground",
        "playground of a response": f"playground?from={root.id}",
        "decisions": "playground/decisions",
        "responses": "responses",
        "response": f"responses/{root.id}",
        "response with a call": f"responses/{call.id}",
        "response with a program": f"responses/{code.id}",
        "failed response": f"responses/{failed.id}",
        "running response": f"responses/{running.id}",
        "tree": f"responses/{call.id}/tree",
        "trace": f"responses/{root.id}/trace",
        "webhooks": f"responses/{root.id}/webhooks",
        "missing response": "responses/resp_missing",
        "runs": "runs",
        "conversations": "conversations",
        "conversation": f"conversations/{conversation.id}",
        "files": "files",
        "vector stores": "files?tab=vector+stores",
        "vector store": f"files/{store}?q=sourdough+yeast",
        "containers": "files?tab=containers",
        "container": f"files/{container.id}",
        "traces": "traces",
        "figures": "figures",
    }
