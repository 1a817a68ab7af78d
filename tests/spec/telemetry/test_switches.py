"""The variables of the environment: nothing is loaded without them, and each does what OpenTelemetry says."""

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest
from openai import BadRequestError

from apis.errors import ConfigError
from stack.telemetry.conventions import MAX_SERIES
from stack.telemetry.setup import running_telemetry
from stack.telemetry.switches import read_switches
from tests.spec.telemetry.test_runs import DONE
from tests.spec.tools.test_web_search import TOOL, search, searching
from tests.support.laws.telemetry_laws import check_all
from tests.support.sdk.client import TLS
from tests.support.sdk.requests import create
from tests.support.servers.otlp_receiver import OtlpReceiver
from tests.support.servers.serving import scripted, serving

DROPPED = re.compile(r'stack_telemetry_dropped_total\{signal="traces"\} [1-9]')
ROOT = Path(__file__).parents[3]
CONTENT = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
MESSAGES: dict[str, Any] = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["role", "parts"],
        "properties": {
            "role": {"enum": ["system", "user", "assistant", "tool"]},
            "parts": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["type"],
                    "allOf": [
                        {
                            "if": {"properties": {"type": {"const": kind}}},
                            "then": {"required": required},
                        }
                        for kind, required in {
                            "text": ["content"],
                            "reasoning": ["content"],
                            "tool_call": ["name"],
                            "tool_call_response": ["response"],
                            "server_tool_call": ["name", "server_tool_call"],
                        }.items()
                    ],
                },
            },
        },
    },
}
"""The required fields of model/gen-ai/gen-ai-{input,output}-messages.json."""


