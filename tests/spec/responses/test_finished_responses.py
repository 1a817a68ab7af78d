"""`server.finish_stored_responses`: a stored response goes on to its end although its client has disconnected."""

import asyncio
import json
import socket
import struct
from typing import Any, cast

import pytest
from openai import AsyncOpenAI

from tests.stack.http.raw import connection, request
from tests.support.servers.held_model import Held
from tests.support.servers.serving import Served, serving
from tests.support.waiting import until

TEXT = "hold " + "and go on " * 200
MODEL: Any = {"provider": "tests.support.servers.held_model:Held"}


async def leave(served: Served, **fields: Any) -> Held:
    """Send a request and disconnect while the model works on it."""
    model = cast(Held, served.stack.inference)
    body = json.dumps({"model": "scripted", "input": TEXT, **fields}).encode()
    async with connection(served.url) as (_, writer):
        writer.write(request(served.url, body))
        await until(lambda: model.held_count)
        # a reset: a connection that is only half closed is served
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    await asyncio.sleep(0.3)  # the server notices it
    model.released.set()
    return model


async def wait_for_end(client: AsyncOpenAI) -> Any:
    """Return the newest response once it has ended."""
    responses: Any = client.responses
    async with asyncio.timeout(10):
        while True:
            page = await client.get("/responses", cast_to=cast(Any, dict[str, Any]))
            if page["data"]:
                return await responses.retrieve(page["data"][0]["id"])
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("is_streamed", [True, False], ids=["streamed", "whole"])
async def test_a_stored_response_goes_on_where_the_setting_says_so(is_streamed: bool) -> None:
    """To its end, where GET finds it."""
    async with serving(MODEL, server={"finish_stored_responses": True}) as served:
        await leave(served, stream=is_streamed)
        response = await wait_for_end(served.client)
        assert (response.status, response.output_text.strip()) == ("completed", TEXT.strip())
        assert served.app.state.services.monitor.open_streams == 0


@pytest.mark.parametrize(("finishes", "stored"), [(False, True), (True, False)], ids=["by default", "not stored"])
async def test_others_are_cancelled(finishes: bool, stored: bool) -> None:
    """Also one that is not stored, whose answer could not be read."""
    async with serving(MODEL, server={"finish_stored_responses": finishes}) as served:
        await leave(served, store=stored, stream=True)
        await until(lambda: not served.app.state.services.monitor.open_streams)
        assert not served.stack.inference.requests  # type: ignore[attr-defined]  # the model of these tests
