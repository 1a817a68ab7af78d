"""An operator can follow a client of the SDK: its request is in the log, its work in the figures."""

import asyncio
import json
import logging
from typing import Any

import pytest
from openai import NotFoundError

from tests.stack.http.raw import ask
from tests.support.models.harmony_conversations import MODEL
from tests.support.models.tiny_gpt_oss import tiny_gpt_oss_folder
from tests.support.servers.serving import serving


async def test_the_request_id_that_the_sdk_shows_is_the_one_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "stack.access")
    async with serving(server={"access_log": True}) as served:
        response = await served.client.responses.create(model="scripted", input="hi")
        with pytest.raises(NotFoundError) as caught:
            await served.client.responses.create(model="nobody", input="hi")
    created, refused = [json.loads(record.getMessage()) for record in caplog.records]
    request_id = response._request_id  # pyright: ignore[reportPrivateUsage]  # the SDK documents it under this name
    assert (created["request"], created["response"]) == (request_id, response.id)
    assert (refused["request"], refused["error"]) == (caught.value.request_id, "model_not_found")


@pytest.mark.timeout(400, func_only=True)
async def test_the_local_engines_metrics_are_exported() -> None:
    folder = await asyncio.to_thread(tiny_gpt_oss_folder)
    options: dict[str, Any] = {"model": MODEL, "dtype": "float32", "threads": 1, "kv_memory_gib": 0.1}
    async with serving({"provider": "gpt_oss", "path": str(folder), "context_tokens": 4096, **options}) as served:
        response = await served.client.responses.create(model=MODEL, input="hi", max_output_tokens=16)
        metrics_lines = (await ask(served.url, method="GET", path="/metrics", kind=None)).body.decode().splitlines()
    assert response.usage is not None
    tokens = response.usage.output_tokens
    assert 0 < tokens <= 16
    assert 'stack_inference_running{provider="inference"} 0.0' in metrics_lines
    assert f'stack_inference_generated_tokens{{provider="inference"}} {tokens}.0' in metrics_lines
    assert f'stack_tokens_total{{kind="output",model="{MODEL}"}} {tokens}.0' in metrics_lines
    assert f'stack_responses_total{{status="{response.status}"}} 1.0' in metrics_lines
