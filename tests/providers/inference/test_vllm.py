"""VLLM against a real server: how it asks, and what it makes of every way in which an answer can be wrong."""

import asyncio
import gzip
import json
import os
import socket
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any
from unittest import mock

import pytest
from pydantic import ValidationError

from apis.deltas import Finish, TextDelta, Usage
from apis.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    ModelNotFound,
    PayloadTooLarge,
    RateLimited,
    StackError,
    Unsupported,
    UpstreamError,
    UpstreamTimeout,
)
from apis.inference import Model
from providers.inference.vllm import VLLM
from tests.conformance.inference import LAWS, Law, Subject, drain
from tests.providers.inference.remote import ROLE, chat_request, failure, sent, started
from tests.support.servers.upstream_server import (
    CUT,
    DONE,
    HANG,
    LAST_HTTP_CHUNK,
    Act,
    Answer,
    Repeat,
    UpstreamServer,
    call_chunks,
    delta_chunk,
    error_answer,
    event,
    head,
    http_chunk,
    json_answer,
    plain_answer,
    stream,
    text_chunks,
)

OK = stream(text_chunks("Hel", "lo"))
OK_DELTAS = [TextDelta("Hel"), TextDelta("lo"), Finish("stop", Usage(11, 7))]
PING = Repeat(http_chunk(b": ping\n\n"), pause_s=0.01)


# --- the interface ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
async def test_vllm_conforms(law: Law) -> None:
    text = OK
    answers: list[Answer] = [text]
    if "left" in law.__name__ or "cancelled" in law.__name__:
        answers = [[head(), http_chunk(event(delta_chunk(content="a"))), HANG], text]
    if "call" in law.__name__ and "unknown" not in law.__name__ and "cancelled" not in law.__name__:
        answers = [stream(call_chunks("f", "{}"))]
    if "unknown" in law.__name__:
        answers = [error_answer(404, "The model `x` does not exist.", param="model")]
    async with UpstreamServer(*answers) as upstream, started(upstream.base_url) as vllm:
        tool = {"type": "function", "function": {"name": "f"}}
        subject = Subject(
            vllm, chat_request(), chat_request(), chat_request(tools=[tool]), chat_request(model="x"), upstream.left
        )
        await law(subject)


async def test_a_chat_is_one_request_and_connections_are_used_again() -> None:
    async with UpstreamServer(OK) as upstream, started(upstream.base_url, api_key="sk-1") as vllm:
        assert await drain(vllm, chat_request(temperature=0.5)) == OK_DELTAS
        assert await drain(vllm, chat_request()) == OK_DELTAS
        assert upstream.connections == 1
        first = upstream.received[0]
        assert (first.method, first.path) == ("POST", "/v1/chat/completions")
        assert first.headers["authorization"] == "Bearer sk-1"
        assert first.headers["accept-encoding"] == "identity"
        assert first.json["temperature"] == 0.5


async def test_data_of_one_read_is_one_batch() -> None:
    body = b"".join(event(chunk) for chunk in text_chunks("a", "b")) + DONE
    async with (
        UpstreamServer([head() + http_chunk(body) + LAST_HTTP_CHUNK]) as upstream,
        started(upstream.base_url) as vllm,
    ):
        steps = [step async for step in vllm.chat(chat_request())]
    assert steps == [[TextDelta("a"), TextDelta("b"), Finish("stop", Usage(11, 7))]]


async def test_a_large_request_is_sent_whole() -> None:
    text = "é" * 3_000_000
    async with UpstreamServer(OK) as upstream, started(upstream.base_url) as vllm:
        await drain(vllm, chat_request(messages=[{"role": "user", "content": text}]))
        assert upstream.chats[0].json["messages"][0]["content"] == text


@pytest.mark.parametrize("key", ["", None])
async def test_without_a_key_none_is_sent(key: str | None) -> None:
    async with UpstreamServer(OK) as upstream, started(upstream.base_url, api_key=key) as vllm:
        await drain(vllm, chat_request())
        assert "authorization" not in upstream.received[0].headers


