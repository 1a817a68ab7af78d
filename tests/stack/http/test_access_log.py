"""The line that is logged of each request: what an operator needs, and nothing of what was said."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from apis.errors import UpstreamError
from stack.ask import ask as ask_command
from stack.serving.launch import build_try_line
from tests.stack.http.raw import Answer, ask, connection, request
from tests.support.servers.serving import Served, scripted, serving

KEYS: Any = [{"key": "sk-one", "tenant": "tenant-one"}]
ASKED: dict[str, Any] = {"model": "scripted", "input": "a-secret"}
ENDLESS: list[dict[str, Any]] = [{"text": "once "}, {"wait_s": 30}]


@pytest.fixture
async def locked() -> AsyncGenerator[Served]:
    async with serving(server={"api_keys": KEYS, "access_log": True}) as running:
        yield running


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    log_records = [record for record in caplog.records if record.name == "stack.access"]
    assert all(record.levelno == logging.INFO for record in log_records)
    caplog.clear()
    return [json.loads(record.getMessage()) for record in log_records]


async def with_key(served: Served, body: Any, *more: tuple[str, str], path: str = "/v1/responses") -> Answer:
    return await ask(served.url, body, path=path, headers=[("authorization", "Bearer sk-one"), *more])


async def test_a_request_is_one_line(locked: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "stack")
    answer = await with_key(locked, ASKED)
    (line,) = lines(caplog)
    assert 0 < line.pop("first_byte_ms") <= line.pop("ms")
    assert line == {
        "request": answer.headers["x-request-id"],
        "method": "POST",
        "route": "/v1/responses",
        "status": 200,
        "bytes": len(answer.body),
        "tenant": line["tenant"],
        "model": "scripted",
        "response": answer.json["id"],
        "outcome": "completed",
    }
    assert len(line["tenant"]) == 12
    assert "one" not in line["tenant"]


async def test_the_name_of_a_tenant_is_logged_where_the_run_config_wants_that(caplog: pytest.LogCaptureFixture) -> None:
    """A hash says nothing to an operator who has to find the tenant."""
    caplog.set_level(logging.INFO, "stack")
    server = {"api_keys": KEYS, "access_log": True, "access_log_tenants": "named"}
    async with serving(server=server) as served:
        await with_key(served, ASKED)
        (line,) = lines(caplog)
    assert line["tenant"] == "tenant-one"


async def test_a_first_request_has_a_key_where_the_server_needs_one() -> None:
    """The line that is printed at the start, and the error of the command without a key."""
    async with serving(server={"api_keys": KEYS}) as served:
        config = served.stack.config
        assert build_try_line(config, "URL") == "try it: OPENAI_API_KEY=YOUR_KEY stack ask --url URL/v1 'Say hello.'"
        with pytest.raises(UpstreamError, match="set OPENAI_API_KEY"):
            await asyncio.to_thread(ask_command, "hi", f"{served.url}/v1", None, print)
    async with serving() as served:
        assert build_try_line(served.stack.config, "URL") == "try it: stack ask --url URL/v1 'Say hello.'"


async def test_a_stream_is_one_line_too(locked: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "stack")
    answer = await with_key(locked, {**ASKED, "stream": True})
    (line,) = lines(caplog)
    assert line["first_byte_ms"] <= line["first_output_ms"] <= line["ms"]
    assert line["bytes"] == len(answer.body)
    assert (line["response"], line["outcome"]) == (json.loads(_last(answer))["response"]["id"], "completed")


def _last(answer: Answer) -> bytes:
    return answer.body.split(b"\n\n")[-3].partition(b"data: ")[2]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_logged_refusal_gives_its_reason_and_quotes_no_input(
    locked: Served, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "stack")
    wrong: list[tuple[dict[str, Any], int, str | None, str | None]] = [
        ({"input": 5}, 400, "invalid_type", "input"),
        ({"model": "a-secret-model"}, 404, "model_not_found", "model"),
        ({"metadata": {"a-secret-key": 5}}, 400, "invalid_type", "metadata"),
        ({"tools": [{"type": "function"}]}, 400, "missing_required_parameter", "tools[0]"),
        ({"input": [{"type": "a-secret-type"}]}, 400, "invalid_value", "input[0]"),
        ({"previous_response_id": "resp_a-secret"}, 400, "previous_response_not_found", "previous_response_id"),
    ]
    for fields, status, code, param in wrong:
        answer = await with_key(locked, {**ASKED, "stream": stream, **fields})
        assert "secret" not in caplog.text
        (line,) = lines(caplog)
        assert (answer.status, line["status"], line.get("error"), line.get("param")) == (status, status, code, param)
        assert not line.keys() & {"model", "response", "outcome"}


async def test_a_request_without_a_key_is_logged_without_a_tenant(
    locked: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "stack")
    await ask(locked.url, ASKED, path="/v1/a-secret?b=a-secret", headers=[("authorization", "Bearer a-secret")])
    assert "secret" not in caplog.text
    (line,) = lines(caplog)
    assert (line["route"], line["status"], line["error"]) == ("other", 401, "invalid_api_key")
    assert "tenant" not in line


@pytest.mark.parametrize("name", ["abc-123", "550e8400-e29b-41d4-a716-446655440000", "a:b/c+d=", "x" * 128])
async def test_the_clients_request_id_is_logged_with_ours(
    locked: Served, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "stack")
    answer = await with_key(locked, ASKED, ("X-Request-Id", name))
    (line,) = lines(caplog)
    assert line["client_request"] == name
    assert line["request"] == answer.headers["x-request-id"] != name


@pytest.mark.parametrize("name", ["", "x" * 129, "a b", 'a"b', "a\tb", "\xff", "a;b", "\x1b[31m"])
async def test_a_name_that_is_not_well_formed_is_left_out(
    locked: Served, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "stack")
    await with_key(locked, ASKED, ("X-Request-Id", name))
    assert all("client_request" not in line for line in lines(caplog))


async def test_a_client_that_leaves_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "stack")
    async with (
        serving(scripted(ENDLESS), server={"access_log": True}) as served,
        connection(served.url) as (reader, writer),
    ):
        writer.write(request(served.url, {**ASKED, "stream": True}))
        await reader.readuntil(b"output_text.delta")
        writer.close()
    (line,) = lines(caplog)
    assert (line["status"], line["outcome"], line["model"]) == (200, "cancelled", "scripted")
    assert line["response"].startswith("resp_")
    assert line["bytes"] > 0


async def test_probes_are_logged_only_when_they_fail(locked: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "stack")
    for path in ("/healthz", "/readyz"):
        await ask(locked.url, method="GET", path=path)
    assert not lines(caplog)
    await ask(locked.url, method="GET", path="/metrics")
    (line,) = lines(caplog)
    assert (line["route"], line["status"]) == ("/metrics", 401)


@pytest.mark.parametrize(("server", "level"), [({}, "INFO"), ({"access_log": True}, "WARNING")])
async def test_it_is_there_where_it_is_asked_for(
    server: dict[str, Any], level: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(level, "stack")
    async with serving(server=server) as served:
        await ask(served.url, ASKED)
    assert not lines(caplog)
