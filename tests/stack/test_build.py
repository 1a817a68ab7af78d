"""From names in a run config to live providers, and the sentence for each way in which that can fail."""

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from apis.errors import ConfigError, StoreUnavailable
from apis.imports import ImportFromStringError, import_from_string, install_command
from apis.tool_servers import ToolServers
from providers import PROVIDERS
from stack.api_table import APIS
from stack.build import Stack, open_stack
from stack.config import StackConfig
from stack.wiring import PACKAGE_EXTRAS, wire_providers, wiring_lines
from tests.stack import tiny

SILENT, SEVERAL, BARE, IDLE, QUIET = (
    f"tests.stack.tiny:{name}" for name in ("Silent", "Several", "Bare", "Idle", "Quiet")
)


def config(**sections: Any) -> StackConfig:
    input_items = {"inference": {"provider": SILENT}, "kv_store": {"provider": BARE}, "responses": {"provider": QUIET}}
    return StackConfig.model_validate(input_items | sections)


async def opened(value: StackConfig) -> Stack:
    async with open_stack(value) as stack:
        return stack


async def failure(value: StackConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        await opened(value)
    return str(caught.value)


@pytest.fixture(autouse=True)
def empty_journal() -> Iterator[None]:
    tiny.journal.clear()
    yield
    tiny.journal.clear()


async def test_constructors_get_the_stacks_own_providers_by_type() -> None:
    stack = await opened(config(tool_runtime={"provider": IDLE}))
    assert isinstance(stack.responses, tiny.Quiet)
    assert isinstance(stack.tool_runtime, tiny.Idle)
    assert stack.responses.inference is stack.inference
    assert stack.responses.store is stack.kv_store is stack.tool_runtime.store
    assert stack.responses.tools is stack.tool_runtime


async def test_an_optional_api_that_is_not_configured_is_none() -> None:
    stack = await opened(config())
    assert isinstance(stack.responses, tiny.Quiet)
    assert stack.responses.tools is None
    assert stack.tool_runtime is None


async def test_mcp_has_a_section_of_its_own() -> None:
    stack = await opened(config(tool_servers={"provider": "mcp"}))
    assert stack.specs["tool_servers"].name == "mcp"
    assert isinstance(stack.providers_by_path["tool_servers"], ToolServers)


async def test_members_are_built_of_their_own_sections_to_any_depth() -> None:
    members = {
        "a": {"provider": SILENT, "model": "one"},
        "b": {"provider": SEVERAL, "providers": {"c": {"provider": SILENT, "model": "two"}}},
    }
    stack = await opened(config(inference={"provider": SEVERAL, "providers": members}))
    assert isinstance(stack.inference, tiny.Several)
    one, inner = stack.inference.providers["a"], stack.inference.providers["b"]
    assert isinstance(one, tiny.Silent)
    assert one.config.model == "one"
    assert isinstance(inner, tiny.Several)
    assert list(inner.providers) == ["c"]
    assert tiny.journal[:4] == ["start one", "start two", "start several", "start several"]


async def test_a_provider_starts_after_what_it_needs_and_closes_before_it() -> None:
    await opened(config(tool_runtime={"provider": IDLE}))
    assert tiny.journal == [
        *("start silent", "start store", "start tools", "start responses"),
        *("close responses", "close tools", "close store", "close silent"),
    ]


async def test_a_start_that_fails_closes_what_had_started_and_itself() -> None:
    members = {"a": {"provider": SILENT, "model": "one"}, "b": {"provider": SILENT, "start": "config_error"}}
    error_text = await failure(config(inference={"provider": SEVERAL, "providers": members}))
    assert error_text == "config: inference.providers.b: there is no such model. Name another."
    assert tiny.journal == ["start one", "start silent", "close silent", "close one"]


async def test_what_cannot_be_reached_at_the_start_keeps_its_type_and_notes_its_place() -> None:
    with pytest.raises(StoreUnavailable) as caught:
        await opened(config(inference={"provider": SILENT, "start": "unavailable"}))
    assert caught.value.__notes__ == ["config: inference"]


async def test_an_error_in_use_closes_everything() -> None:
    with pytest.raises(ZeroDivisionError):
        async with open_stack(config()):
            _ = 1 / 0
    assert tiny.journal[-3:] == ["close responses", "close store", "close silent"]


KNOWN = ", ".join(sorted(PROVIDERS["inference"]))
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown name": (
        {"provider": "vlm"},
        f"inference.provider: there is no inference provider 'vlm'. Known ones: {KNOWN}; a class of your own is named "
        '"package.module:Class".',
    ),
    "no such module": (
        {"provider": "tests.stack.nowhere:Class"},
        'inference.provider: the provider cannot be imported. There is no module "tests.stack.nowhere".',
    ),
    "no such class": (
        {"provider": "tests.stack.tiny:Nothing"},
        'inference.provider: the provider cannot be imported. The module "tests.stack.tiny" has no "Nothing".',
    ),
    "no class": (
        {"provider": "tests.stack.tiny:"},
        'inference.provider: the provider cannot be imported. "tests.stack.tiny:" is not of the form '
        '"package.module:Class".',
    ),
    "of another API": (
        {"provider": BARE},
        'inference.provider: "tests.stack.tiny:Bare" is no provider of inference: it has to be a class made from '
        "Inference.",
    ),
    "unknown field": (
        {"provider": SILENT, "modle": "x"},
        "inference.modle: is not a known key. Did you mean 'model'?",
    ),
    "wrong type in one branch of several": (
        {"provider": SILENT, "urls": {"a": 1}},
        "inference.urls: Input should be a valid string.",
    ),
    "no word of a field that takes words or a mapping": (  # G-A15
        {"provider": "vllm", "reasoning_tags": "banana"},
        "inference.reasoning_tags: must be 'think', 'think-open', 'deepseek-r1', 'magistral' or 'seed-oss' or 'auto'.",
    ),
    "missing field": (
        {"provider": SEVERAL},
        "inference.providers: must be a mapping of names to inference sections, each with its provider.",
    ),
    "member of another form": (
        {"provider": SEVERAL, "providers": {"a": "vllm"}},
        "inference.providers.a: must be a mapping of keys to values.",
    ),
    "member without provider": (
        {"provider": SEVERAL, "providers": {"a": {}}},
        "inference.providers.a.provider: is required.",
    ),
    "member's field": (
        {"provider": SEVERAL, "providers": {"a": {"provider": SILENT, "nothing": 1}}},
        "inference.providers.a.nothing: is not a known key. Known keys: answer, api_key, chat, close, model, seconds, "
        "start, url, urls.",
    ),
    "a constructor without config": (
        {"provider": "tests.stack.tiny:Careless"},
        "inference.provider: the constructor of Careless takes no 'config', which it is given.",
    ),
    "a constructor that asks for something else": (
        {"provider": "tests.stack.tiny:Greedy"},
        "inference.provider: the constructor of Greedy takes 'size', whose type is not an API. A provider's "
        "constructor takes its config, APIs (X, or X | None), Mapping[str, X] of them, and Tenants.",
    ),
}