async def test_models_have_their_context_and_are_cached_briefly() -> None:
    fields: dict[str, Any] = {"models_cache_s": 60, "modalities": ["image"]}
    async with UpstreamServer() as upstream, started(upstream.base_url, **fields) as vllm:
        expected = [
            Model(
                "fake-model",
                "vllm",
                1,
                4096,
                frozenset({"image"}),
                caches_prefixes=True,
                shows_all_reasoning=False,
            )
        ]
        assert await vllm.models() == expected
        assert await vllm.models() == expected
        assert len(upstream.received) == 1


@pytest.mark.parametrize(
    "answer",
    [
        plain_answer(b"<html>"),
        plain_answer(b'{"data":5}'),
        plain_answer(b'{"data":' + b"[" * 100_000),
        plain_answer(b'{"data":[{"id":"m","created":1e999}]}'),
        error_answer(401),
        error_answer(404),
        [CUT],
        [head(200, "application/json"), http_chunk(b'{"data":['), CUT],
        [head(200, "application/json"), Repeat(http_chunk(b" " * 65536))],
    ],
)
async def test_models_that_cannot_be_read_are_an_upstreams_error(answer: Answer) -> None:
    async with UpstreamServer() as upstream, started(upstream.base_url) as vllm:
        upstream.routes["/v1/models"] = answer
        with pytest.raises(UpstreamError):
            await vllm.models()


async def test_tokens_are_counted_by_the_server_where_it_can() -> None:
    async with UpstreamServer() as upstream:
        async with started(upstream.base_url) as vllm:
            assert await vllm.count_tokens(chat_request()) == 5
            assert upstream.received[0].json == {"model": "fake-model", "messages": [{"role": "user", "content": "hi"}]}
            del upstream.routes["/tokenize"]
            with pytest.raises(Unsupported):
                await vllm.count_tokens(chat_request())
            upstream.routes["/tokenize"] = error_answer(404, "The model `x` does not exist.")
            with pytest.raises(ModelNotFound):
                await vllm.count_tokens(chat_request())
        async with started(upstream.base_url, engine="openai") as vllm:
            with pytest.raises(Unsupported):
                await vllm.count_tokens(chat_request())


@pytest.mark.parametrize("url", ["", [], "localhost:8000", "ftp://x", "http://", "http://u:p@x/v1", "http://x/v1?k=1"])
def test_a_base_url_that_is_none_is_refused(url: Any) -> None:
    with pytest.raises(ValidationError):
        VLLM.Config(base_url=url)


@pytest.mark.parametrize("key", ["sk-1\n", "sk-1\r\nX: y", "\0"])
def test_a_key_that_no_header_can_hold_is_refused(key: str) -> None:
    with pytest.raises(ValidationError, match="api_key"):
        VLLM.Config.model_validate({"api_key": key})


async def test_closing_is_safe_at_any_time() -> None:
    vllm = VLLM(VLLM.Config())
    await vllm.close()
    await vllm.start()
    await vllm.close()
    await vllm.close()


async def test_proxies_of_the_environment_are_not_used_with_proxy_none() -> None:
    async with UpstreamServer(OK) as upstream, UpstreamServer(OK) as proxy:
        with mock.patch.dict(os.environ, {"http_proxy": proxy.base_url, "HTTP_PROXY": proxy.base_url}):
            async with started(upstream.base_url, proxy="none") as vllm:
                assert await drain(vllm, chat_request()) == OK_DELTAS
        assert proxy.connections == 0


async def test_after_done_nothing_is_waited_for() -> None:
    async with UpstreamServer([*OK[:-1], HANG]) as upstream, started(upstream.base_url) as vllm:
        async with asyncio.timeout(2):
            assert await drain(vllm, chat_request()) == OK_DELTAS
            await upstream.left.wait()


