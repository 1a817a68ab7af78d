"""`stack doctor`: what works on a running stack or on this machine, and the remedy for what does not."""

import asyncio
import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from apis.imports import install_command
from stack.cli import app
from stack.doctor.finding import Finding
from stack.doctor.machine_checks import check_machine
from stack.server_config import HttpServerConfig
from tests.support.models.described_model import DESCRIBED
from tests.support.sdk.answer_shapes import Script, call
from tests.support.servers.constant_server import answering
from tests.support.servers.serving import Served, scripted, serving

NAMES = [
    *("reachable", "key", "models", "stream", "tool call", "structured output", "websocket", "prefix cache"),
    "token count",
]
PARIS: Script = [{"text": "Paris."}]
TURNS: list[Script] = [
    PARIS,
    [call("get_weather", '{"city": "Paris"}')],
    [{"text": '{"capital": "Paris"}'}],
    PARIS,
    PARIS,
    [{"text": "Paris."}, {"finish": "stop", "usage": {"cached_tokens": 900}}],
]
KEYS: dict[str, Any] = {"api_keys": [{"key": "sk-right", "tenant": "one"}]}
CATALOG = b'{"models": [{"slug": "one", "context_window": 4096}]}'
Statuses = dict[str, str]


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["doctor", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


async def doctor(served: Served, *arguments: str) -> tuple[int, Statuses, dict[str, str]]:
    """The exit code, the statuses by check, and the messages by check."""
    return await asyncio.to_thread(read_document, f"{served.url}/v1", *arguments)


def read_document(*arguments: str) -> tuple[int, Statuses, dict[str, str]]:
    code, output, errors = invoke(*arguments, "--json")
    assert not errors
    document = json.loads(output)
    assert document["ok"] == (code == 0)
    checks = document["checks"]
    return code, {each["check"]: each["status"] for each in checks}, {each["check"]: each["message"] for each in checks}


async def test_a_stack_that_does_everything_is_well() -> None:
    async with serving({"provider": DESCRIBED, "model": "one", "turns": TURNS}) as served:
        code, statuses, messages = await doctor(served)
        assert (code, statuses) == (0, dict.fromkeys(NAMES, "ok")), messages
        assert "one (131072 tokens)" in messages["models"]
        assert messages["tool call"] == 'get_weather({"city": "Paris"})'
        assert messages["prefix cache"].startswith("900 of ")
        code, output, errors = await asyncio.to_thread(invoke, f"{served.url}/v1")
    assert (code, errors) == (0, "")
    assert [line.split("  ")[0] for line in output.splitlines()[:-1]] == ["ok"] * len(NAMES)
    assert output.splitlines()[-1] == "9 ok."


@pytest.mark.long
@pytest.mark.timeout(300, func_only=True)
async def test_a_stack_with_an_engine_of_its_own_is_well() -> None:
    """A model that is too small to call tools or to write JSON by itself does both under the engine's grammars."""
    engine = {"provider": "llama_cpp", "model": "smollm2-135m-instruct", "threads": 1, "context_tokens": 4096}
    async with serving({**engine, "parallel": 1}) as served:
        code, statuses, messages = await doctor(served)
    assert (code, statuses) == (0, dict.fromkeys(NAMES, "ok")), messages


async def test_what_a_model_cannot_do_is_named_with_its_remedy() -> None:
    """The scripted model repeats the question: it calls nothing, writes no JSON and caches nothing."""
    async with serving() as served:
        code, statuses, messages = await doctor(served)
    assert code == 1
    assert statuses == {
        **dict.fromkeys(NAMES, "ok"),
        "tool call": "failed",
        "structured output": "failed",
        "prefix cache": "warning",
    }
    assert "--enable-auto-tool-choice" in messages["tool call"]
    assert "Use an engine that enforces schemas" in messages["structured output"]
    assert "--enable-prefix-caching" in messages["prefix cache"]


async def test_a_model_that_fails_is_named_in_each_check() -> None:
    async with serving(scripted([{"fail": "the card is on fire"}])) as served:
        code, statuses, messages = await doctor(served)
    assert code == 1
    for name in ("stream", "tool call", "structured output", "websocket"):
        assert statuses[name] == "failed"
        assert "the card is on fire" in messages[name]


async def test_keys_and_names_are_checked_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(scripted(*TURNS), server=KEYS) as served:
        code, statuses, messages = await doctor(served)
        assert (code, statuses) == (1, {"reachable": "ok", "key": "failed", **dict.fromkeys(NAMES[2:], "skipped")})
        assert "export OPENAI_API_KEY=YOUR_KEY" in messages["key"]
        monkeypatch.setenv("MY_KEY", "sk-wrong")
        _, statuses, messages = await doctor(served, "--key", "MY_KEY")
        assert (statuses["key"], "refuses the key in MY_KEY" in messages["key"]) == ("failed", True)
        monkeypatch.setenv("MY_KEY", "sk-right")
        code, statuses, messages = await doctor(served, "--key", "MY_KEY", "--model", "two")
        assert (code, statuses["key"], statuses["models"]) == (1, "ok", "failed")
        assert "Choose with --model: scripted." in messages["models"]
        code, statuses, _ = await doctor(served, "--key", "MY_KEY")
        assert (code, statuses) == (0, dict.fromkeys(NAMES, "ok"))
    code, statuses, messages = await doctor(served)
    assert (code, statuses) == (1, {"reachable": "failed", **dict.fromkeys(NAMES[1:], "skipped")})
    assert "Start one: stack run local" in messages["reachable"]


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b"[]",
        b"<html>",
        b"\xff",
        b'{"status": "completed", "output": null}',
        b'{"status": "completed", "output": [{"type": "function_call", "name": 1, "arguments": 7}], "usage": null}',
    ],
)
def test_a_server_that_answers_anything_is_named(body: bytes) -> None:
    with answering(CATALOG, body) as url:
        code, statuses, messages = read_document(url)
    assert (code, [statuses[name] for name in NAMES[:3]]) == (1, ["ok"] * 3)
    assert "ok" not in [statuses[name] for name in NAMES[3:]], messages


