"""The Helm chart: rendered by Helm's own engine, held against the schemas of Kubernetes, the server and its metrics.

No cluster is involved: scheduling, probes, network policies and autoscaling in action are not seen here.
"""

import re
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from stack.config import StackConfig, load_config
from stack.wiring import wire_providers
from tests.stack.http.raw import ask
from tests.support.servers.helm_chart import CHART, Rendered, lint_chart, render_charts
from tests.support.servers.serving import serving

OBSERVABILITY = CHART.parents[1] / "observability"
MONITORING = {"serviceMonitor": True, "prometheusRule": True, "dashboard": True, "labels": {"release": "prometheus"}}
EXTERNAL = {"vllm": {"enabled": False, "urls": ["http://a:8000/v1", "http://b:8000/v1"]}, "store": {"inChart": False}}
PAGE = (CHART.parent / "README.md").read_text()
CASES: dict[str, dict[str, Any]] = {
    "example": yaml.safe_load((CHART.parent / "example-values.yaml").read_text()),
    "vllm": {},
    "local": {"preset": "local", "autoscaling": {"kind": "hpa"}},
    "gpt-oss": {"preset": "gpt-oss"},
    "keda": {"autoscaling": {"kind": "keda"}, "store": {"kind": "postgres"}, "vllm": {"replicas": 3}},
    "hpa": {"autoscaling": {"kind": "hpa", "streamsPerPod": 70}, **EXTERNAL},
    "monitored": {"monitoring": MONITORING},
    "slow": {"gracePeriodSeconds": 600, "preStopSeconds": 20, "workers": 4, "startupSeconds": 90},
    "configured": {
        "config": {"server": {"access_log": True}, "responses": {"background": {"max_running": 8}}},
        "env": {"TEMPLATE": "chat"},
    },
    "closed": {"networkPolicy": {"allowInternet": False, "from": [{"namespaceSelector": {}}]}},
    "open": {"networkPolicy": {"enabled": False}, "podDisruptionBudget": {"enabled": False}},
}
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown preset": ({"preset": "ollama"}, "preset"),
    "unknown value": ({"replica": 3}, "replica"),
    "unknown store": ({"store": {"kind": "mysql"}}, "store/kind|store.kind"),
    "secret in the open": ({"env": {"VLLM_API_KEY": "sk-1"}}, "VLLM_API_KEY"),
    "no server named": ({"vllm": {"enabled": False}}, "vllm.urls"),
    "no replicas": ({"replicas": 0}, "replicas"),
}
SECRETS = {
    "STACK_API_KEY": "sk-stack",
    "VLLM_API_KEY": "sk-vllm",
    "STORE_URL": "redis://redis:6379/0",
    "REDIS_PASSWORD": "r",
    "POSTGRES_PASSWORD": "p",
}
CUSTOM_KINDS = {"ScaledObject", "ServiceMonitor", "PrometheusRule"}
"""Kinds of KEDA and of the Prometheus operator, whose schemas Kubernetes does not have."""
each_case = pytest.mark.parametrize("case", CASES)


def rendered(case: str) -> Rendered:
    values = {**CASES, **{name: values for name, (values, _) in MISTAKES.items()}}
    return render_charts(values)[case]


def server_pod(chart: Rendered) -> tuple[dict[str, Any], dict[str, Any]]:
    pod = chart.find("Deployment")["spec"]["template"]["spec"]
    return pod, pod["containers"][0]


def pods(chart: Rendered) -> dict[str, dict[str, Any]]:
    """The pod templates by the names of their workloads."""
    kinds = ("Deployment", "StatefulSet")
    return {each["metadata"]["name"]: each["spec"]["template"] for each in chart.documents if each["kind"] in kinds}


def run_config(chart: Rendered, tmp_path: Any) -> StackConfig:
    file = tmp_path / "run.yaml"
    file.write_text(chart.find("ConfigMap", "-run")["data"]["run.yaml"])
    return load_config(str(file), env=SECRETS)


def matches(selector: dict[str, Any], template: dict[str, Any]) -> bool:
    return selector.items() <= template["metadata"]["labels"].items()


def test_the_page_names_the_secrets_that_the_chart_reads() -> None:
    page_keys = set(re.findall(r"^\| `([A-Z_]+)`(?:, `([A-Z_]+)`)? \|", PAGE, re.MULTILINE))
    documents = str([each for case in CASES for each in rendered(case).documents])
    referenced = set(re.findall(r"'key': '([A-Z_]+)'", documents))
    assert referenced <= {key for keys in page_keys for key in keys}
    assert "ten sets of values" in PAGE
    assert len(CASES) == 11  # one more: the example


def test_helm_has_nothing_to_warn_of() -> None:
    report = lint_chart()
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] > 1] == []


