"""`stack run local --tools`: what this machine cannot run is left out, with the reason, and the rest is served."""

import importlib.util
import shutil
from importlib.machinery import ModuleSpec

import pytest
from typer.testing import CliRunner

from apis.inference import Inference
from stack.build import build_providers
from stack.cli import app
from stack.doctor import local_tools
from stack.wiring import load_wired_config


def test_the_config_has_all_tools_where_everything_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_tools, "find_sandbox_fault", lambda: "")
    assert local_tools.find_missing_parts() == {}
    config, specs = load_wired_config("local-tools", models=["qwen3-4b"])
    assert {"tool_runtime", "tool_servers", "vector_stores", "files"} <= specs.keys()
    assert config.inference.fields["providers"]["local"]["model"] == "qwen3-4b"


def test_parts_that_cannot_work_are_left_out_with_their_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without bubblewrap and without the packages of files and MCP serves what is left: the model."""
    found = importlib.util.find_spec

    def find_some(name: str) -> ModuleSpec | None:
        return None if name in ("sqlite_vec", "mcp") else found(name)

    def find_no_program(_name: str) -> None:
        return None

    monkeypatch.setattr(importlib.util, "find_spec", find_some)
    monkeypatch.setattr(shutil, "which", find_no_program)
    missing = local_tools.find_missing_parts()
    assert missing.keys() == {"vector_stores", "inference.providers.embeddings", "tool_servers", "tool_runtime"}
    assert "bubblewrap" in missing["tool_runtime"]
    assert "[mcp]" in missing["tool_servers"]
    assert "vector_stores" in missing["inference.providers.embeddings"]
    _, specs = load_wired_config("local-tools", left_out=missing)
    assert not {"tool_runtime", "tool_servers", "vector_stores"} & specs.keys()
    assert specs["inference"].members["providers"].keys() == {"local"}


def test_a_config_of_ones_own_has_its_tools_in_it() -> None:
    result = CliRunner().invoke(app, ["run", "mine.yaml", "--tools"])
    assert result.exit_code == 78
    assert result.stderr == (
        "--tools belongs to `stack run local --tools`. Write the tools into mine.yaml: stack init tools\n"
    )


@pytest.mark.parametrize(("name", "path"), [("local", "inference"), ("local-tools", "inference.providers.local")])
def test_the_local_model_fetches_others(name: str, path: str) -> None:
    """The packaged configs build the installer that the page uses."""
    config, specs = load_wired_config(name)
    _, providers = build_providers(config, specs, ("inference",))
    (local,) = (provider for spec, provider in providers if spec.path == path)
    assert isinstance(local, Inference)
    assert local.installer() is not None
