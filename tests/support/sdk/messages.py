"""The official SDK of Anthropic's Messages API, and requests of it, for tests."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from anthropic import AsyncAnthropic, DefaultAsyncHttpxClient

from apis.errors import StackError
from tests.support.sdk.client import TLS
from tests.support.servers.serving import Served

ADD: Any = {
    "name": "add",
    "description": "Add numbers.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}
HI: list[Any] = [{"role": "user", "content": "hi there"}]


@asynccontextmanager
async def messages_client(served: Served, key: str = "none", **options: Any) -> AsyncGenerator[AsyncAnthropic]:
    """A client of a served stack, which does not try again by itself."""
    http_client = DefaultAsyncHttpxClient(verify=TLS)
    fields: dict[str, Any] = {"api_key": key, "max_retries": 0, **options}
    async with AsyncAnthropic(base_url=served.url, http_client=http_client, **fields) as client:
        yield client


async def create(client: AsyncAnthropic, messages: list[Any] | None = None, **fields: Any) -> Any:
    """Create a message that is not streamed."""
    request: dict[str, Any] = {"model": "scripted", "max_tokens": 100, "messages": messages or HI, **fields}
    extra = {name: request.pop(name) for name in ("temperature", "top_k", "unknown") if name in request}
    create_message: Any = client.messages.create
    return await create_message(**request, extra_body=extra)


async def stream(client: AsyncAnthropic, messages: list[Any] | None = None, **fields: Any) -> Any:
    """Return the final message of a stream."""
    request: dict[str, Any] = {"model": "scripted", "max_tokens": 100, "messages": messages or HI, **fields}
    async with client.messages.stream(**request) as events:
        return await events.get_final_message()


def replay(answer: Any) -> dict[str, Any]:
    """Return an answer as a turn of what follows."""
    return {"role": "assistant", "content": [block.model_dump(mode="json") for block in answer.content]}


def fail_with(served: Served, error: StackError) -> None:
    """Let the scripted model of a served stack fail with this error."""

    async def chat(_request: Any) -> AsyncGenerator[Any]:
        raise error
        yield

    inference: Any = served.stack.inference
    inference.chat = chat
