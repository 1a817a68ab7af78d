"""The distribution that watches a stack: its rules by promtool, and every query of its dashboard against a real
Prometheus that scrapes a real stack under load."""

import asyncio
import itertools
import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from openai import APIStatusError
from prometheus_client.parser import text_string_to_metric_families

from apis.provider import ProviderMetrics
from providers.inference.scripted import Scripted
from tests.stack.http.raw import ask
from tests.support.servers.prometheus_server import PROMTOOL, Prometheus, running_prometheus
from tests.support.servers.serving import Served, serving

FOLDER = Path(__file__).resolve().parents[2] / "distributions" / "observability"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "grafana/dashboards/responses-stack.json").read_text())
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((FOLDER / "rules.yaml").read_text())["groups"] for rule in group["rules"]
]
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
COLLECTOR: dict[str, Any] = yaml.safe_load((FOLDER / "otel-collector.yaml").read_text())
METRIC = re.compile(r"\b(?:stack|process)_[a-z0-9_]+|\bstack:[a-z0-9_:]+")
COMPARISON = re.compile(r"(?P<figure>.+) (?:==|>) [0-9.]+", re.DOTALL)
USAGE = {"input_tokens": 70, "output_tokens": 50, "cached_tokens": 30, "reasoning_tokens": 20}
TURNS: list[list[dict[str, Any]]] = [
    [{"text": ["A ", "good ", "answer."]}, {"finish": "stop", "usage": USAGE}],
    [{"wait_s": 0.05}, {"reasoning": "Hm."}, {"text": "Another."}, {"finish": "stop", "usage": USAGE}],
    [{"fail": "It broke."}],
    [{"text": "Half an "}, {"fail": "It broke."}],
]
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (apt: prometheus)")


ENGINE = FOLDER.parents[1] / "providers" / "inference" / "gpt_oss" / "engine" / "engine.py"
ENGINE_FIELDS = ENGINE.read_text().partition("class EngineMetrics:")[2].partition("\nclass ")[0]
FIGURES = re.findall(r"^    (\w+): (?:int|float)$", ENGINE_FIELDS, re.MULTILINE)
EngineFigures = make_dataclass("EngineFigures", [(name, float) for name in FIGURES])
"""The engine's figures by their names alone: importing the engine would import torch."""


class Measured(Scripted):
    """A scripted model with the figures of the engine, which grow with every look."""

    _looks = itertools.count(1)

    def metrics(self) -> ProviderMetrics:
        metrics = next(self._looks)
        return EngineFigures(**{name: float(metrics) for name in FIGURES} | {"pages": 1000.0, "pages_free": 400.0})


MEASURED: dict[str, Any] = {"provider": f"{__name__}:Measured", "turns": TURNS}


def panels() -> Iterator[tuple[str, str]]:
    """The title and the expression of every query of the dashboard."""
    for panel in all_panels():
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def all_panels() -> list[dict[str, Any]]:
    """The panels of the dashboard, those of its closed rows included."""
    return [each for panel in DASHBOARD["panels"] for each in (panel, *panel.get("panels", ()))]


def filled(expression: str) -> str:
    return expression.replace("$job", "responses-stack").replace("$__rate_interval", "1m")


async def load(served: Served, count: int) -> None:
    """Whole and streamed responses, some of which fail, a WebSocket's worth of bad requests, and background ones."""
    for number in range(count):
        try:
            if number % 3:
                await served.client.responses.create(model="scripted", input="Hi", background=number % 7 == 0)
            else:
                async for _ in await served.client.responses.create(model="scripted", input="Hi", stream=True):
                    pass
        except APIStatusError as exc:
            if exc.status_code < 500:
                raise


@needs_promtool
def test_every_alert_fires_on_its_bad_day_and_on_no_good_one() -> None:
    assert PROMTOOL is not None
    for command in (
        ["check", "rules", "rules.yaml"],
        ["check", "config", "--syntax-only", "prometheus.yaml"],
        ["test", "rules", "rules_test.yaml"],
    ):
        result = subprocess.run(
            [PROMTOOL, *command], cwd=FOLDER, capture_output=True, check=False, text=True, timeout=60
        )
        assert result.returncode == 0, result.stdout + result.stderr
    tests = yaml.safe_load((FOLDER / "rules_test.yaml").read_text())["tests"]
    alerts = {rule["alert"] for rule in RULES if "alert" in rule}
    for is_bad in (True, False):
        metrics = {
            row["alertname"]
            for test in tests
            for row in test["alert_rule_test"]
            if bool(row.get("exp_alerts")) == is_bad
        }
        assert metrics == alerts


async def test_every_metric_that_is_watched_exists() -> None:
    """The cheap half of the run against a real Prometheus: names, without values."""
    async with serving(MEASURED) as served:
        await load(served, 8)
        answer = await ask(served.url, method="GET", path="/metrics", kind=None)
    names = {
        sample.name for family in text_string_to_metric_families(answer.body.decode()) for sample in family.samples
    }
    names |= {rule["record"] for rule in RULES if "record" in rule}
    expressions = [expression for _, expression in panels()] + [rule["expr"] for rule in RULES]
    watched = {name for expression in expressions for name in METRIC.findall(expression)}
    assert len(watched) > 20
    assert watched <= names