@each_case
def test_kubernetes_accepts_every_document(case: str) -> None:
    chart = rendered(case)
    assert chart.error == ""
    assert {fault for fault in chart.faults if not fault.startswith("no schema of ")} == set()
    assert {fault.split()[-1] for fault in chart.faults} == chart.kinds() & CUSTOM_KINDS
    names = [(document["kind"], document["metadata"]["name"]) for document in chart.documents]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_before_anything_is_installed(mistake: str) -> None:
    assert re.search(MISTAKES[mistake][1], rendered(mistake).error)


@each_case
def test_the_server_takes_the_run_config(case: str, tmp_path: Any) -> None:
    chart = rendered(case)
    config = run_config(chart, tmp_path)
    assert set(wire_providers(config)) >= {"inference", "responses", "kv_store"}
    assert [entry.key.get_secret_value() for entry in config.server.api_keys] == ["sk-stack"]
    _, container = server_pod(chart)
    assert container["ports"] == [{"name": "http", "containerPort": config.server.port}]
    text = chart.find("ConfigMap", "-run")["data"]["run.yaml"]
    required = set(re.findall(r"\$\{env\.([A-Z_]+)\}", text))
    named: set[str] = {entry["name"] for entry in container["env"] or ()}
    assert required <= named | {"STACK_API_KEY", "VLLM_API_KEY"}


def test_values_of_the_run_config_are_merged_over_the_presets(tmp_path: Any) -> None:
    chart = rendered("configured")
    config = run_config(chart, tmp_path)
    assert (config.server.access_log, config.server.host) == (True, "0.0.0.0")
    assert config.responses.model_dump()["background"] == {"max_running": 8}
    assert {"name": "TEMPLATE", "value": "chat"} in server_pod(chart)[1]["env"]
    changed = [rendered(case).find("Deployment")["spec"]["template"]["metadata"] for case in ("vllm", "configured")]
    assert changed[0]["annotations"]["checksum/run"] != changed[1]["annotations"]["checksum/run"]


@each_case
def test_a_pod_ends_after_the_grace_period_of_its_requests(case: str, tmp_path: Any) -> None:
    chart = rendered(case)
    pod, container = server_pod(chart)
    pause_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    grace_s = run_config(chart, tmp_path).server.grace_period_s
    assert grace_s == CASES[case].get("gracePeriodSeconds", 30)
    assert pod["terminationGracePeriodSeconds"] > pause_s + grace_s + 1