@pytest.mark.parametrize(("section", "expected"), MISTAKES.values(), ids=MISTAKES.keys())
async def test_an_invalid_section_is_an_error_with_its_path(section: dict[str, Any], expected: str) -> None:
    assert await failure(config(inference=section)) == f"config: {expected}"
    assert tiny.journal == []


async def test_a_circle_names_everyone_in_it() -> None:
    error_text = await failure(config(inference={"provider": "tests.stack.tiny:Circular"}))
    assert error_text == (
        "config: the providers need each other in a circle: inference (tests.stack.tiny:Circular) -> responses "
        "(tests.stack.tiny:Quiet) -> inference (tests.stack.tiny:Circular). Choose another for one."
    )


async def test_a_needed_api_that_is_missing_names_who_needs_it() -> None:
    members = {"a": {"provider": "tests.stack.tiny:Handy"}}
    assert await failure(config(inference={"provider": SEVERAL, "providers": members})) == (
        "config: tool_runtime: is required by inference (tests.stack.tiny:Several) -> inference.providers.a "
        "(tests.stack.tiny:Handy). Add the section tool_runtime."
    )


@pytest.mark.parametrize(
    ("package", "remedy"), [("redis", install_command("redis")), ("somepackage", "pip install somepackage")]
)
def test_a_missing_package_is_an_error_with_the_command_to_install_it(
    package: str, remedy: str, tmp_path: Path
) -> None:
    name = f"needs_{package}"
    (tmp_path / f"{name}.py").write_text(f"import {package}.asyncio\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(tmp_path), *sys.path])
        patch.setitem(sys.modules, package, None)
        with pytest.raises(ConfigError) as caught:
            wire_providers(config(inference={"provider": f"{name}:Class"}))
    assert str(caught.value) == (
        f"config: inference.provider: the provider '{name}:Class' needs the package {package}, which is not "
        f"installed. Run: {remedy}"
    )


def test_every_extra_is_one_of_the_packages_own() -> None:
    extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    for package, extra in PACKAGE_EXTRAS.items():
        assert any(requirement.replace("-", "_").startswith(package) for requirement in extras[extra])


def test_an_error_within_an_imported_module_is_not_taken_for_its_absence(tmp_path: Path) -> None:
    (tmp_path / "broken_module.py").write_text("import absent_package_of_nobody\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(tmp_path), *sys.path])
        with pytest.raises(ModuleNotFoundError, match="absent_package_of_nobody"):
            import_from_string("broken_module:Class")
        with pytest.raises(ImportFromStringError, match="no module"):
            import_from_string("broken_module_of_nobody:Class")


def test_every_api_has_providers_and_every_provider_an_api() -> None:
    assert APIS.keys() == PROVIDERS.keys()


def test_the_wiring_is_shown_without_secrets() -> None:
    section = {
        "provider": SILENT,
        "model": "m",
        "api_key": "sk-secret",
        "url": "redis://me:sk-secret@host/0",
        "urls": ["http://a", "http://sk-secret@b"],
        "seconds": 2,
    }
    lines = wiring_lines(wire_providers(config(inference={"provider": SEVERAL, "providers": {"a": section}})))
    assert lines[0].split() == ["inference", SEVERAL, "providers=a"]
    (line,) = (line for line in wiring_lines(wire_providers(config(inference=section))) if line.startswith("inference"))
    assert line.split() == [
        *("inference", SILENT, "model=m", "url=redis://...@host/0"),
        *("urls=http://a,http://...@b", "seconds=2.0"),
    ]


def test_a_long_fact_is_cut() -> None:
    line = wiring_lines(wire_providers(config(inference={"provider": SILENT, "model": "m" * 200})))[0]
    assert line.endswith("mmm...")
    assert len(line) < 150
