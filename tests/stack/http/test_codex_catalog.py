"""`GET /v1/models?client_version=`: the models as Codex reads them."""

from typing import Any

from tests.support.models.described_model import DESCRIBED
from tests.support.servers.serving import serving

REQUIRED = {
    *("slug", "display_name", "supported_reasoning_levels", "shell_type", "visibility", "supported_in_api", "priority"),
    *("base_instructions", "support_verbosity", "truncation_policy", "experimental_supported_tools"),
    *("supports_parallel_tool_calls", "supports_reasoning_summaries"),
}
"""The fields without which a version of Codex refuses a catalog."""


async def read_catalog(inference: dict[str, Any], query: str = "?client_version=0.171.0") -> Any:
    async with serving(inference) as served:
        client: Any = served.client
        return await client.get(f"/models{query}", cast_to=object)


async def test_a_model_has_its_window_its_inputs_and_its_efforts() -> None:
    catalog = await read_catalog({"provider": DESCRIBED, "model": "gpt-oss-20b", "modalities": ["image"]})
    (model,) = catalog["models"]
    assert set(model) >= REQUIRED
    assert (model["slug"], model["context_window"]) == ("gpt-oss-20b", 131_072)
    assert model["input_modalities"] == ["text", "image"]
    assert [level["effort"] for level in model["supported_reasoning_levels"]] == ["low", "medium", "high"]
    assert model["default_reasoning_level"] == "medium"
    assert (model["shell_type"], model["apply_patch_tool_type"]) == ("unified_exec", "freeform")
    assert "*** Begin Patch" in model["base_instructions"]


async def test_nothing_is_invented_for_a_model_of_which_nothing_is_known() -> None:
    section = {"provider": DESCRIBED, "context_tokens": None, "has_efforts": False}
    (model,) = (await read_catalog(section))["models"]
    assert (model["context_window"], model["input_modalities"]) == (None, ["text"])
    assert (model["default_reasoning_level"], model["supported_reasoning_levels"]) == (None, [])


async def test_models_of_a_router_come_with_their_aliases() -> None:
    one = {"provider": DESCRIBED, "model": "one"}
    section = {"provider": "router", "providers": {"a": one, "b": {"provider": "scripted", "model": "two"}}}
    catalog = await read_catalog({**section, "aliases": {"fast": "one"}})
    efforts = {model["slug"]: len(model["supported_reasoning_levels"]) for model in catalog["models"]}
    assert efforts == {"one": 3, "two": 0, "fast": 3}
    assert sorted(model["priority"] for model in catalog["models"]) == [0, 1, 2]


async def test_other_clients_get_the_list_that_they_know() -> None:
    listing = await read_catalog({"provider": DESCRIBED, "model": "one"}, "")
    assert listing["object"] == "list"
    assert [model["id"] for model in listing["data"]] == ["embedder", "one"]
