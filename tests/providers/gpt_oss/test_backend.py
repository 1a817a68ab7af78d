"""Which backend is taken: the order of what may be missing, a line of why, and an error where one was asked for."""

import importlib.util
import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from apis.errors import ConfigError
from providers.inference.gpt_oss.backend import (
    BackendSettings,
    GpuInfo,
    LoadedRunner,
    detect_gpu,
    find_triton_obstacle,
    load_backend,
)
from providers.inference.gpt_oss.checkpoint.checkpoint import Progress, open_checkpoint
from providers.inference.gpt_oss.sizing.fit import Precision, weight_bytes
from providers.inference.gpt_oss.sizing.kv_memory import int8_unembedding_bytes
from providers.inference.gpt_oss.torch_backend.runner import TorchRunner, TorchSettings
from providers.inference.gpt_oss.triton_backend.runner import load_triton_runner
from tests.support.models.random_checkpoints import TINY, SaveFormat, write_checkpoint

GOOD = GpuInfo(has_triton=True, capability=90, free_bytes=2**40)
SETTINGS = TorchSettings(device="cpu", threads=1, slots=2, context_tokens=256)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(path, replace(TINY, layers=TINY.layers[:1]))
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"capability": 80}, None),
        ({"free_bytes": 1000}, r"needs about 0\.0 GiB"),
        ({"free_bytes": 1000, "capability": 75}, r"capability is 7\.5"),
        ({"capability": None}, "device auto is no GPU with a CUDA driver"),
        ({"capability": None, "has_triton": False}, "pip install triton"),
    ],
)
def test_the_first_thing_that_is_missing_is_named(folder: Path, changes: dict[str, int], message: str | None) -> None:
    refusal = find_triton_obstacle(open_checkpoint(folder), TorchSettings(), replace(GOOD, **changes))
    assert refusal is None if message is None else re.search(message, refusal or "")


def test_the_unembeddings_copy_is_counted_before_it_is_made(folder: Path) -> None:
    checkpoint, settings = open_checkpoint(folder), TorchSettings(context_tokens=256)
    needed = weight_bytes(checkpoint.spec, Precision(2, experts_packed=True)) + 320 * checkpoint.spec.kv_bytes(2)
    assert find_triton_obstacle(checkpoint, settings, replace(GOOD, free_bytes=needed)) is None
    short = replace(GOOD, free_bytes=needed + int8_unembedding_bytes(checkpoint.spec) - 1)
    assert "GiB are free" in (find_triton_obstacle(checkpoint, settings, short, certified_head=True) or "")
    enough = replace(GOOD, free_bytes=short.free_bytes + 1)
    assert find_triton_obstacle(checkpoint, settings, enough, certified_head=True) is None


def test_other_types_and_unpacked_experts_are_torchs(folder: Path, tmp_path: Path) -> None:
    assert "dtype is float32" in (
        find_triton_obstacle(open_checkpoint(folder), TorchSettings(dtype="float32"), GOOD) or ""
    )
    write_checkpoint(tmp_path, replace(TINY, layers=TINY.layers[:1]), SaveFormat("dense"))
    assert "MXFP4" in (find_triton_obstacle(open_checkpoint(tmp_path), TorchSettings(), GOOD) or "")


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_without_a_gpu_it_runs_on_torch_and_says_so_once(
    folder: Path, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = BackendSettings("auto" if backend == "auto" else "torch", torch=SETTINGS)
    with caplog.at_level(logging.INFO):
        runner: LoadedRunner = load_backend(folder, settings)
    assert isinstance(runner, TorchRunner)
    messages = [each.getMessage() for each in caplog.records if "runs on" in each.getMessage()]
    assert len(messages) == (backend == "auto")
    assert all("runs on torch, not on Triton kernels: device cpu is no GPU" in each for each in messages)


def test_asked_for_by_name_it_runs_or_nothing_does(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"backend: triton cannot run .*no GPU.*backend: auto or torch"):
        load_backend(folder, BackendSettings("triton", torch=SETTINGS))


def test_a_certified_head_without_kernels_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="certified_head is for our own kernels"):
        load_backend(folder, BackendSettings("torch", certified_head=True, torch=SETTINGS))


def test_memory_for_keys_and_values_is_counted_too(folder: Path) -> None:
    """The runner takes a share of the memory after the weights, or the configured size."""
    checkpoint = open_checkpoint(folder)
    weights = weight_bytes(checkpoint.spec, Precision(2, experts_packed=True))
    tight = replace(GOOD, free_bytes=weights + 256 * checkpoint.spec.kv_bytes(2))
    assert "GiB are free" in (find_triton_obstacle(checkpoint, TorchSettings(context_tokens=256), tight) or "")
    roomy = replace(GOOD, free_bytes=weights + 320 * checkpoint.spec.kv_bytes(2))
    assert find_triton_obstacle(checkpoint, TorchSettings(context_tokens=256), roomy) is None
    settings = TorchSettings(context_tokens=256, kv_memory_gib=2000)
    assert "needs about 2000.0 GiB" in (find_triton_obstacle(checkpoint, settings, GOOD) or "")


def test_too_few_pages_are_refused_before_anything_is_loaded(folder: Path) -> None:
    reports: list[Progress] = []
    settings = BackendSettings("triton", torch=replace(SETTINGS, kv_memory_gib=1e-6))
    with pytest.raises(ConfigError, match="raise kv_memory_gib"):
        load_triton_runner(open_checkpoint(folder), torch.device("cpu"), settings, reports.append)
    assert reports == []


def test_a_cpu_is_no_card() -> None:
    gpu = detect_gpu(torch.device("cpu"))
    assert gpu == GpuInfo(importlib.util.find_spec("triton") is not None, None, 0)
