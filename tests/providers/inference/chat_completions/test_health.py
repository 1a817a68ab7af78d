"""The watch over the servers: what it logs, how soon it lets requests through, and what it knows of models."""

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import Any

import pytest

from apis.errors import ModelNotFound, StackError, UpstreamError
from apis.inference import CALL_ATTEMPTS, CallAttempts
from apis.telemetry import REQUEST_ID
from providers.inference.vllm import VLLM
from tests.conformance.inference import drain
from tests.providers.inference.remote import LIMITS, chat_request, started
from tests.support.servers.ports import free_port
from tests.support.servers.upstream_server import (
    Answer,
    UpstreamServer,
    error_answer,
    json_answer,
    plain_answer,
    stream,
    text_chunks,
)
from tests.support.waiting import until

OK = stream(text_chunks("a"))
WATCHED: dict[str, Any] = {"health_interval_s": 0.05, "max_retries": 0, "breaker_failures": 2, "breaker_window_s": 60}


async def fail_until_open(vllm: VLLM) -> StackError:
    """The error of the open breaker."""
    for _ in range(2):
        with pytest.raises(UpstreamError):
            await drain(vllm, chat_request())
    with pytest.raises(UpstreamError) as caught:
        await drain(vllm, chat_request())
    return caught.value


async def test_a_single_server_that_is_back_is_used_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """A breaker closes as soon as the server answers a check, and the change is logged once each way."""
    caplog.set_level(logging.INFO)
    port = free_port()
    async with started(f"http://127.0.0.1:{port}/v1", **WATCHED) as vllm:
        await until(lambda: "does not answer yet" in caplog.text)
        assert f"http://127.0.0.1:{port}/v1" in caplog.text
        error = await fail_until_open(vllm)
        assert error.message.startswith("The inference server failed too often")
        assert error.retry_after_s is not None
        assert 1 <= error.retry_after_s <= 60
        server = await asyncio.start_server(UpstreamServer(OK)._serve, "127.0.0.1", port)  # pyright: ignore[reportPrivateUsage]  # on a port of the test's
        await until(lambda: "serves fake-model (4096 tokens of context)" in caplog.text)
        await asyncio.gather(*(drain(vllm, chat_request()) for _ in range(10)))
        server.close()
    assert caplog.text.count("does not answer yet") == 1


async def test_a_server_that_answers_checks_is_not_refused_by_its_breaker() -> None:
    """For a single server an open breaker only lengthens an outage."""
    async with UpstreamServer(error_answer(500)) as upstream, started(upstream.base_url, **WATCHED) as vllm:
        await fail_until_open(vllm)
        upstream.then(OK)
        upstream.then(OK)
        async with asyncio.timeout(5):
            while True:
                try:
                    await drain(vllm, chat_request())
                    break
                except UpstreamError:
                    await asyncio.sleep(0.01)


async def test_replicas_that_are_back_take_all_requests() -> None:
    """No probe holds up the others."""
    async with AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(UpstreamServer(error_answer(503))) for _ in range(2)]
        healthy = [replica.routes["/v1/models"] for replica in replicas]
        for replica in replicas:
            replica.routes["/v1/models"] = error_answer(503)
        vllm = await stack.enter_async_context(started([replica.base_url for replica in replicas], **WATCHED))
        for _ in range(6):
            with pytest.raises(UpstreamError):
                await drain(vllm, chat_request())
        for replica, models in zip(replicas, healthy, strict=True):
            replica.then(OK)
            replica.routes["/v1/models"] = models
            count = len(replica.received)
            async with asyncio.timeout(5):
                await replica.until_received(count + 1)
        await asyncio.sleep(0.1)
        for replica in replicas:
            replica.then(OK)
        results = await asyncio.gather(*(drain(vllm, chat_request()) for _ in range(20)), return_exceptions=True)
        assert sum(isinstance(result, BaseException) for result in results) <= 2  # an answer 503 each was left


