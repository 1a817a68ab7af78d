"""The command `stack models`, and models that the command line chooses."""

import json
from collections.abc import Generator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from apis.errors import ConfigError
from stack.cli import app
from stack.config import load_config
from tests.support.servers.hub_server import HubServer, hub_environment, running_hub

CONTENT = b"GGUF" + bytes(1000)
TINY = "hf:someone/tiny-GGUF/tiny.gguf"


@pytest.fixture
def hub(tmp_path: Path) -> Generator[HubServer]:
    with running_hub() as server, hub_environment(server, str(tmp_path)):
        server.put("someone/tiny-GGUF", "tiny.gguf", CONTENT)
        yield server


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["models", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_a_model_is_pulled_listed_and_removed(hub: HubServer, tmp_path: Path) -> None:
    code, pulled, _ = invoke("pull", TINY, "--json")
    path = json.loads(pulled)["path"]
    assert (code, Path(path).read_bytes()) == (0, CONTENT)
    code, listed, _ = invoke("--json")
    listing = json.loads(listed)
    rows = {row["name"]: row for row in listing["models"]}
    assert (code, rows[TINY]["path"], rows[TINY]["disk_bytes"]) == (0, path, len(CONTENT))
    assert rows["gpt-oss-20b"]["size_bytes"] == 12_109_566_560
    assert (rows["gpt-oss-20b"]["disk_bytes"], rows["gpt-oss-20b"]["licence"]) == (0, "Apache-2.0")
    assert listing["folders"] == [f"{tmp_path}/cache/responses-stack/models", f"{tmp_path}/huggingface/hub"]
    assert sum(row["is_suggested"] for row in rows.values()) <= 1
    assert json.loads(invoke("remove", TINY, "--json")[1]) == {"name": TINY, "freed_bytes": len(CONTENT)}
    assert not Path(path).exists()


def test_the_table_says_what_fits_this_machine(hub: HubServer) -> None:
    code, listed, errors = invoke("list")
    lines = listed.splitlines()
    assert (code, errors) == (0, "")
    assert lines[0].startswith("This machine: ")
    assert lines[3].split() == ["NAME", "SIZE", "MEMORY", "FITS", "ON", "DISK", "KIND", "LICENCE"]
    (row,) = (line for line in lines if line.startswith("gpt-oss-120b"))
    assert row.split()[1:5] == ["63.4", "GB", "64.8", "GB"]
    assert max(map(len, lines[3:-2])) < 100


def test_a_model_that_is_not_there_or_is_ones_own_is_not_removed(hub: HubServer, tmp_path: Path) -> None:
    own = tmp_path / "own.gguf"
    own.write_bytes(CONTENT)
    for name, reason in (
        ("gpt-oss-20b", "is not on this machine"),
        ("smollm2-135m-instruct", "is not on this machine"),
        (str(own), "a file of your own"),
        ("gpt-9", "no model 'gpt-9' in the catalogue"),
    ):
        code, output, errors = invoke("remove", name)
        assert (code, output) == (1, "")
        assert reason in errors
    assert own.exists()


def test_models_of_the_command_line_replace_those_of_the_run_config(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    section = {"provider": "llama_cpp", "model_path": "x.gguf", "models": ["a"], "parallel": 3}
    file.write_text(yaml.safe_dump({"inference": section, "kv_store": {"provider": "memory"}}))
    config = load_config(str(file), models=("gpt-oss-20b", "./b.gguf"))
    assert config.inference.fields == {"model": "gpt-oss-20b", "models": ["./b.gguf"], "parallel": 3}
    assert load_config(str(file)).inference.fields["model_path"] == "x.gguf"


@pytest.mark.parametrize("inference", [{"provider": "scripted"}, None, "llama_cpp"])
def test_models_for_another_provider_are_refused(inference: object, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"inference": inference, "kv_store": {"provider": "memory"}}))
    with pytest.raises(ConfigError, match="--model chooses models of the provider llama_cpp"):
        load_config(str(file), models=("gpt-oss-20b",))


def test_check_refuses_a_model_that_no_catalogue_has(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"inference": {"provider": "llama_cpp"}, "kv_store": {"provider": "memory"}}))
    result = CliRunner().invoke(app, ["check", str(file), "--model", "gpt-9"])
    assert result.exit_code == 1
    assert "no model 'gpt-9' in the catalogue: smollm2-135m-instruct" in result.stderr
