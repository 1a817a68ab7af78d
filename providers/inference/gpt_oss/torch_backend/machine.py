"""Measures a device: its free memory, how fast it reads weights and how fast it unpacks them."""

import time
from collections.abc import Callable
from typing import Final

import torch
from torch.nn.functional import linear

from providers.common.machine import read_memory
from providers.inference.gpt_oss.checkpoint.mxfp4 import UnpackScratch, unpack
from providers.inference.gpt_oss.sizing.fit import Machine

_SIDE: Final = 2880
_ROWS: Final = 8192


def measure_device(device: torch.device, dtype: torch.dtype) -> Machine:
    """Measure the device. Takes about a tenth of a second and 64 MiB."""
    weights = torch.ones(_ROWS, _SIDE, dtype=dtype, device=device)
    vector = torch.ones(1, _SIDE, dtype=dtype, device=device)
    blocks = torch.zeros(_SIDE, _SIDE // 32, 16, dtype=torch.uint8, device=device)
    scales = torch.full((_SIDE, _SIDE // 32), 127, dtype=torch.uint8, device=device)
    scratch = UnpackScratch(_SIDE * _SIDE, dtype, device)
    read_s = _best_time_s(lambda: linear(vector, weights), device)
    unpack_s = _best_time_s(lambda: unpack(blocks, scales, dtype, scratch), device)
    return Machine(str(device), free_bytes(device), weights.nbytes / read_s, _SIDE * _SIDE / unpack_s)


def free_bytes(device: torch.device) -> int:
    """Return the available memory: of the card, or of the machine within its control groups."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return read_memory().free_bytes


def _best_time_s(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the best of three runs, after one to warm up."""
    times: list[float] = []
    for _ in range(4):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times[1:])
