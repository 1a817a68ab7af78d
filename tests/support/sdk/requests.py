"""Asking a served stack through the SDK, and looking at what came of it.

The SDK's answers are typed as wide unions. Tests say by their assertions which member they expect, so here
they are Any.
"""

from collections.abc import Sequence
from typing import Any, cast

import aiohttp
import pytest
from openai import APIStatusError

from apis.chat import ChatRequest, Message
from providers.inference.scripted import Scripted
from tests.support.servers.serving import Served


def responses(served: Served) -> Any:
    """The SDK's `client.responses`."""
    return served.client.responses


async def create(served: Served, **fields: Any) -> Any:
    """A whole response; to `hi`, with the tools that the script calls, unless `fields` say otherwise.

    Lists reach the server as they are: the SDK would look at each item once for each type that items may have, which
    takes longer than most responses."""
    body: dict[str, Any] = {"model": "scripted", "input": "hi", **called(served), **fields}
    lists: dict[str, Any] = {name: body.pop(name) for name in ("input", "tools") if isinstance(body.get(name), list)}
    extra_body: dict[str, Any] = {**lists, **body.pop("extra_body", {})}
    return await responses(served).create(**body, extra_body=extra_body)


async def stream(served: Served, **fields: Any) -> list[Any]:
    """All events of a streamed response."""
    return [event async for event in await create(served, stream=True, **fields)]


def called(served: Served) -> dict[str, Any]:
    """The field `tools` with those that the script calls, if it calls any: no client is handed other calls."""
    lines: list[dict[str, Any]] = [line for turn in served.inference.get("turns", ()) for line in turn]
    calls = [call for line in lines for call in line.get("calls", [line]) if "call" in call]
    kinds = {call["call"]: "custom" if call.get("custom") else "function" for call in calls}
    return {"tools": [{"type": kind, "name": name} for name, kind in kinds.items()]} if kinds else {}


async def wire(served: Served, path: str = "/v1/responses", *, headers: Any = None, **fields: Any) -> bytes:
    """The bytes of a streamed answer."""
    body = {"model": "scripted", "stream": True, **fields}
    if "messages" not in fields:
        body = {"input": "hi", **called(served), **body}
    url = f"{served.url}{path}"
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as answer:
        assert answer.status == 200
        assert answer.content_type == "text/event-stream"
        return await answer.read()


async def refusal(served: Served, status: int = 400, **fields: Any) -> dict[str, Any]:
    """The error body that a request is refused with. Streamed or not, it is the same refusal."""
    bodies: list[dict[str, Any]] = []
    for streamed in (False, True):
        with pytest.raises(APIStatusError) as caught:
            await create(served, stream=streamed, **fields)
        assert caught.value.status_code == status, caught.value
        bodies.append(cast(dict[str, Any], caught.value.body))
    assert bodies[0] == bodies[1]
    assert set(bodies[0]) == {"message", "type", "param", "code"}
    return bodies[0]


def chat_requests(served: Served) -> Sequence[ChatRequest]:
    """Return the requests to the scripted model so far, oldest first."""
    return [*cast(Scripted, served.stack.inference).requests]


def messages(served: Served) -> list[dict[str, Any]]:
    """The messages of the newest chat, without what is unset."""
    return plain(chat_requests(served)[-1].messages)


def plain(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as JSON, without what is unset."""
    return [message.model_dump(exclude_none=True) for message in messages]


def bare(item: Any) -> dict[str, Any]:
    """A model of the SDK as plain JSON, without what only the SDK's helpers add."""
    added = ("parsed", "parsed_arguments", "async")  # the SDK's accumulated items have both the last and `async_`
    return cast(dict[str, Any], _without(item.model_dump(mode="json", warnings=False), added))


def _without(value: Any, keys: Sequence[str]) -> Any:
    if isinstance(value, dict):
        fields = cast(dict[str, Any], value)
        return {key: _without(each, keys) for key, each in fields.items() if key not in keys}
    return [_without(each, keys) for each in cast(list[Any], value)] if isinstance(value, list) else value
