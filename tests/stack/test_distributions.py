"""The shipped distributions: run configs that load, and deployments that agree with them and with the server."""

import os
import re
import shlex
import stat
import subprocess
import tomllib
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from stack.config import PACKAGED_CONFIGS_DIR, StackConfig, load_config
from stack.http.routes.server import SERVER_ROUTES
from stack.wiring import wire_providers
from tests.support.servers.helm_chart import Rendered, render_charts

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = sorted(path.parent for path in (ROOT / "distributions").glob("*/run.yaml"))
CONFIGS = sorted(PACKAGED_CONFIGS_DIR.glob("*.yaml"))
SECRETS = {"STACK_API_KEY": "sk-stack", "VLLM_API_KEY": "sk-vllm"}
each_folder = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


def documents(file: Path) -> list[dict[str, Any]]:
    return [cast("dict[str, Any]", document) for document in yaml.safe_load_all(file.read_text())]


def run_config(folder: Path) -> StackConfig:
    return load_config(str(folder / "run.yaml"), env=SECRETS)


def services(folder: Path) -> dict[str, dict[str, Any]]:
    return documents(folder / "compose.yaml")[0]["services"]


def chart(folder: Path) -> Rendered:
    """The documents of the Helm chart with this distribution as its preset."""
    return render_charts({name.name: {"preset": name.name} for name in FOLDERS})[folder.name]


