"""Backend selection: runs a checkpoint on the Triton kernels where they can run, else on torch, and logs the reason."""

import importlib.util
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import torch

from apis.errors import ConfigError
from apis.imports import import_from_string
from providers.inference.gpt_oss.checkpoint.checkpoint import ModelCheckpoint, Progress, open_checkpoint
from providers.inference.gpt_oss.engine.runner import Runner
from providers.inference.gpt_oss.settings import BackendSettings
from providers.inference.gpt_oss.sizing.fit import MIN_CONTEXT_TOKENS, Precision, weight_bytes
from providers.inference.gpt_oss.sizing.kv_memory import KV_SHARE, int8_unembedding_bytes
from providers.inference.gpt_oss.torch_backend.machine import free_bytes
from providers.inference.gpt_oss.torch_backend.runner import DTYPES, TorchSettings, find_device, load_runner

MIN_CAPABILITY: Final = 80
_GIB: Final = 2**30

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GpuInfo:
    """Facts about the device that kernels would run on: `capability` 90 stands for 9.0, None for no CUDA device."""

    has_triton: bool
    capability: int | None
    free_bytes: int


class LoadedRunner(Runner, Protocol):
    """A Runner that reports the bytes of memory its keys and values take."""

    @property
    def kv_bytes(self) -> int: ...


def load_backend(
    path: str | Path, settings: BackendSettings, progress: Callable[[Progress], None] | None = None
) -> LoadedRunner:
    """Open, check and load a checkpoint on the configured backend; `auto` takes torch where Triton cannot run.

    Raises ConfigError as `load_runner` does, and, before anything is loaded, for `triton` where it cannot run, and for
    a `certified_head` without kernels.
    """
    if settings.backend == "torch":
        if settings.certified_head:
            raise ConfigError("certified_head is for our own kernels alone: set backend: triton or auto.")
        return load_runner(path, settings.torch, progress)
    device = find_device(settings.torch.device)
    checkpoint = open_checkpoint(path)
    refusal = find_triton_obstacle(
        checkpoint, settings.torch, detect_gpu(device), certified_head=settings.certified_head
    )
    if refusal is None:
        os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton's default, which it warns of changing
        probe: Callable[[torch.device], str | None] = import_from_string(
            "providers.inference.gpt_oss.triton_backend.probe:probe_triton"
        )
        refusal = probe(device)
    if refusal is None:
        load: Callable[..., LoadedRunner] = import_from_string(
            "providers.inference.gpt_oss.triton_backend.runner:load_triton_runner"
        )
        logger.info("%s runs on Triton kernels, on %s.", checkpoint.folder, torch.cuda.get_device_name(device))
        return load(checkpoint, device, settings, progress)
    if settings.backend == "triton":
        raise ConfigError(f"backend: triton cannot run {checkpoint.folder}: {refusal} Use backend: auto or torch.")
    level = logging.INFO if device.type == "cpu" else logging.WARNING
    logger.log(level, "%s runs on torch, not on Triton kernels: %s", checkpoint.folder, refusal)
    return load_runner(path, settings.torch, progress)


def detect_gpu(device: torch.device) -> GpuInfo:
    """Return the facts about `device`, without starting anything on it."""
    triton = importlib.util.find_spec("triton") is not None
    if device.type != "cuda" or torch.version.cuda is None:
        return GpuInfo(triton, None, 0)
    major, minor = torch.cuda.get_device_capability(device)
    return GpuInfo(triton, 10 * major + minor, free_bytes(device))


def find_triton_obstacle(
    checkpoint: ModelCheckpoint, settings: TorchSettings, gpu: GpuInfo, *, certified_head: bool = False
) -> str | None:
    """Return why the kernels cannot run here, and the remedy; None where they can."""
    spec, dtype = checkpoint.spec, DTYPES[settings.dtype]
    context = min(settings.context_tokens or MIN_CONTEXT_TOKENS, spec.context_tokens)
    kv_memory_gib = settings.kv_memory_gib
    context_bytes = context * spec.kv_bytes(dtype.itemsize) / KV_SHARE
    cached_bytes = context_bytes if kv_memory_gib is None else kv_memory_gib * _GIB
    needed_bytes = weight_bytes(spec, Precision(dtype.itemsize, experts_packed=True)) + cached_bytes
    needed_bytes += int8_unembedding_bytes(spec) if certified_head else 0
    if not gpu.has_triton:
        return "the package triton is not installed (pip install triton)."
    if gpu.capability is None:
        return f"device {settings.device} is no GPU with a CUDA driver."
    if gpu.capability < MIN_CAPABILITY:
        return f"the GPU's compute capability is {gpu.capability / 10:.1f}, and 8.0 is the least."
    if settings.dtype != "bfloat16":
        return f"dtype is {settings.dtype}, and the kernels compute in bfloat16."
    if needed_bytes > gpu.free_bytes:
        return f"it needs about {needed_bytes / _GIB:.1f} GiB and {gpu.free_bytes / _GIB:.1f} GiB are free."
    if not checkpoint.experts_packed:
        return "its experts are not in MXFP4, which is all that the kernels read."
    return None
