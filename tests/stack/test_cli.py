"""The command line: what it prints, where, and with which exit code."""

import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from providers import PROVIDERS
from stack.cli import app

ROOT = Path(__file__).resolve().parents[2]
BARE = {"provider": "tests.stack.tiny:Bare"}


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.stdout, result.stderr


def written(tmp_path: Path, **inference: object) -> str:
    file = tmp_path / "run.yaml"
    section = {"provider": "tests.stack.tiny:Silent", **inference}
    file.write_text(
        yaml.safe_dump({"inference": section, "kv_store": BARE, "responses": {"provider": "tests.stack.tiny:Quiet"}})
    )
    return str(file)


def test_help_is_there_at_once_and_imports_nothing_heavy(capsys: pytest.CaptureFixture[str]) -> None:
    code = "import sys; from stack.cli import main\ntry: main()\nfinally: print(*sys.modules, file=sys.stderr)"
    started = time.perf_counter()
    run = subprocess.run([sys.executable, "-c", code, "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
    with capsys.disabled():
        print(f"\nstack --help took {time.perf_counter() - started:.2f} s")
    assert "Exit codes: 0 " in run.stdout
    heavy = {"pydantic", "openai", "fastapi", "uvicorn", "yaml", "providers", "apis.errors"}
    assert not set(run.stderr.split()) & heavy


def test_the_command_line_alone_keeps_the_openai_package_from_importing_its_unused_transport() -> None:
    code = "import sys; import {}; import openai.types.responses; print('aiohttp' in sys.modules)"
    for module, imported in (("stack.cli", "False"), ("stack.config", "True")):
        command = [sys.executable, "-c", code.format(module)]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert run.stdout.strip() == imported


def test_the_version_is_the_packages() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert invoke("--version") == (0, f"stack {version}\n", "")


def test_help_names_every_packaged_config_and_every_command() -> None:
    _, told, _ = invoke("--help")
    words = " ".join(told.split())
    packaged = {file.stem for file in (ROOT / "configs").glob("*.yaml")}
    assert packaged
    for name in (*packaged, "run", "check", "list"):
        assert name in words


def test_list_shows_every_provider_with_its_fields_their_types_and_defaults() -> None:
    code, told, _ = invoke("list")
    assert code == 0
    for api, known in PROVIDERS.items():
        assert f"\n{api}\n" in f"\n{told}"
        for name in known:
            assert f"\n  {name} " in told
    rows = [line.split() for line in told.splitlines()]
    assert ["path", "text", "required"] in rows
    assert ["tool_timeout_s", "number", "30.0"] in rows
    assert ["api_key", "secret", "none"] in rows
    assert "base_url text or list of text http://127.0.0.1:8000/v1" in map(" ".join, rows)
    assert ["extra_body", "mapping", "{}"] in rows


def test_check_says_what_is_wired_and_which_models_there_are(tmp_path: Path) -> None:
    file = written(tmp_path, model="m")
    code, told, errors = invoke("check", file)
    assert (code, errors) == (0, "")
    assert told.splitlines()[0].split() == ["inference", "tests.stack.tiny:Silent", "model=m"]
    assert told.splitlines()[-2:] == ["models        m", f"{file} is ready to run."]


@pytest.mark.parametrize(
    ("inference", "told"),
    [
        ({"modle": 1}, "inference.modle: is not a known key. Did you mean 'model'?"),
        ({"start": "config_error"}, "inference: there is no such model. Name another."),
        ({"start": "unavailable"}, "inference: Nobody answers there."),
        ({"answer": "nobody"}, "inference: Nobody serves here."),
    ],
)
def test_check_fails_with_one_message(tmp_path: Path, inference: dict[str, object], told: str) -> None:
    file = written(tmp_path, **inference)
    code, _, errors = invoke("check", file)
    assert (code, errors) == (1, f"{file}: {told}\n")


def test_run_of_a_wrong_config_ends_with_its_message_and_78(tmp_path: Path) -> None:
    file = written(tmp_path, modle=1)
    told = f"{file}: inference.modle: is not a known key. Did you mean 'model'?\n"
    assert invoke("run", file) == (78, "", told)


def test_run_on_an_open_host_without_keys_ends_with_78(tmp_path: Path) -> None:
    code, _, told = invoke("run", written(tmp_path), "--host", "0.0.0.0")
    assert code == 78
    assert "server: host 0.0.0.0 can be reached from other machines" in told


def test_a_memory_store_cannot_be_shared_by_workers(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("inference: {provider: 'tests.stack.tiny:Silent'}\nkv_store: {provider: memory}\n")
    told = (
        f"{file}: kv_store.provider: memory is of one process, and 2 workers need to share one store. Choose sqlite, "
        "redis or postgres, or run one worker.\n"
    )
    assert invoke("run", str(file), "--workers", "2") == (78, "", told)


def test_reload_with_workers_is_wrong_usage(tmp_path: Path) -> None:
    code, _, told = invoke("run", written(tmp_path), "--reload", "--workers", "2")
    assert code == 2
    assert "--reload runs one process; leave out --workers." in told


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "stack", "run", "nowhere"]
    run = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (78, "")
    assert run.stderr == (
        "nowhere: no such file. Give a path, or one of the packaged configs: gpt-oss, local, multi-provider, tools, "
        "vllm.\n"
    )