def workload(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod of our own server, and its container."""
    pod = chart(folder).find("Deployment")["spec"]["template"]["spec"]
    return pod, pod["containers"][0]


def instructions(folder: Path) -> dict[str, list[str]]:
    results: dict[str, list[str]] = {}
    for line in (folder / "Containerfile").read_text().splitlines():
        word, _, rest = line.strip().partition(" ")
        results.setdefault(word, []).append(rest)
    return results


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_a_packaged_config_works_without_any_environment(file: Path) -> None:
    config = load_config(file.stem, env={})
    assert set(wire_providers(config)) >= {"inference", "responses", "kv_store"}
    assert config.server.host == "127.0.0.1"


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_a_packaged_config_explains_itself(file: Path) -> None:
    text = file.read_text()
    assert text.startswith("# ")
    assert f"stack run {file.stem}" in text


@each_folder
def test_a_distributions_run_config_loads_and_asks_callers_for_a_key(folder: Path) -> None:
    config = run_config(folder)
    assert set(wire_providers(config)) >= {"inference", "responses", "kv_store"}
    assert config.server.host == "0.0.0.0"
    assert [entry.key.get_secret_value() for entry in config.server.api_keys] == ["sk-stack"]


@each_folder
def test_every_folder_is_whole(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} >= {*("run.yaml", "Containerfile", "compose.yaml", "README.md")}


@each_folder
def test_every_image_is_pinned(folder: Path) -> None:
    images = [service["image"] for service in services(folder).values()]
    assert {name.partition(" ")[0] for name in instructions(folder)["FROM"]} == {"$PYTHON_IMAGE"}
    images += [argument.removeprefix("PYTHON_IMAGE=") for argument in instructions(folder)["ARG"]]
    for document in chart(folder).documents:
        template = document.get("spec", {}).get("template", {})
        images += [container["image"] for container in template.get("spec", {}).get("containers", [])]
    assert len(images) >= 3
    for image in images:
        pinned = re.sub(r"^\$\{[A-Z]+_IMAGE:-(.*)\}$", r"\1", image)  # a digest may take its place
        assert re.fullmatch(r"[a-z0-9./-]+:v?\d+\.\d+\.\d+[a-z-]*", pinned), image


@each_folder
def test_every_port_is_the_run_configs(folder: Path) -> None:
    port = run_config(folder).server.port
    assert instructions(folder)["EXPOSE"] == [str(port)]
    assert f"127.0.0.1:{port}/readyz" in (folder / "Containerfile").read_text()
    assert services(folder)["stack"]["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert workload(folder)[1]["ports"] == [{"name": "http", "containerPort": port}]
    assert chart(folder).find("Service")["spec"]["ports"] == [{"name": "http", "port": port, "targetPort": "http"}]


@each_folder
def test_probes_ask_for_paths_that_the_server_answers_without_a_key(folder: Path) -> None:
    _, container = workload(folder)
    paths = {name: container[name]["httpGet"]["path"] for name in container if name.endswith("Probe")}
    assert paths == {"startupProbe": "/healthz", "readinessProbe": "/readyz", "livenessProbe": "/healthz"}
    assert set(paths.values()) <= {route.path for route in SERVER_ROUTES if not route.access.needs_key}


@each_folder
def test_every_deployment_waits_for_the_servers_grace_period(folder: Path) -> None:
    grace_s = run_config(folder).server.grace_period_s + 1
    assert int(services(folder)["stack"]["stop_grace_period"].removesuffix("s")) > grace_s
    pod, container = workload(folder)
    pause_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > pause_s + grace_s
    assert instructions(folder)["ENTRYPOINT"] == ['["stack"]']


@each_folder
def test_the_server_runs_without_privileges(folder: Path) -> None:
    assert instructions(folder)["USER"] == ["10001"]
    pod, container = workload(folder)
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {"requests", "limits"} <= container["resources"].keys()
    stack = services(folder)["stack"]
    assert (stack["read_only"], stack["cap_drop"]) == (True, ["ALL"])


@each_folder
def test_no_secret_is_written_down(folder: Path) -> None:
    for service in services(folder).values():
        for name, value in service.get("environment", {}).items():
            assert "KEY" not in name or value.startswith(f"${{{name}:"), name
    for document in chart(folder).documents:
        assert document["kind"] != "Secret"
        assert not [name for name in document.get("data", {}) if re.search("KEY|_TOKEN$|PASSWORD|SECRET", name)]
    assert {"secretRef": {"name": "responses-stack"}} in workload(folder)[1]["envFrom"]


@each_folder
def test_every_variable_that_a_deployment_sets_is_read_by_its_run_config(folder: Path) -> None:
    read = set(re.findall(r"\$\{env\.([A-Z_]+)", (folder / "run.yaml").read_text()))
    variables = set(re.findall(r"`([A-Z_]+)`", (folder / "README.md").read_text()))
    assert set(services(folder)["stack"]["environment"]) == read
    assert read <= variables


def test_models_are_where_the_pages_download_them() -> None:
    """O ranked 2: a compose file's paths begin at its own folder, the commands run in the repository's root."""
    for name in ("gpt-oss", "local"):
        (mount,) = (
            volume for volume in services(ROOT / "distributions" / name)["stack"]["volumes"] if "MODELS" in volume
        )
        assert mount == "${MODELS_DIR:-../../models}:/models:ro"


@each_folder
def test_the_run_config_of_a_cluster_is_not_in_the_image(folder: Path) -> None:
    """Another key or tenant needs no new image."""
    pod, container = workload(folder)
    assert {"name": "run", "configMap": {"name": "prod-responses-stack-run"}} in pod["volumes"]
    assert {"name": "run", "mountPath": "/etc/stack", "readOnly": True} in container["volumeMounts"]
    assert f"--set preset={folder.name}" in (folder / "README.md").read_text()


def test_redis_has_a_password_and_refuses_writes_before_it_is_killed() -> None:
    """A Redis that outgrows its memory limit is killed, and again while it reads its log."""
    folder = ROOT / "distributions" / "vllm"
    redis = chart(folder).find("StatefulSet", "-redis")["spec"]["template"]["spec"]["containers"][0]
    for command in (redis["command"], services(folder)["redis"]["command"]):
        assert command[:2] == ["sh", "-c"]
        words = shlex.split(command[2].partition(" exec ")[2])
        options = dict(zip(words[2::2], words[3::2], strict=True))
        assert words[:2] == ["redis-server", "/run/redis.conf"]
        assert options["--maxmemory-policy"] == "noeviction"
        assert options["--maxmemory"] in ("2500mb", "3gb")


def test_the_password_of_redis_is_no_argument_and_is_asked_for(tmp_path: Path, unused_tcp_port: int) -> None:
    """Every user of a machine can list the arguments of its processes."""
    folder = ROOT / "distributions" / "vllm"
    redis = chart(folder).find("StatefulSet", "-redis")["spec"]["template"]["spec"]["containers"][0]
    password = "a long 'random' text"
    for text in (redis["command"][2], services(folder)["redis"]["command"][2].replace("$$", "$")):
        assert "PASSWORD" not in text
        script = text.replace("/run/", f"{tmp_path}/") + f" --dir {tmp_path} --port {unused_tcp_port} --bind 127.0.0.1"
        environment = {**os.environ, "REDISCLI_AUTH": password}
        with subprocess.Popen(["sh", "-c", script], env=environment, stdout=subprocess.DEVNULL) as process:
            try:
                cli = ["redis-cli", "-p", str(unused_tcp_port), "ping"]
                while (
                    said := subprocess.run(cli, env=environment, capture_output=True, check=False).stdout
                ) != b"PONG\n":
                    assert process.poll() is None, said
                assert password not in Path(f"/proc/{process.pid}/cmdline").read_text()
                strange = {name: value for name, value in environment.items() if name != "REDISCLI_AUTH"}
                assert b"NOAUTH" in subprocess.run(cli, env=strange, capture_output=True, check=False).stdout
            finally:
                process.terminate()
    assert stat.S_IMODE((tmp_path / "redis.conf").stat().st_mode) == 0o600


@each_folder
def test_containers_have_no_more_of_the_machine_than_they_need(folder: Path) -> None:
    """No namespace of the host, no privilege to gain, and no capability, as in the chart; also for vLLM."""
    for name, service in services(folder).items():
        assert not {"ipc", "pid", "network_mode", "privileged"} & service.keys()
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["cap_drop"] == ["ALL"], name


def locked(file: Path) -> dict[str, tuple[str, list[str]]]:
    """The version and the hashes of each package that a list of requirements has."""
    results: dict[str, tuple[str, list[str]]] = {}
    for line in file.read_text().replace("\\\n", " ").splitlines():
        if not line.startswith("#"):
            pinned = re.fullmatch(r"([a-z0-9.-]+)==([^ ]+) (?:; [^-]+)?((?: *--hash=sha256:[0-9a-f]{64})+)", line)
            assert pinned, line
            results[pinned[1]] = (pinned[2], pinned[3].split())
    return results


def required(project: dict[str, Any], extras: list[str]) -> list[Requirement]:
    """Return the requirements of these extras, and of the extras that they name themselves."""
    needed = [Requirement(line) for name in extras for line in project["optional-dependencies"][name]]
    own = [extra for each in needed if each.name == project["name"] for extra in each.extras]
    others = [each for each in needed if each.name != project["name"]]
    return others + (required(project, own) if own else [])


@each_folder
def test_images_install_only_files_that_have_a_known_hash(folder: Path) -> None:
    """Two builds of one commit install the same files, in versions that the package asks for."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = pyproject["project"]
    script = (ROOT / "distributions" / "lock.sh").read_text()
    (extras,) = re.findall(rf'^lock {folder.name} "(.+)" "\$@"$', script, re.MULTILINE)
    pins = locked(folder / "requirements.txt")
    needed = [*map(Requirement, project["dependencies"]), *required(project, extras.split())]
    assert len(needed) > len(project["dependencies"])
    for requirement in needed:
        assert pins[canonicalize_name(requirement.name)][0] in requirement.specifier, requirement
    tools = locked(ROOT / "distributions" / "build-requirements.txt")
    for requirement in map(Requirement, pyproject["build-system"]["requires"]):
        assert tools[canonicalize_name(requirement.name)][0] in requirement.specifier, requirement
    installs = [line for line in instructions(folder)["RUN"] if re.search(r"\bpip (install|wheel) ", line)]
    assert len(installs) == 4
    for line in installs:
        assert "--require-hashes --only-binary :all: -r " in line or "--no-index --no-deps" in line, line


def test_the_lists_of_all_images_have_the_same_versions() -> None:
    """The tests of one image hold for the code that another one shares with it."""
    versions: dict[str, set[str]] = {}
    for folder in FOLDERS:
        for name, (version, _) in locked(folder / "requirements.txt").items():
            versions.setdefault(name, set()).add(version)
    assert not {name: each for name, each in versions.items() if len(each) > 1}


@each_folder
def test_services_that_others_depend_on_say_when_they_are_healthy(folder: Path) -> None:
    for service in services(folder).values():
        for needed, condition in service.get("depends_on", {}).items():
            assert condition == {"condition": "service_healthy"}
            assert "healthcheck" in services(folder)[needed]