def test_a_proxy_that_collects_the_stream_is_named() -> None:
    response: dict[str, Any] = {
        "id": "resp_1",
        "status": "completed",
        "output": [],
        "usage": {"input_tokens": 1, "output_tokens": 1},
    }
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": {**response, "status": "in_progress"}},
        {"type": "response.output_text.delta", "delta": "Paris."},
        {"type": "response.completed", "response": response},
    ]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events).encode()
    with answering(CATALOG, body, post_type="text/event-stream", post_delay_s=2.1) as url:
        _, statuses, messages = read_document(url)
    assert statuses["stream"] == "failed"
    assert "all events came at once" in messages["stream"]
    assert "proxy_buffering off" in messages["stream"]


def test_this_machine_is_checked_without_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, statuses, messages = read_document()
    assert list(statuses) == ["bubblewrap", "port", "store", "disk", "memory"]
    assert statuses["store"] == "ok"
    assert messages["store"].startswith(f"{tmp_path}: ")
    assert "stack run local --model" in messages["memory"]


def test_the_memory_is_that_of_the_named_model() -> None:
    models = {row["name"]: row for row in json.loads(CliRunner().invoke(app, ["models", "--json"]).stdout)["models"]}
    for name in ("smollm2-135m-instruct", "gpt-oss-120b"):
        code, statuses, messages = read_document("--model", name)
        assert statuses["memory"] == ("ok" if models[name]["fits"] else "failed")
        assert f"{name} needs {models[name]['memory_bytes'] / 1e9:.1f} GB" in messages["memory"]
    code, statuses, messages = read_document("--model", "gpt-9")
    assert (code, statuses["memory"]) == (1, "failed")
    assert "Choose one: smollm2-135m-instruct" in messages["memory"]


def test_a_machine_without_the_local_engine_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    install_command()  # reads how this project was installed, which no event loop may do in the tests
    _, statuses, messages = read_document()
    assert statuses["engine"] == "warning"
    assert not statuses.keys() & {"disk", "memory"}
    assert "pip install" in messages["engine"]


async def test_a_port_in_use_is_named_unless_a_stack_has_it() -> None:
    async def find_port(port: int) -> Finding:
        findings = [each async for each in check_machine(None, HttpServerConfig(port=port))]
        return next(each for each in findings if each.check == "port")

    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        finding = await find_port(port)
    assert finding.status == "failed"
    assert "--port" in finding.message
    async with serving(server=KEYS) as served:
        finding = await find_port(int(served.url.rpartition(":")[2]))
    assert (finding.status, f"stack doctor {served.url}/v1" in finding.message) == ("ok", True)
