"""The command line: what it prints, where, and with which exit code."""

import asyncio
import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from apis.imports import install_command
from providers import PROVIDERS
from providers.inference.llama_cpp.provider import LlamaCpp
from providers.kv_store.sqlite import SQLite
from stack.cli import app
from tests.support.servers.forked_process import forked_stack

ROOT = Path(__file__).resolve().parents[2]
BARE = {"provider": "tests.stack.tiny:Bare"}
SCRIPT = [{"text": "Good morning."}]
QUIET = {"provider": "tests.stack.tiny:Quiet"}


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
    heavy = {"pydantic", "openai._models", "fastapi", "uvicorn.config", "yaml", "providers", "apis.errors"}
    assert not set(run.stderr.split()) & heavy


def test_the_version_is_the_packages() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert invoke("--version") == (0, f"stack {version}\n", "")


def test_help_names_every_packaged_config_and_every_command() -> None:
    _, output, _ = invoke("--help")
    words = " ".join(output.split())
    packaged = {file.stem for file in (ROOT / "configs").glob("*.yaml")}
    assert packaged
    for name in (*packaged, "run", "check", "list"):
        assert name in words


def test_a_folder_of_the_user_replaces_no_installed_package(tmp_path: Path) -> None:
    """O ranked 1: modules of the working directory come last, and a class there can still be named."""
    for name in ("openai", "yaml", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    (tmp_path / "providers").mkdir()
    (tmp_path / "providers" / "__init__.py").write_text("raise SystemExit('the wrong package')")
    (tmp_path / "mine.py").write_text("from tests.stack.tiny import Silent\nclass Mine(Silent): pass\n")
    section = {"provider": "mine:Mine"}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"inference": section, "kv_store": BARE, "responses": QUIET}))
    command = [Path(sys.executable).with_name("stack"), "check", "run.yaml"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert "run.yaml is ready to run." in run.stdout


def test_all_mistakes_of_a_file_are_named_at_once(tmp_path: Path) -> None:
    """An unknown section does not hide wrong fields of others."""
    file = tmp_path / "run.yaml"
    inference = {"provider": "tests.stack.tiny:Silent", "modle": 1}
    file.write_text(yaml.safe_dump({"foo": 1, "inference": inference, "kv_store": {"provider": "sqlit", "path": "x"}}))
    code, _, errors = invoke("check", str(file))
    assert code == 1
    assert [line.partition(": ")[2].partition(": ")[0] for line in errors.splitlines()] == [
        "foo",
        "inference.modle",
        "kv_store.provider",
    ]


def test_init_copies_a_packaged_config_and_overwrites_nothing(tmp_path: Path) -> None:
    """The copy is a run config to edit."""
    path = tmp_path / "my.yaml"
    assert invoke("init", "vllm", "--path", str(path)) == (0, f"Wrote {path}. Serve it: stack run {path}\n", "")
    assert path.read_text() == (ROOT / "configs" / "vllm.yaml").read_text()
    code, _, errors = invoke("init", "local", "--path", str(path))
    assert (code, errors) == (1, f"{path}: exists already and was not changed.\n")
    code, _, errors = invoke("init", "../configs/vllm", "--path", str(tmp_path / "other.yaml"))
    assert (code, errors.partition(":")[0]) == (1, "../configs/vllm")


def test_a_packaged_config_is_named_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of an installed package helps no one."""
    monkeypatch.setenv("STACK_DB", "")
    monkeypatch.setenv("VLLM_URL", "ftp://x")
    _, _, errors = invoke("check", "vllm")
    assert errors.startswith("vllm (packaged config): inference.base_url")


async def test_ask_prints_the_answer_of_a_running_stack(tmp_path: Path) -> None:
    """O-A 14 and 15: the first request is one short command, which the start itself suggests."""
    file = tmp_path / "run.yaml"
    file.write_text(
        yaml.safe_dump({"inference": {"provider": "scripted", "turns": [SCRIPT]}, "kv_store": {"provider": "memory"}})
    )
    async with forked_stack(str(file), cwd=tmp_path) as (url, _):
        code, output, errors = await asyncio.to_thread(invoke, "ask", "Hello", "--url", f"{url}/v1")
        assert (code, output, errors) == (0, "Good morning.\n", "")
        code, _, errors = await asyncio.to_thread(invoke, "ask", "Hello", "--url", f"{url}/v1", "--model", "no")
        assert code == 1
        assert "answered with 404" in errors
    code, _, errors = await asyncio.to_thread(invoke, "ask", "Hello", "--url", f"{url}/v1")
    assert (code, errors) == (1, f"No server answers at {url}/v1. Start one: stack run local\n")


def test_list_folds_at_the_width_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 80 columns shows whole lines."""
    monkeypatch.setenv("COLUMNS", "80")
    _, output, _ = invoke("list")
    assert max(len(line) for line in output.splitlines()) <= 80


def test_list_of_one_name_says_all_about_it() -> None:
    """O-A 9, O ranked 6: one provider with its documentation, and the section `server` with its keys."""
    code, output, _ = invoke("list", "llama_cpp")
    assert code == 0
    assert "`model_path` is a GGUF file" in " ".join(output.split())
    assert "vllm" not in output
    _, server, _ = invoke("list", "server")
    assert "list of mapping (key, tenant, admin)" in server
    code, _, errors = invoke("list", "llamacpp")
    assert code == 2
    assert errors.startswith("There is no 'llamacpp'. Known names: ")
    assert "Ellipsis" not in invoke("list")[1]


def test_check_lets_the_model_answer(tmp_path: Path) -> None:
    """A model that cannot chat is found by the check."""
    file = written(tmp_path, chat="refuse")
    code, _, errors = invoke("check", file)
    assert (code, errors) == (1, f"{file}: inference: the model silent does not answer: It has no chat template.\n")


def test_a_path_may_begin_with_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """~ is the home folder in paths of a run config."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert LlamaCpp.Config.model_validate({"model_path": "~/model.gguf"}).model_path == tmp_path / "model.gguf"
    assert SQLite.Config.model_validate({"path": "~/x.db"}).path == str(tmp_path / "x.db")


def test_an_install_command_names_the_folder_that_was_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index may hold another package by our name."""
    command = install_command("local", "files")
    assert command.startswith("pip install '/")
    assert command.endswith("[local,files]'")


def test_list_shows_every_provider_with_its_fields_their_types_and_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, output, _ = invoke("list")
    assert code == 0
    for api, providers in PROVIDERS.items():
        assert f"\n{api}\n" in f"\n{output}"
        for name in providers:
            assert f"\n  {name} " in output
    rows = [line.split() for line in output.splitlines()]
    assert ["path", "text", "required"] in rows
    assert ["tool_timeout_s", "number", "30.0"] in rows
    assert ["api_key", "secret", "none"] in rows
    assert "base_url text or list of text http://127.0.0.1:8000/v1" in map(" ".join, rows)
    assert ["extra_body", "mapping", "{}"] in rows


def test_check_says_what_is_wired_and_which_models_there_are(tmp_path: Path) -> None:
    file = written(tmp_path, model="m")
    code, output, errors = invoke("check", file)
    assert (code, errors) == (0, "")
    assert output.splitlines()[0].split() == ["inference", "tests.stack.tiny:Silent", "model=m"]
    assert output.splitlines()[-2:] == ["models        m", f"{file} is ready to run."]


@pytest.mark.parametrize(
    ("inference", "expected"),
    [
        ({"modle": 1}, "inference.modle: is not a known key. Did you mean 'model'?"),
        ({"start": "config_error"}, "inference: there is no such model. Name another."),
        ({"start": "unavailable"}, "inference: Nobody answers there."),
        ({"answer": "nobody"}, "inference: Nobody serves here."),
    ],
)
def test_check_fails_with_one_message(tmp_path: Path, inference: dict[str, object], expected: str) -> None:
    file = written(tmp_path, **inference)
    code, _, errors = invoke("check", file)
    assert (code, errors) == (1, f"{file}: {expected}\n")


def test_run_of_a_wrong_config_ends_with_its_message_and_78(tmp_path: Path) -> None:
    file = written(tmp_path, modle=1)
    message = f"{file}: inference.modle: is not a known key. Did you mean 'model'?\n"
    assert invoke("run", file) == (78, "", message)


def test_run_on_an_open_host_without_keys_ends_with_78(tmp_path: Path) -> None:
    code, _, output = invoke("run", written(tmp_path), "--host", "0.0.0.0")
    assert code == 78
    assert "server: host 0.0.0.0 can be reached from other machines" in output


def test_a_memory_store_cannot_be_shared_by_workers(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("inference: {provider: 'tests.stack.tiny:Silent'}\nkv_store: {provider: memory}\n")
    message = (
        f"{file}: kv_store.provider: memory is of one process, and 2 workers need to share one store. Choose sqlite, "
        "redis or postgres, or run one worker.\n"
    )
    assert invoke("run", str(file), "--workers", "2") == (78, "", message)


def test_reload_with_workers_is_wrong_usage(tmp_path: Path) -> None:
    code, _, output = invoke("run", written(tmp_path), "--reload", "--workers", "2")
    assert code == 2
    assert "--reload runs one process; leave out --workers." in output


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "stack", "run", "nowhere"]
    run = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (78, "")
    assert run.stderr == (
        "nowhere: no such file. Give a path, or one of the packaged configs: gpt-oss, local-tools, local, "
        "multi-provider, tools, vllm.\n"
    )
