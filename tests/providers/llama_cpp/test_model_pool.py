"""Several models in one stack: loaded on demand, unloaded for others, never while in use. Real engines, one small file
under several names."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from apis.errors import ConfigError, ModelNotFound, UpstreamError
from providers.inference.llama_cpp.provider import LlamaCpp
from providers.inference.model_files.packages import PACKAGED_MODELS, models_dir
from tests.conformance.inference import drain
from tests.providers.llama_cpp.asking import MODEL, chat_request, text_of
from tests.support.models.small_gguf import small_gguf
from tests.support.servers.ended_processes import running_children
from tests.support.servers.hub_server import hub_environment, running_hub
from tests.support.servers.serving import serving
from tests.support.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.usefixtures("small_file")]

ONE_GB, TWO_GB = 0.2, 0.35
"""Memory for one and for two of the models, with the context of `pooled`."""
LONG = {"max_completion_tokens": 400, "logit_bias": {"2": -100.0}}


def weights() -> Path:
    return small_gguf(models_dir() / PACKAGED_MODELS[MODEL].filename)


def engines() -> set[int]:
    """Return the ids of this process's engines."""
    return {child.pid for child in running_children("llama_cpp/child.py")}


def section(folder: Path, names: str, **fields: Any) -> dict[str, Any]:
    paths: list[str] = []
    for name in names:
        path = folder / f"{name}.gguf"
        path.symlink_to(weights())
        paths.append(str(path))
    few = {"threads": 1, "context_tokens": 512, "parallel": 1, "prompt_cache_mib": 0, "min_loaded_s": 0}
    return {"model": paths[0], "models": paths[1:], **few, **fields}


@asynccontextmanager
async def pooled(folder: Path, names: str, **fields: Any) -> AsyncGenerator[LlamaCpp]:
    inference = LlamaCpp(LlamaCpp.Config.model_validate(section(folder, names, **fields)), None)
    try:
        async with asyncio.timeout(60):
            await inference.start()
            yield inference
    finally:
        await inference.close()


async def answer(inference: LlamaCpp, model: str, **fields: Any) -> str:
    request = chat_request("Say hi.", **{"max_completion_tokens": 4, **fields}).model_copy(update={"model": model})
    return text_of(await drain(inference, request))


def unloaded(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line.split()[2] for line in caplog.messages if "was unloaded" in line]


@pytest.mark.long
async def test_models_take_turns_if_memory_holds_only_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    others = engines()
    async with pooled(tmp_path, "abc", memory_gb=TWO_GB) as inference:
        assert [model.id for model in await inference.models()] == ["a", "b", "c"]
        assert {model.context_tokens for model in await inference.models()} == {512}
        assert len(engines() - others) == 1
        for model in "abac":
            assert await answer(inference, model)
        assert unloaded(caplog) == ["b"]
        assert len(engines() - others) == 2
        with pytest.raises(ModelNotFound, match="a, b, c"):
            await answer(inference, "d")
    assert engines() == others


async def test_a_model_in_use_is_not_unloaded_and_does_not_keep_others_waiting(tmp_path: Path) -> None:
    finished: list[str] = []

    async def run(inference: LlamaCpp, label: str, **fields: Any) -> None:
        assert await answer(inference, label[0], **fields)
        finished.append(label)

    async with pooled(tmp_path, "ab", memory_gb=ONE_GB) as inference:
        request = chat_request("Write a very long story.", **LONG).model_copy(update={"model": "a"})
        async with aclosing(inference.chat(request)) as batches:
            await anext(batches)
            waiting = [asyncio.create_task(run(inference, label)) for label in ("b1", "a2", "a3")]
            await asyncio.sleep(0)
            assert await inference.count_tokens(request) > 0
            async for _ in batches:
                assert not finished
        await asyncio.gather(*waiting)
    assert finished == ["b1", "a2", "a3"]


async def test_a_model_that_cannot_be_loaded_says_so_and_others_go_on(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(weights().read_bytes()[:2_000_000])
    async with pooled(tmp_path, "a", models=[str(bad)], memory_gb=TWO_GB) as inference:
        with pytest.raises(UpstreamError, match=r"could not load .*bad\.gguf"):
            await answer(inference, "bad")
        before = asyncio.get_running_loop().time()
        with pytest.raises(UpstreamError, match=r"bad\.gguf"):
            await answer(inference, "bad")
        assert asyncio.get_running_loop().time() - before < 0.2
        assert await answer(inference, "a")
        assert len(await inference.models()) == 2


@pytest.mark.long
async def test_a_caller_that_leaves_does_not_stop_the_load(tmp_path: Path) -> None:
    async with pooled(tmp_path, "ab", memory_gb=TWO_GB) as inference:
        others = engines()
        leaving = asyncio.create_task(answer(inference, "b"))
        await until(lambda: engines() - others, within_s=20)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        loading = engines() - others
        assert await answer(inference, "b")
        assert engines() - others == loading


async def test_a_stack_that_ends_while_a_model_loads_leaves_no_process(tmp_path: Path) -> None:
    others = engines()
    async with pooled(tmp_path, "abc", memory_gb=ONE_GB) as inference:
        waiting = [asyncio.create_task(answer(inference, name)) for name in "bcb"]
        loaded = engines() - others
        await until(lambda: engines() - others - loaded, within_s=20)
        await inference.close()
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(outcome, Exception | asyncio.CancelledError) for outcome in outcomes)
    assert engines() == others


@pytest.mark.long
async def test_a_client_finds_all_models_and_uses_the_one_it_names(tmp_path: Path) -> None:
    inference = {"provider": "llama_cpp", **section(tmp_path, "ab", memory_gb=ONE_GB)}
    async with serving(inference) as served:
        assert [model.id async for model in served.client.models.list()] == ["a", "b"]
        for name in "ab":
            response = await served.client.responses.create(model=name, input="Say hi.", max_output_tokens=16)
            assert (response.model, bool(response.output_text)) == (name, True)


@pytest.mark.long
async def test_a_model_of_the_hub_is_fetched_and_served(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    content = weights().read_bytes()
    with running_hub() as hub, hub_environment(hub, str(tmp_path)):
        hub.put("someone/smol-GGUF", "Smol-Q4.gguf", content)
        few = {"threads": 1, "context_tokens": 512, "parallel": 1}
        inference = LlamaCpp(
            LlamaCpp.Config.model_validate({"model": "hf:someone/smol-GGUF/Smol-Q4.gguf", **few}), None
        )
        try:
            await inference.start()
            assert await answer(inference, "Smol-Q4")
        finally:
            await inference.close()
        printed = capfd.readouterr().err
        assert "is there and verified" in printed
        assert "This machine: " in printed
        assert "stack run local --model" in printed
        small = LlamaCpp.Config.model_validate({"model": "hf:someone/smol-GGUF/other.gguf", "memory_gb": 0.01})
        hub.put("someone/smol-GGUF", "other.gguf", content + b"other")
        with pytest.raises(ConfigError, match=r"has 0\.0 GB, and models may take 0\.0 GB"):
            await LlamaCpp(small, None).start()
        assert len(hub.ranges()) == 1