async def test_a_server_without_failures_is_checked_once() -> None:
    """The check at the start is the only request of a single server that is well."""
    async with UpstreamServer(OK) as upstream, started(upstream.base_url, **WATCHED) as vllm:
        await upstream.until_received(1)
        await asyncio.sleep(0.2)
        await drain(vllm, chat_request())
        assert [request.path for request in upstream.received] == ["/v1/models", "/v1/chat/completions"]


async def test_a_base_url_without_v1_is_hinted_at(caplog: pytest.LogCaptureFixture) -> None:
    """The log and the error of `models` say what is probably wrong."""
    async with UpstreamServer(OK) as upstream, started(upstream.base_url.removesuffix("/v1"), **WATCHED) as vllm:
        await until(lambda: "does not list its models" in caplog.text)
        assert "ends with /v1" in caplog.text
        with pytest.raises(UpstreamError, match="ends with /v1") as caught:
            await vllm.models()
        assert upstream.base_url.removesuffix("/v1") in "".join(caught.value.__notes__)


@pytest.mark.parametrize(("answer", "words"), [(error_answer(500, "CUDA out of memory"), "CUDA out of memory")])
async def test_a_failing_server_leaves_a_trace(answer: Answer, words: str, caplog: pytest.LogCaptureFixture) -> None:
    """A warning with the replica's URL, the request's id and the server's own words, which no client sees."""
    token = REQUEST_ID.set("req_77")
    async with UpstreamServer(answer) as upstream, started(upstream.base_url, max_retries=1) as vllm:
        with pytest.raises(UpstreamError) as caught:
            await drain(vllm, chat_request())
        REQUEST_ID.reset(token)
        lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert [line.split(" at ")[0] for line in lines] == ["request req_77 is tried again", "request req_77 failed"]
        assert all(upstream.base_url in line and words in line for line in lines)
        assert words not in caught.value.message
        assert caught.value.retry_after_s == 1


async def test_a_call_whose_attempt_is_repeated_says_so() -> None:
    """A caller that waits for the first output sees that an attempt failed, and that one was accepted."""
    attempts = CallAttempts()
    token = CALL_ATTEMPTS.set(attempts)
    async with UpstreamServer(error_answer(500), OK) as upstream, started(upstream.base_url) as vllm:
        await drain(vllm, chat_request())
    CALL_ATTEMPTS.reset(token)
    assert attempts.has_failed
    assert attempts.is_accepted


# --- models ----------------------------------------------------------------------------------------------------------

LISTING = {**LIMITS, "lists_all_models": True}


async def test_an_unknown_model_is_not_passed_on() -> None:
    """An upstream that ignores names would answer as that model."""
    async with UpstreamServer(OK) as upstream, started(upstream.base_url, lists_all_models=True) as vllm:
        with pytest.raises(ModelNotFound):
            await drain(vllm, chat_request(model="gpt-5"))
        await drain(vllm, chat_request())
        await drain(vllm, chat_request())
        with pytest.raises(ModelNotFound):
            await drain(vllm, chat_request(model="gpt-6"))
        assert [request.method for request in upstream.received] == ["GET", "POST", "POST"]


@pytest.mark.parametrize(
    ("listing", "model"),
    [
        (error_answer(404), "any"),
        (error_answer(500), "any"),
        (json_answer({"data": []}), "any"),
        (plain_answer(b"<html>"), "any"),
        (json_answer({"data": [{"id": "llama3.2:latest"}]}), "llama3.2"),
    ],
)
async def test_a_list_that_cannot_be_read_forbids_nothing(listing: Answer, model: str) -> None:
    """Servers without a list serve any model, and Ollama's default tag may be left out."""
    async with UpstreamServer(OK) as upstream, started(upstream.base_url, lists_all_models=True) as vllm:
        upstream.routes["/v1/models"] = listing
        for _ in range(2):
            await drain(vllm, chat_request(model=model))
        assert len(upstream.received) == 3