# --- answers that are no stream --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (json_answer({"choices": []}), UpstreamError),
        (plain_answer(b"<html>", 200, {"content-type": "text/html"}), UpstreamError),
        (plain_answer(b"", 200), UpstreamError),
        ([b"HTTP/1.1 204 X\r\n\r\n"], UpstreamError),
        (plain_answer(DONE, 206, {"content-type": "text/event-stream"}), UpstreamError),
        (plain_answer(b"", 302, {"location": "http://127.0.0.1:9/"}), UpstreamError),
        (error_answer(401, "key sk-secret"), UpstreamError),
        (error_answer(403), UpstreamError),
        (json_answer({"detail": "Not Found"}, 404), UpstreamError),
        (error_answer(404, "The model `x` does not exist."), ModelNotFound),
        (error_answer(400, "temperature is off"), InvalidRequest),
        (error_answer(422, "temperature is off"), InvalidRequest),
        (plain_answer(b"<html>no</html>", 400), UpstreamError),
        (error_answer(400, "This model's maximum context length is 4096 tokens."), ContextLengthExceeded),
        (json_answer({"object": "error", "message": "old form", "code": 400}, 400), InvalidRequest),
        (error_answer(429), RateLimited),
        (error_answer(500, "Traceback sk-secret"), UpstreamError),
        (error_answer(503), UpstreamError),
        (error_answer(529), UpstreamError),
        ([b"nonsense\r\n\r\n", CUT], UpstreamError),
        ([b"HTTP/1.1 200 OK\r\n" + b"x: " + b"y" * 100_000 + b"\r\n\r\n", CUT], UpstreamError),
    ],
)
async def test_an_answer_that_is_no_stream_is_mapped(answer: Answer, kind: type[StackError]) -> None:
    error, deltas = await failure(answer, api_key="sk-secret")
    assert isinstance(error, kind)
    assert kind is UpstreamError or type(error) is kind
    assert error.status != 401
    assert "secret" not in error.message
    assert deltas == []


async def test_reasons_to_refuse_a_request_are_shown_without_what_is_the_operators() -> None:
    """An upstream's 400 is mapped: a short reason without keys, addresses, paths and tracebacks."""
    private = "sk-secret http://10.0.0.7:8000/v1 /opt/models/secret.gguf " + "a1" * 30
    reason = f"top_k is off\x00 for {private} " + "words " * 900
    error, _ = await failure(error_answer(400, reason), api_key="sk-secret")
    refused = "The inference server refused the request: "
    assert error.message.startswith(f"{refused}top_k is off for [key] [...] [...] [...] words words")
    assert len(error.message) <= len(refused) + 400
    error, _ = await failure(error_answer(422, "Traceback (most recent call last): File secret"))
    assert "secret" not in error.message


async def test_a_request_that_is_too_large_for_the_upstream_says_so() -> None:
    """413 is mapped, with or without a body."""
    for body in (error_answer(413, "secret"), plain_answer(b"<html>secret", 413)):
        error, _ = await failure(body)
        assert (type(error), error.status) == (PayloadTooLarge, 413)
        assert "secret" not in error.message


@pytest.mark.parametrize("body", [b"", b"{}", b'{"error":{"message":"unknown"}}', b"not found"])
async def test_a_404_without_a_known_body_is_an_unknown_model(body: bytes) -> None:
    """Only the body of an unknown path is an error of the config."""
    error, _ = await failure(plain_answer(body, 404))
    assert type(error) is ModelNotFound
    for unknown_path in (b'{"detail":"Not Found"}', b"404 page not found", b"<html>404</html>"):
        error, _ = await failure(plain_answer(unknown_path, 404))
        assert type(error) is UpstreamError
        assert "ends with /v1" in error.message


@pytest.mark.parametrize(
    ("header", "at_least", "at_most"),
    [("0", 0, 0), ("7", 7, 7), ("1000000000", 3600, 3600), ("-5", 0, 0)],
)
async def test_a_rate_limit_has_its_retry_after(header: str, at_least: float, at_most: float) -> None:
    error, _ = await failure(error_answer(429, headers={"retry-after": header}))
    assert error.retry_after_s is not None
    assert at_least <= error.retry_after_s <= at_most


async def test_a_rate_limit_may_name_a_date() -> None:
    later = format_datetime(datetime.now(UTC) + timedelta(minutes=30), usegmt=True)
    error, _ = await failure(error_answer(429, headers={"retry-after": later}))
    assert error.retry_after_s is not None
    assert 60 <= error.retry_after_s <= 1800