def test_the_dashboard_is_one_that_grafana_loads() -> None:
    ids = [panel["id"] for panel in all_panels()]
    assert len(ids) == len(set(ids)) >= 20
    assert DASHBOARD["uid"] == "responses-stack"
    assert {variable["name"] for variable in DASHBOARD["templating"]["list"]} == {"datasource", "job"}
    places: set[tuple[int, int]] = set()
    for panel in all_panels():
        box = panel["gridPos"]
        cells = {(box["x"] + dx, box["y"] + dy) for dx in range(box["w"]) for dy in range(box["h"])}
        assert not cells & places, panel["title"]
        assert box["x"] + box["w"] <= 24
        places |= cells


def test_what_only_one_engine_has_is_in_a_closed_row() -> None:
    """An operator whose engine is vLLM does not see half a row of blank panels."""
    for panel in all_panels():
        if any("stack_inference_" in target["expr"] for target in panel.get("targets", ())):
            assert panel not in DASHBOARD["panels"], panel["title"]
    assert [row["collapsed"] for row in DASHBOARD["panels"] if row.get("panels")] == [True]


def test_the_compose_file_joins_the_parts() -> None:
    for name, service in COMPOSE["services"].items():
        assert re.fullmatch(r"[a-z0-9./-]+:v?\d+\.\d+\.\d+", service["image"]), name
        assert service["cap_drop"] == ["ALL"]
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert (FOLDER / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], volume
        for needed, condition in service.get("depends_on", {}).items():
            assert condition == {"condition": "service_healthy"}
            assert "healthcheck" in COMPOSE["services"][needed]
    [job, collector] = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())["scrape_configs"]
    assert job["authorization"]["credentials_file"] == "/run/secrets/metrics_key"
    assert COMPOSE["secrets"] == {"metrics_key": {"environment": "STACK_METRICS_KEY"}}
    assert collector["static_configs"] == [{"targets": ["otel-collector:8888"]}]
    read = set(re.findall(r"\$\{([A-Z_]+)", (FOLDER / "compose.yaml").read_text())) | {"STACK_METRICS_KEY"}
    assert read == set(re.findall(r"`([A-Z_]+)`", (FOLDER / "README.md").read_text()))
    networks = {
        f"{compose['name']}_default"
        for file in FOLDER.parent.glob("*/compose.yaml")
        if file.parent != FOLDER and "name" in (compose := yaml.safe_load(file.read_text()))
    }
    assert networks == set(re.findall(r"responses-stack-[a-z-]+_default", (FOLDER / "README.md").read_text()))


def test_the_collectors_pipelines_are_made_of_declared_parts() -> None:
    for name, pipeline in COLLECTOR["service"]["pipelines"].items():
        for kind in ("receivers", "processors", "exporters"):
            assert set(pipeline[kind]) <= COLLECTOR[kind].keys(), name
        assert pipeline["processors"][0] == "memory_limiter"
    assert set(COLLECTOR["service"]["extensions"]) <= COLLECTOR["extensions"].keys()


async def has_value(prometheus: Prometheus, expression: str) -> bool:
    return any(row["value"][1] != "NaN" for row in await prometheus.query(expression))


async def find_empty(prometheus: Prometheus) -> list[str]:
    """The expressions that have no value now. Alerts are asked for the figure that they compare; that nothing is there
    has no value by its nature as long as a stack is."""
    empty = [f"{title}: {text}" for title, text in panels() if not await has_value(prometheus, filled(text))]
    for rule in RULES:
        figure = COMPARISON.fullmatch(rule["expr"]) if "alert" in rule else None
        text = figure["figure"] if figure else rule["expr"]
        if not text.startswith("absent(") and not await has_value(prometheus, text):
            empty.append(f"{rule.get('alert') or rule['record']}: {text}")
    return empty


@pytest.mark.long
@needs_promtool
async def test_every_query_has_a_result_in_a_prometheus_that_scrapes_a_stack_under_load(tmp_path: Path) -> None:
    async with (
        serving(MEASURED, server={"metrics": "open"}) as served,
        running_prometheus(tmp_path, FOLDER / "prometheus.yaml", served.url.removeprefix("http://")) as prometheus,
    ):
        async with asyncio.timeout(90):
            while await find_empty(prometheus):
                await load(served, 20)
                await asyncio.sleep(0.5)
        async with asyncio.timeout(30):
            while (states := await alert_states(prometheus))["StackRequestsFail"] not in ("pending", "firing"):
                await load(served, 20)
        assert states["StackDown"] == states["StackGone"] == "inactive"
        rules = await prometheus.rules()
        assert len(rules) == len(RULES)
        assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []
        [share] = await prometheus.query("stack:request_errors:ratio_rate5m")
        assert 0.02 < float(share["value"][1]) < 1


async def alert_states(prometheus: Prometheus) -> dict[str, str]:
    return {rule["name"]: rule["state"] for rule in await prometheus.rules() if rule["type"] == "alerting"}