@each_case
def test_pods_have_no_privileges_and_secrets_only_by_reference(case: str) -> None:
    chart = rendered(case)
    assert "Secret" not in chart.kinds()
    for name, template in pods(chart).items():
        pod = template["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        is_vllm = name.endswith("-vllm")  # whose image runs as root and writes where it likes
        assert is_vllm or pod["securityContext"]["runAsNonRoot"]
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert is_vllm or security["readOnlyRootFilesystem"]
            assert {"requests", "limits"} <= container["resources"].keys()
            assert re.fullmatch(r"[a-z0-9./-]+:v?\d+\.\d+(\.\d+)?[a-z-]*", container["image"]), container["image"]
            for entry in container.get("env") or ():
                is_secret = re.search("KEY|_TOKEN$|PASSWORD|SECRET|STORE_URL", entry["name"])
                assert not is_secret or "valueFrom" in entry or "$(" in entry["value"], entry


@each_case
def test_selectors_select_the_pods_that_they_are_for(case: str) -> None:
    chart = rendered(case)
    templates = pods(chart)
    for document in chart.documents:
        name, spec = document["metadata"]["name"], document.get("spec", {})
        match document["kind"]:
            case "Service":
                selector = spec["selector"]
            case "Deployment" | "StatefulSet" | "PodDisruptionBudget":
                selector = spec["selector"]["matchLabels"]
            case "NetworkPolicy":
                selector = spec["podSelector"]["matchLabels"]
            case _:
                continue
        assert [each for each, template in templates.items() if matches(selector, template)] == [name]


def test_every_replica_of_a_model_has_its_own_url() -> None:
    chart = rendered("keda")
    config = yaml.safe_load(chart.find("ConfigMap", "-run")["data"]["run.yaml"])
    workload = chart.find("StatefulSet", "-vllm")
    assert workload["spec"]["replicas"] == 3
    service = workload["spec"]["serviceName"]
    assert chart.find("Service", "-vllm")["spec"]["clusterIP"] == "None"
    assert config["inference"]["base_url"] == [f"http://{service}-{at}.{service}:8000/v1" for at in range(3)]
    elsewhere = yaml.safe_load(rendered("hpa").find("ConfigMap", "-run")["data"]["run.yaml"])
    assert elsewhere["inference"]["base_url"] == EXTERNAL["vllm"]["urls"]


def test_the_store_is_in_the_chart_or_named_by_a_secret() -> None:
    for case, kind, port in (("vllm", "redis", 6379), ("keda", "postgres", 5432)):
        chart = rendered(case)
        config = yaml.safe_load(chart.find("ConfigMap", "-run")["data"]["run.yaml"])
        assert config["kv_store"] == {"provider": kind, "url": "${env.STORE_URL}"}
        (url,) = (entry["value"] for entry in server_pod(chart)[1]["env"] if entry["name"] == "STORE_URL")
        assert f"@prod-responses-stack-{kind}:{port}/" in url
        assert chart.find("Service", f"-{kind}")["spec"]["ports"][0]["port"] == port
    chart = rendered("hpa")
    assert chart.kinds().isdisjoint({"StatefulSet"})
    (entry,) = (entry for entry in server_pod(chart)[1]["env"] if entry["name"] == "STORE_URL")
    assert entry["valueFrom"] == {"secretKeyRef": {"name": "responses-stack", "key": "STORE_URL"}}


async def test_autoscaling_asks_for_metrics_that_the_server_has() -> None:
    triggers = rendered("keda").find("ScaledObject")["spec"]["triggers"]
    queries = [trigger["metadata"]["query"] for trigger in triggers]
    metrics = rendered("hpa").find("HorizontalPodAutoscaler")["spec"]["metrics"]
    names = {re.findall(r"\((\w+)\{", query)[0] for query in queries}
    assert names == {
        metric[kind]["metric"]["name"] for metric in metrics for kind in ("pods", "object") if kind in metric
    }
    async with serving() as served:
        answer = await ask(served.url, method="GET", path="/metrics", kind=None)
    metric_names = {family.name for family in text_string_to_metric_families(answer.body.decode())}
    assert names <= metric_names
    assert "replicas" not in rendered("keda").find("Deployment")["spec"]  # each upgrade would undo the scaling


def test_pods_with_a_volume_of_their_own_are_one() -> None:
    for case in ("local", "gpt-oss"):
        chart = rendered(case)
        deployment = chart.find("Deployment")["spec"]
        assert (deployment["replicas"], deployment["strategy"]) == (1, {"type": "Recreate"})
        assert chart.kinds().isdisjoint({"HorizontalPodAutoscaler", "PodDisruptionBudget"})
        assert chart.find("PersistentVolumeClaim")["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
        assert server_pod(chart)[1]["args"][-2:] == ["--workers", "1"]
    assert "nvidia.com/gpu" in server_pod(rendered("gpt-oss"))[1]["resources"]["limits"]
    assert server_pod(rendered("slow"))[1]["args"][-2:] == ["--workers", "4"]


def test_network_policies_let_in_and_out_what_the_stack_needs_and_no_more() -> None:
    chart = rendered("vllm")
    server, store, vllm = (chart.find("NetworkPolicy", suffix)["spec"] for suffix in ("", "-redis", "-vllm"))
    templates = pods(chart)
    for policy, port in ((store, 6379), (vllm, 8000)):
        (rule,) = policy["ingress"]
        (peer,) = rule["from"]
        assert matches(peer["podSelector"]["matchLabels"], templates["prod-responses-stack"])
        assert rule["ports"] == [{"protocol": "TCP", "port": port}]
    assert server["policyTypes"] == ["Ingress", "Egress"]
    blocks = [peer["ipBlock"] for rule in server["egress"] for peer in rule.get("to", ()) if "ipBlock" in peer]
    assert {"10.0.0.0/8", "169.254.0.0/16", "192.168.0.0/16", "172.16.0.0/12"} <= set(blocks[0]["except"])
    closed = rendered("closed").find("NetworkPolicy")["spec"]
    assert closed["ingress"][0]["from"] == [{"namespaceSelector": {}}]
    assert "ipBlock" not in str(closed)
    assert "NetworkPolicy" not in rendered("open").kinds()


def test_monitoring_has_the_rules_and_the_dashboard_of_the_distribution() -> None:
    chart = rendered("monitored")
    assert chart.find("PrometheusRule")["spec"] == yaml.safe_load((OBSERVABILITY / "rules.yaml").read_text())
    dashboard = (OBSERVABILITY / "grafana/dashboards/responses-stack.json").read_text()
    assert chart.find("ConfigMap", "-dashboard")["data"]["responses-stack.json"].strip() == dashboard.strip()
    monitor = chart.find("ServiceMonitor")
    service = chart.find("Service")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    # the job that rules and dashboard name
    assert service["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "responses-stack"
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] == service["spec"]["ports"][0]["name"]