@pytest.mark.parametrize("header", ["soon", "nan", ""])
async def test_a_wrong_retry_after_is_none(header: str) -> None:
    error, _ = await failure(error_answer(429, headers={"retry-after": header}))
    assert error.retry_after_s is None


async def test_a_redirect_gets_neither_the_request_nor_the_key() -> None:
    async with UpstreamServer(OK) as elsewhere:
        for status in (301, 302, 303, 307, 308):
            location = {"location": f"{elsewhere.base_url}/chat/completions"}
            error, _ = await failure(plain_answer(b"", status, location), api_key="sk-secret")
            assert type(error) is UpstreamError
        assert elsewhere.connections == 0


@pytest.mark.parametrize("wait", [HANG, LAST_HTTP_CHUNK])
async def test_a_compressed_stream_that_grows_without_end_is_read_up_to_a_bound(wait: Act) -> None:
    bomb = gzip.compress(b"\0" * 40_000_000)
    error, _ = await failure([head(headers={"content-encoding": "gzip"}), http_chunk(bomb), wait])
    assert "larger than allowed" in error.message


@pytest.mark.parametrize("encoding", ["br", "gzip, gzip", "x\xe9"])
async def test_an_encoding_that_is_not_decompressed_is_refused_unread(encoding: str) -> None:
    error, _ = await failure([head(headers={"content-encoding": encoding}), http_chunk(b"abc"), HANG])
    assert type(error) is UpstreamError
    assert "compressed as" in error.message


async def test_the_reason_of_a_refusal_is_read_though_it_is_compressed() -> None:
    body = json.dumps({"error": {"message": "The model `x` does not exist.", "param": "model"}}).encode()
    error, _ = await failure(plain_answer(gzip.compress(body), 404, {"content-encoding": "gzip"}))
    assert isinstance(error, ModelNotFound)


async def test_a_body_that_is_not_in_its_encoding_is_a_failure() -> None:
    error, _ = await failure(plain_answer(b"data: {}\n\n", 200, {"content-encoding": "gzip"}))
    assert isinstance(error, UpstreamError)


async def test_an_endless_error_body_is_read_up_to_a_bound() -> None:
    error, _ = await failure([head(500, "application/json"), Repeat(http_chunk(b"x" * 65536))])
    assert error.message == "The inference server failed with HTTP status 500."


async def test_an_endless_line_is_read_up_to_a_bound() -> None:
    error, _ = await failure([head(), Repeat(http_chunk(b"x" * 65536))])
    assert "larger than allowed" in error.message


# --- time-outs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "limit", "seen_text"),
    [
        ([HANG], "headers_timeout_s", 0),
        ([head(), HANG], "first_token_timeout_s", 0),
        ([*sent(ROLE), PING], "first_token_timeout_s", 0),
        ([*sent(ROLE, delta_chunk(content="a")), HANG], "token_gap_timeout_s", 1),
        ([*sent(ROLE, delta_chunk(content="a")), PING], "token_gap_timeout_s", 1),
        ([head(500, "text/html"), HANG], "headers_timeout_s", 0),
    ],
)
async def test_waiting_has_a_limit_that_the_error_names(answer: Answer, limit: str, seen_text: int) -> None:
    async with asyncio.timeout(4):
        error, deltas = await failure(answer, **{limit: 0.15})
    assert type(error) is UpstreamTimeout
    assert f"{limit} (0.15 s)" in error.message
    assert len(deltas) == seen_text


async def test_connecting_has_a_limit() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        queue = [socket.socket() for _ in range(4)]
        try:
            for one in queue:
                one.setblocking(False)
                one.connect_ex(full.getsockname())
            url = f"http://127.0.0.1:{full.getsockname()[1]}/v1"
            async with started(url, connect_timeout_s=0.1, max_retries=0) as vllm:
                with pytest.raises(UpstreamTimeout, match="connect_timeout_s"):
                    await drain(vllm, chat_request())
        finally:
            for one in queue:
                one.close()