def test_without_a_variable_nothing_is_imported_and_no_thread_runs() -> None:
    program = """
import asyncio, sys, threading
from stack.config import StackConfig
from stack.http.app import create_app
sections = {"inference": "scripted", "kv_store": "memory", "responses": "loop"}
app = create_app(StackConfig.model_validate({name: {"provider": value} for name, value in sections.items()}))
async def main():
    async with app.router.lifespan_context(app):
        print([name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))])
        print([name for name in sys.modules if name.startswith("stack.telemetry.") and name.rpartition(".")[2]
               not in ("setup", "switches")])
        print([thread.name for thread in threading.enumerate() if "Otel" in thread.name])
asyncio.run(main())
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["[]"] * 3


def test_the_command_line_imports_no_telemetry() -> None:
    program = "import sys, stack.cli; print([name for name in sys.modules if 'telemetry' in name])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("variables", "on"),
    [
        ({}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, "traces metrics logs"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "true"}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_METRICS_EXPORTER": "none"}, "traces logs"),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://x"}, "metrics"),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, "traces"),
        ({"OTEL_TRACES_EXPORTER": "console", "OTEL_LOGS_EXPORTER": "none"}, "traces"),
        ({"OTEL_SERVICE_NAME": "x", "OTEL_TRACES_SAMPLER": "always_on"}, ""),
    ],
)
def test_a_signal_is_exported_where_its_exporter_or_an_endpoint_is_named(variables: dict[str, str], on: str) -> None:
    switches = read_switches(variables)
    assert [name for name in ("traces", "metrics", "logs") if getattr(switches, name).exporter] == on.split()
    assert switches.is_on == bool(on)


@pytest.mark.parametrize(
    "variables",
    [
        {"OTEL_TRACES_EXPORTER": "zipkin"},
        {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"},
        {CONTENT: "ALL"},
    ],
)
def test_a_value_that_is_not_known_is_an_error_that_names_its_variable(variables: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=[*variables][-1]):
        read_switches(variables)


async def test_a_protocol_whose_package_is_missing_is_an_error_with_its_remedy(
    otlp: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(ConfigError, match="pip install opentelemetry-exporter-otlp-proto-grpc"):
        async with running_telemetry(lambda signal, count: None):
            pass
    assert otlp.request_count == 0


@pytest.mark.parametrize("mode", ["NO_CONTENT", "SPAN_ONLY", "EVENT_ONLY", "SPAN_AND_EVENT"])
async def test_content_is_sent_only_where_the_mode_says_so(
    otlp: OtlpReceiver, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv(CONTENT, mode)
    turns = [[{"reasoning": "hm"}, search("SECRET")], [{"text": "SECRET answer."}]]
    async with searching(*turns) as (served, _):
        await create(served, tools=[TOOL], input="SECRET question", instructions="SECRET rule")
    check_all(otlp, with_content=mode.startswith("SPAN"))
    assert ("SECRET" in repr(otlp.spans)) == mode.startswith("SPAN")
    details = [attributes for name, attributes, _ in otlp.events if name == "gen_ai.client.inference.operation.details"]
    assert len(details) == (2 if mode in ("EVENT_ONLY", "SPAN_AND_EVENT") else 0)
    for attributes in details:
        assert {"gen_ai.operation.name", "gen_ai.input.messages", "gen_ai.output.messages"} <= attributes.keys()
        assert isinstance(attributes["gen_ai.input.messages"], list)
    if mode.startswith("SPAN"):
        check_content(otlp)


async def test_output_that_was_blocked_is_in_no_span_and_no_event(
    otlp: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CONTENT, "SPAN_AND_EVENT")
    words = [f"{word} " for word in ("a clean beginning " * 5 + "then kill the SECRET gardener").split()]
    inference = {"provider": "tests.support.models.word_judge:WordJudge", "turns": [[{"text": words}]]}
    moderation = {"provider": "predicates", "model": "scripted", "window_chars": 40}
    policy = {"input": {"mode": "block"}, "output": {"mode": "block"}}
    async with serving(inference, more={"moderation": moderation}) as served:
        response = await create(served, input="Go.", moderation={"model": "scripted", "policy": policy})
        with pytest.raises(BadRequestError):
            await create(served, input="SECRET scum", moderation={"model": "scripted", "policy": policy})
    assert response.incomplete_details.reason == "content_filter"
    check_all(otlp, with_content=True)
    assert len(otlp.named("chat ")) == 1
    assert "beginning" in repr(otlp.spans), "of what the response shows"
    assert "SECRET" not in repr(otlp.spans)
    assert "SECRET" not in repr(otlp.events)


def check_content(otlp: OtlpReceiver) -> None:
    """Hold the content of spans against the schemas of messages."""
    for span in (*otlp.named("chat "), *otlp.named("invoke_agent")):
        for name in ("gen_ai.input.messages", "gen_ai.output.messages"):
            jsonschema_rs.validate(MESSAGES, json.loads(span.attributes[name]))
    first, second = otlp.named("chat ")
    roles = [message["role"] for message in json.loads(second.attributes["gen_ai.input.messages"])]
    assert roles == ["system", "user", "assistant", "tool"]
    (output,) = json.loads(first.attributes["gen_ai.output.messages"])
    assert [part["type"] for part in output["parts"]] == ["reasoning", "tool_call"]
    assert output["finish_reason"] == "tool_call"
    (tool,) = otlp.named("execute_tool")
    assert json.loads(tool.attributes["gen_ai.tool.call.arguments"]) == {"query": "SECRET"}
    assert "Title 1" in tool.attributes["gen_ai.tool.call.result"]


async def test_the_older_names_are_sent_by_the_variable(otlp: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SEMCONV_STABILITY_OPT_IN", "http,gen_ai/1.41")
    async with serving(scripted(DONE)) as served:
        await create(served, reasoning={"effort": "low"})
    names = {point.name for point in otlp.points.values()}
    assert {"gen_ai.client.operation.duration", "gen_ai.client.token.usage"} <= names
    assert not any(name.startswith("gen_ai.client.inference") for name in names)
    assert {point.attributes["gen_ai.token.type"] for point in otlp.metric("gen_ai.client.token.usage")} == {
        "input",
        "output",
    }
    assert otlp.named("invoke_agent")[0].attributes["gen_ai.provider.name"] == "responses_stack"
    assert "gen_ai.request.reasoning.level" not in otlp.named("chat ")[0].attributes


async def test_both_generations_are_sent_by_the_variable(otlp: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SEMCONV_STABILITY_OPT_IN", "gen_ai/dup")
    async with serving(scripted(DONE)) as served:
        await create(served)
    names = {point.name for point in otlp.points.values()}
    assert {"gen_ai.client.operation.duration", "gen_ai.client.inference.duration"} <= names


async def test_sampled_out_requests_send_no_spans_and_still_hand_their_trace_on(
    otlp: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    async with serving() as served:
        await create(served)
    assert otlp.spans == []
    assert otlp.metric("gen_ai.invoke_agent.duration")


@pytest.mark.parametrize("status", [503, None])
async def test_a_receiver_that_fails_costs_a_count_and_no_request(
    otlp: OtlpReceiver, monkeypatch: pytest.MonkeyPatch, status: int | None
) -> None:
    otlp.answer_status = status
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    async with serving(server={"metrics": "open"}) as served:
        await asyncio.gather(*(create(served) for _ in range(12)))
        async with httpx.AsyncClient(verify=TLS) as http:
            for _ in range(200):
                if DROPPED.search((await http.get(f"{served.url}/metrics")).text):
                    break
                await asyncio.sleep(0.05)
            else:
                raise AssertionError("nothing was counted")
        began = time.monotonic()
    assert time.monotonic() - began < 2
    assert otlp.spans == []


async def test_a_metric_has_a_bounded_number_of_series(otlp: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant that gives its agents a new name in each request fills no memory."""
    monkeypatch.setattr("stack.telemetry.recorder.MAX_SERIES", 4)
    assert MAX_SERIES > 100
    async with serving() as served:
        for number in range(8):
            await create(served, metadata={"agent_name": f"agent {number}"})
    points = otlp.metric("gen_ai.invoke_agent.duration")
    assert sum(point.count for point in points) == 8
    assert {point.attributes["gen_ai.agent.name"] for point in points} == {*(f"agent {n}" for n in range(4)), "_OTHER"}
